"""Subclasses of `DataProto` keep their class and their attributes."""

import copy
import pickle

import pytest
import torch
from protocol_cases import Done

from quadriga.protocol import DataProto, DataProtoFuture, Origin, fold_batch_dim
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result


class Rollouts(DataProto):
    """Has an `__init__` of its own, with other arguments than those of `DataProto`."""

    def __init__(self, tensors: dict, version: int, notes: list) -> None:
        super().__init__(DataProto.from_dict(tensors).batch)
        self.version, self.notes = version, notes
        self.scale = torch.tensor([2.0])


def rollouts() -> Rollouts:
    return Rollouts({"x": torch.arange(4), "wide": torch.ones(4, 40_000)}, 3, ["a"])


def remote(data: DataProto) -> DataProto:
    return unpack_result(pack_result(data, Origin("actor", 0, "make")))


OPERATIONS = {
    "slice": lambda d: d[1:3],
    "select": lambda d: d.select(["x"]),
    "pop": lambda d: d.pop(["x"]),
    "union": lambda d: d.union(DataProto.from_dict({"y": torch.zeros(4)})),
    "concat": lambda d: DataProto.concat([d, copy.copy(d)]),
    "unfold": lambda d: d.unfold_column_chunks(2, ["wide"]),
    "fold": lambda d: fold_batch_dim(d, 2),
    "mini-batch": lambda d: next(d.make_iterator(2, 1)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda d: pickle.loads(pickle.dumps(d)),
    "argument": lambda d: unpack_argument(pack_argument(d)),
    "result": remote,
    "future": lambda d: DataProtoFuture([Done(d)]).chunk(2)[0].get(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("form", [rollouts, lambda: remote(rollouts())], ids=["local", "remote"])
def test_operations_keep_class_and_attributes(store, form, operation):
    found = OPERATIONS[operation](form())
    assert type(found) is Rollouts and len(found) > 0
    assert found.version == 3 and found.notes == ["a"] and found.scale.tolist() == [2.0]


@pytest.mark.parametrize("operation", ["deepcopy", "pickle", "argument", "result"])
def test_attributes_of_a_copy_are_private(store, operation):
    data = rollouts()
    found = OPERATIONS[operation](data)
    found.notes.append("b")
    found.scale.zero_()
    assert data.notes == ["a"] and data.scale.tolist() == [2.0]


def test_attributes_of_a_batch_itself_are_kept(store):
    data = DataProto.from_dict({"x": torch.arange(2)})
    data.tag = "train"
    assert data[:1].tag == remote(data).tag == "train"
    assert not hasattr(remote(DataProto()), "tag")
