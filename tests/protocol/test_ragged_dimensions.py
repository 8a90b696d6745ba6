"""Fields that are ragged in the last dimension, as multimodal position ids [B, 3, T*] are."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto, collate_fn
from quadriga.protocol.values import equal_jagged


def positions() -> list[torch.Tensor]:
    """Return the rows: [3, 2], [3, 0], [3, 3] and [3, 1]."""
    return [torch.arange(3 * t).view(3, t) + 100 * i for i, t in enumerate((2, 0, 3, 1))]


def batch() -> DataProto:
    nested = torch.nested.nested_tensor(positions(), layout=torch.jagged)
    return DataProto.from_dict({"p": nested})


def rows(data: DataProto) -> list[list[list[int]]]:
    return [row.tolist() for row in data.batch["p"].unbind()]


def expected(*order: int) -> list[list[list[int]]]:
    return [positions()[i].tolist() for i in order]


def test_rows_keep_their_shape(form):
    data = form(batch())
    assert "[4, 3, *]" in data.describe()
    assert data.batch["p"].shape[:2] == (4, 3) and rows(data) == expected(0, 1, 2, 3)
    assert rows(form(batch())[1:3]) == expected(1, 2)
    assert rows(form(batch())[[3, 0, 0]]) == expected(3, 0, 0)
    assert rows(DataProto.concat([form(batch())[2:], batch()])) == expected(2, 3, 0, 1, 2, 3)
    assert form(batch())[2].batch["p"].tolist() == positions()[2].tolist()
    assert rows(collate_fn(list(form(batch())))) == expected(0, 1, 2, 3)
    assert len(form(batch()).union(batch())) == 4
    assert rows(pickle.loads(pickle.dumps(form(batch())))) == expected(0, 1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.float8_e8m0fnu])
def test_rows_inside_a_nested_tensordict(form, dtype):
    """Rows with holes between them, of dtypes that torch hardly knows; a part without rows."""
    values = torch.arange(48, dtype=torch.uint8).repeat(1, 4)[0].view(dtype)
    nested = torch.nested.nested_tensor_from_jagged(
        values[:20], torch.tensor([0, 8, 16, 20]), lengths=torch.tensor([3, 1, 2])
    )
    data = DataProto.from_dict({"q": TensorDict({"j": nested}, [3])})
    wide = [form(data)[[2, 0]], form(data)[:0], data[:0], copy.deepcopy(data)]
    found = DataProto.concat(wide).batch["q"]["j"]
    assert [len(row) for row in found.unbind()] == [2, 3, 3, 1, 2]
    assert torch.equal(found.unbind()[0].view(torch.uint8), values[16:18].view(torch.uint8))
    assert len(collate_fn(list(data)).batch["q"]["j"].unbind()) == 3


def test_other_ragged_dimensions_do_not_fit(form):
    other = torch.nested.nested_tensor_from_jagged(torch.zeros(4, 3), torch.arange(5))
    with pytest.raises(FieldError, match="field 'p' cannot be concatenated"):
        DataProto.concat([form(batch()), form(DataProto.from_dict({"p": other}))])
    assert not equal_jagged(batch().batch["p"], other)
    with pytest.raises(FieldError, match=r"field 'p' is \[4, 3, \*\] int64 and has no columns"):
        form(batch()).unfold_column_chunks(2, ["p"])
