"""Values are sent unchanged or refused by name; none is altered silently."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto, Origin
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result


def sent(data, store):
    """Return a batch as a worker receives it, with every field in the store."""
    return unpack_argument(pack_argument(data, store))


def test_strings_inside_a_nested_tensordict_are_sent(store):
    inner = TensorDict({"x": torch.arange(3), "s": NonTensorStack("a", "b", "c")}, [3])
    data = DataProto.from_dict({"tree": inner})
    for found in (sent(data, store), unpack_result(pack_result(data, Origin("a", 0, "m")))):
        assert found.batch["tree"]["s"] == ["a", "b", "c"]
        assert isinstance(found.batch["tree"].get("s"), NonTensorStack)
        assert found[[2, 0]].batch["tree"]["s"] == ["c", "a"]
        assert DataProto.concat([found, data]).batch["tree"]["s"] == ["a", "b", "c"] * 2


def test_strings_of_two_batch_dimensions_are_sent(store):
    rows = [["a", "b"], ["c", ["d"]]]
    stack = NonTensorStack(*[NonTensorStack(*map(NonTensorData, row)) for row in rows])
    data = DataProto.from_dict({"tree": TensorDict({"x": torch.zeros(2, 2), "s": stack}, [2, 2])})
    assert sent(data, store).batch["tree"].get("s").tolist() == rows
    assert sent(data, store)[[1, 0]].batch["tree"].get("s").tolist() == rows[::-1]


def test_one_value_for_all_rows_of_a_nested_tensordict_is_refused(store):
    inner = TensorDict({"x": torch.arange(2), "k": NonTensorData("v", batch_size=[2])}, [2])
    with pytest.raises(FieldError, match=r"field 'tree\.k'.*NonTensorData"):
        pack_argument(DataProto.from_dict({"tree": inner}))
    with pytest.raises(FieldError, match=r"'argument\.k'.*NonTensorData"):
        pack_argument(DataProto(meta_info={"deep": [inner]}))


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array(["a", "bc"], dtype=np.dtypes.StringDType()), "StringDType"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "MaskedArray"),
        (np.ma.masked_array([1, "x"], [True, False], dtype=object), "MaskedArray"),
        (np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]), "'a'"),
        (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "recarray"),
    ],
    ids=["StringDType", "masked", "masked objects", "structured", "recarray"],
)
def test_arrays_that_cannot_be_sent_are_refused(store, array, kind):
    data = DataProto.from_dict(non_tensors={"v": array})
    with pytest.raises(FieldError, match=rf"field 'v'.*{kind}"):
        pack_argument(data)


@pytest.mark.parametrize("kind", [list, tuple])
def test_long_sequences_are_walked_to_their_end(kind):
    """A tensor behind 100 numbers is copied as one in front of them is."""
    inner = torch.zeros(2)
    received = unpack_argument(pack_argument(kind([*range(100), inner, "x"])))
    received[100].add_(1)
    assert inner.tolist() == [0, 0] and received[:3] == kind([0, 1, 2]) and received[101] == "x"


def test_concat_of_one_batch_shares_no_memory(form):
    data = form(DataProto.from_dict({"x": torch.arange(3)}, {"s": ["a", "b", "c"]}, {"n": [1]}))
    joined = DataProto.concat([data])
    joined.batch["x"] += 1
    joined.non_tensor_batch["s"][0] = "changed"
    joined.meta_info["new"] = 1
    assert data.batch["x"].tolist() == [0, 1, 2] and data.non_tensor_batch["s"][0] == "a"
    assert data.meta_info == {"n": [1]}
