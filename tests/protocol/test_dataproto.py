"""Operations of a batch on local and on remote fields, with hand-computed rows."""

import pickle

import numpy as np
import pytest
import torch
from protocol_cases import rows_of_six, six

from quadriga import protocol
from quadriga.errors import ConflictError, FieldError, LengthError, ProtocolError
from quadriga.protocol.boundary import pack_argument


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(None, None, -1), [5, 4, 3, 2, 1, 0]),
        (slice(4, 2), []),
        ([5, 0, 0, -1], [5, 0, 0, 5]),
        ([], []),
        (np.array([2, 1]), [2, 1]),
        (np.array([True, False, False, True, False, True]), [0, 3, 5]),
        ([False] * 6, []),
        (torch.tensor([3, 3]), [3, 3]),
        (torch.tensor([True] * 2 + [False] * 4), [0, 1]),
        ((1, 2), [1, 2]),
        (torch.tensor([], dtype=torch.long), []),
    ],
)
def test_index(form, index, expected):
    assert rows_of_six(form(six())[index]) == expected


@pytest.mark.parametrize("index", [2, np.int64(2), torch.tensor(2), -4])
def test_one_row(form, index):
    item = form(six())[index]
    assert isinstance(item, protocol.DataProtoItem)
    assert item.batch["x"].item() == 2
    assert item.batch["rag"].tolist() == [2.0, 2.0]
    assert item.batch.batch_size == torch.Size([])
    assert item.non_tensor_batch == {"s": "c", "half": 1.0}
    assert item.meta_info == {"temperature": 0.7}


@pytest.mark.parametrize("index", [6, -7, [0, 6], torch.tensor([-7])])
def test_a_row_out_of_range_is_an_index_error(form, index):
    with pytest.raises(IndexError, match="of a batch of 6 rows"):
        form(six())[index]


@pytest.mark.parametrize("index", [[0.5], "abc", [[0, 1]], [True, False]])
def test_an_index_of_another_type_is_refused(form, index):
    with pytest.raises(ProtocolError):
        form(six())[index]


def test_chunks_are_even_unless_padding_is_enabled(form):
    data = form(six())
    with pytest.raises(LengthError, match=r"6 = 4 × 1 \+ 2.*add 2 rows"):
        data.chunk(4)
    data.meta_info[protocol.DataProtoConfig.auto_padding_key] = True
    assert [rows_of_six(part) for part in data.chunk(4)] == [[0, 1], [2, 3], [4], [5]]


def test_parts_have_their_own_meta_info(form):
    """tests/protocol/test_programs.py has the rows of slices, parts, repeats and permutations."""
    data = form(six())
    part = data.chunk(3)[1]
    assert rows_of_six(part) == [2, 3] and part.meta_info == {"temperature": 0.7}
    part.meta_info["temperature"] = 0
    assert data.meta_info == {"temperature": 0.7}


