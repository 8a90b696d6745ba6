"""Programs about batches and modules."""

import pickle

import ray
import torch
import verl
import verl.protocol
import verl.utils.py_functional as py_functional
from ray import cloudpickle
from tensordict import TensorDict
from verl import DataProto
from verl.protocol import (
    BatchData,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

import quadriga.protocol


def batch(**meta):
    return DataProto.from_dict(
        {"prompt": torch.arange(4), "x": torch.ones(4, 2)}, {"uid": list("abcd")}, meta
    )


def test_tensors_as_bytes():
    for tensor in (torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bfloat16)):
        kind, shape, data = serialize_single_tensor(tensor)
        assert (kind, tuple(shape)) == (str(tensor.dtype).partition(".")[2], tuple(tensor.shape))
        back = deserialize_single_tensor((kind, shape, data))
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    empty = torch.ones(0, 3)
    assert deserialize_single_tensor(serialize_single_tensor(empty)).shape == (0, 3)


def test_tensordicts_as_bytes():
    jagged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    source = TensorDict({"a": torch.arange(2), "ids": jagged}, batch_size=[2])
    size, device, items = serialize_tensordict(source)
    assert (size, device, set(items)) == ((2,), None, {"a", "ids"})
    sent = pickle.loads(pickle.dumps((size, device, items)))
    back = deserialize_tensordict(sent)
    assert back["a"].tolist() == [0, 1]
    assert back["ids"].offsets().diff().tolist() == [2, 3]


def test_batches_and_their_functions_are_those_of_quadriga():
    """tests/protocol has their behaviour."""
    names = "DataProto DataProtoItem collate_fn fold_batch_dim pad_dataproto_to_divisor"
    names += " union_numpy_dict union_tensor_dict unfold_batch_dim unpad_dataproto"
    for name in names.split():
        assert getattr(verl.protocol, name) is getattr(quadriga.protocol, name)


def test_a_batch_of_a_plain_dict():
    data = DataProto(batch={"a": torch.ones(3, 2), "b": torch.zeros(3)})
    assert isinstance(data.batch, TensorDict)
    assert (len(data), set(data.batch.keys())) == (3, {"a", "b"})


def test_one_name_instead_of_a_list():
    data = batch()
    assert data.pop("prompt").batch["prompt"].tolist() == [0, 1, 2, 3]
    assert "prompt" not in data.batch
    popped = data.pop(batch_keys=["x"], non_tensor_batch_keys="uid")
    assert popped.non_tensor_batch["uid"].tolist() == list("abcd")
    assert batch().select(batch_keys="x").batch.keys() == {"x"}


def test_split_and_chunk():
    assert [len(part) for part in batch().split(3)] == [3, 1]
    assert str(batch().to("meta").batch.device) == "meta"
    assert [len(part) for part in batch().chunk(2)] == [2, 2]
    assert batch(temperature=1.0).split(3)[1].meta_info == {"temperature": 1.0}


def test_one_wrapper_for_all_batches():
    assert BatchData(batch()).is_chunkable() and not BatchData([1]).is_chunkable()
    parts = BatchData(batch()).chunk(chunks=2)
    assert BatchData(parts).is_concatable() and not BatchData([1]).is_concatable()
    assert BatchData(parts).concat().batch["prompt"].tolist() == [0, 1, 2, 3]
    table = TensorDict({"a": torch.arange(4)}, batch_size=[4])
    halves = BatchData(table).chunk(2)
    assert [half["a"].tolist() for half in halves] == [[0, 1], [2, 3]]
    assert BatchData(list(halves)).concat()["a"].tolist() == [0, 1, 2, 3]


def test_a_function_that_reads_modules_of_verl_is_pickled(cluster):
    module, functions = verl, py_functional  # variables of this function, hence pickled with `read`
    assert pickle.loads(pickle.dumps(module)) is verl
    assert cloudpickle.loads(cloudpickle.dumps(functions)) is py_functional

    def read():
        names = functions.union_two_dict({}, {"a": 1})
        return module.DataProto.__name__, names, module.__version__

    task = ray.remote(num_cpus=0)(read)
    assert ray.get(task.remote()) == ("DataProto", {"a": 1}, verl.__version__)
