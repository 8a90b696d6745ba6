"""verl's functions for TensorDicts."""

import pytest
import torch

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.errors import ConflictError, LengthError


def jagged_rows(*lengths):
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    start, rows = 0, []
    for n in lengths:
        rows.append(torch.arange(start, start + n))
        start += n
    return nested_tensor_from_tensor_list(rows)


def lengths_of(nested):
    return nested.offsets().diff().tolist()


def test_jagged_helpers():
    from verl.utils import tensordict_utils as tu

    td = tu.get_tensordict(
        {"ids": jagged_rows(2, 1, 3, 2), "x": torch.arange(4), "uid": list("abcd")},
        {"temperature": 0.5},
    )
    halves = tu.chunk_tensordict(td, 2)
    assert [lengths_of(h["ids"]) for h in halves] == [[2, 1], [3, 2]]
    assert halves[1]["x"].tolist() == [2, 3]
    assert tu.get(halves[1], "uid") == ["c", "d"]
    assert tu.get(tu.assign_non_tensor(halves[1], top_p=0.8), "top_p") == 0.8
    assert tu.pop(halves[1], "top_p") == 0.8
    assert tu.get(halves[1], "temperature") == 0.5
    back = tu.concat_tensordict(halves)
    tu.assert_tensordict_eq(back, td)
    chosen = tu.index_select_tensor_dict(td, [3, 0])
    assert chosen["ids"].values().tolist() == [6, 7, 0, 1]
    assert tu.get(chosen, "uid") == ["d", "a"]
    with pytest.raises(LengthError, match="4 rows do not divide into 3"):
        tu.chunk_tensordict(td, 3)
    with pytest.raises(ConflictError, match="'x'"):
        tu.assert_tensordict_eq(td, tu.get_tensordict({**dict(td.items()), "x": torch.ones(4)}))


def test_padding_of_tensordicts():
    from verl.utils import tensordict_utils as tu

    td = tu.get_tensordict({"ids": jagged_rows(2, 1, 3), "uid": list("abc")})
    padded, pad = tu.pad_to_divisor(td, 4)
    assert (len(padded), pad) == (4, 1)
    assert lengths_of(padded["ids"]) == [2, 1, 3, 2]
    tu.assert_tensordict_eq(tu.unpad(padded, pad), td)
    assert tu.pop(td, "uid") == ["a", "b", "c"]
    assert tu.get(td, "uid", "none") == "none"


def test_a_tensordict_of_dicts():
    from verl.utils import tensordict_utils as tu

    rows = [{"ids": torch.arange(n), "s": torch.tensor(n), "name": str(n)} for n in (2, 3)]
    td = tu.list_of_dict_to_tensordict(rows)
    assert lengths_of(td["ids"]) == [2, 3]
    assert td["s"].tolist() == [2, 3]
    assert tu.get(td, "name") == ["2", "3"]