def test_padding(form):
    data = form(six())
    data.padding(2, "first")
    data.padding(1, "last")
    assert rows_of_six(data) == [0, 1, 2, 3, 4, 5, 0, 0, 0]
    padded, added = protocol.pad_dataproto_to_divisor(form(six())[:3], 8)
    assert added == 5
    assert rows_of_six(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows_of_six(protocol.unpad_dataproto(padded, added)) == [0, 1, 2]
    assert protocol.pad_dataproto_to_divisor(form(six())[:0], 4)[1] == 0
    with pytest.raises(LengthError, match="no row to repeat"):
        form(six())[:0].padding(2)
    with pytest.raises(LengthError, match="cannot remove 7"):
        protocol.unpad_dataproto(six(), 7)


def test_select_pop_rename(form):
    data = form(six())
    some = data.select(["x"], ["s"], [])
    assert list(some.batch.keys()) == ["x"] and list(some.non_tensor_batch) == ["s"]
    assert some.meta_info == {} and len(some) == 6
    popped = data.pop(["xy"], ["half"], ["temperature"])
    assert popped.batch["xy"][5].tolist() == [5.0, 50.0]
    assert popped.meta_info == {"temperature": 0.7}
    assert sorted(data.batch.keys()) == ["rag", "x"] and data.meta_info == {}
    assert list(data.non_tensor_batch) == ["s"]
    assert data.pop(non_tensor_batch_keys=["s"]).batch is None
    data.rename("x", "z").rename(["z", "rag"], ["rag", "z"])
    assert data.batch["rag"].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.batch["z"].is_nested
    with pytest.raises(FieldError, match="two fields the name 'z'"):
        data.rename("rag", "z")
    with pytest.raises(LengthError, match="as many new keys"):
        data.rename(["rag", "z"], "y")


@pytest.mark.parametrize("call", ["select", "pop"])
@pytest.mark.parametrize("kind", ["batch_keys", "non_tensor_batch_keys", "meta_info_keys"])
def test_an_unknown_key_is_named(form, call, kind):
    data = form(six())
    with pytest.raises(FieldError, match=r"no field 'nope'.*it has") as caught:
        getattr(data, call)(**{kind: ["nope"]})
    assert caught.value.field == "nope"
    with pytest.raises(FieldError, match="nope"):
        data.rename("nope", "other")
    with pytest.raises(KeyError):
        data.batch["nope"]
    assert rows_of_six(data) == [0, 1, 2, 3, 4, 5]


def test_union(form):
    data, other = form(six()), form(six())
    other.rename("x", "w")
    other.meta_info["n"] = 8
    joined = data.union(other)
    assert joined is data
    assert data.batch["w"].tolist() == rows_of_six(data) == [0, 1, 2, 3, 4, 5]
    assert data.meta_info == {"temperature": 0.7, "n": 8}
    with pytest.raises(LengthError, match=r"6 rows.*4"):
        form(six()).union(form(six())[:4])


def test_union_conflicts_name_the_key_and_change_nothing(form):
    for half, key, value in (
        ("batch", "xy", torch.zeros(6, 2)),
        ("non_tensor_batch", "s", np.array(list("abcdeX"), dtype=object)),
        ("meta_info", "temperature", 1.0),
        ("batch", "rag", six().batch["rag"] + 1),
    ):
        data, other = form(six()), form(six())
        other.batch["new"] = torch.ones(6)
        getattr(other, half)[key] = value
        with pytest.raises(ConflictError, match=f"'{key}'.*different values") as caught:
            data.union(other)
        assert caught.value.field == key
        assert rows_of_six(data) == [0, 1, 2, 3, 4, 5] and "new" not in data.batch


def test_union_of_batches_with_one_half(form):
    tensors, objects = form(six()).select(non_tensor_batch_keys=[]), form(six()).select([])
    objects.batch = None
    assert rows_of_six(tensors.union(objects)) == [0, 1, 2, 3, 4, 5]
    assert rows_of_six(protocol.DataProto().union(form(six()))) == [0, 1, 2, 3, 4, 5]


def test_gradients_flow_through_rows():
    weight = torch.ones(2, 2**20, requires_grad=True)
    data = protocol.DataProto.from_dict({"v": weight})
    joined = protocol.DataProto.concat([data[[0, 0]], data[1:]])
    joined.batch["v"].sum().backward()
    assert weight.grad[:, 0].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize(
    "use",
    [
        lambda batch: batch.chunk(2),
        lambda batch: batch[1:],
        lambda batch: batch.reorder(torch.tensor([3, 2, 1, 0])),
        lambda batch: batch.repeat(2),
        lambda batch: batch.select(["x"], ["n"]),
        lambda batch: batch.union(protocol.DataProto.from_dict({"y": torch.zeros(4)})),
        lambda batch: protocol.DataProto.concat([batch, batch]),
        lambda batch: pickle.dumps(batch),
        pack_argument,
    ],
)
def test_an_array_of_another_length_is_named_wherever_the_batch_is_used(use, length):
    batch = protocol.DataProto.from_dict({"x": torch.zeros(4)})
    batch.non_tensor_batch["n"] = np.arange(length)
    with pytest.raises(LengthError, match="'n'"):
        use(batch)
    assert len(batch) == 4 and "n" in repr(batch) and "n" in batch.describe()
