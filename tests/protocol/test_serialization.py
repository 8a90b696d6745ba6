"""Values of every kind are received equal, through payloads and out-of-band pickles."""

import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from protocol_cases import ARRAYS, TENSORS, Weird, ragged, same_value
from tensordict import NonTensorData, TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto, Origin, message
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.columns import encode
from quadriga.protocol.values import is_jagged, object_array, same, take_value


@pytest.fixture(params=["inline", "stored"])
def send(request, store, monkeypatch):
    """Return a function that sends a result to the controller through a real pickle."""
    monkeypatch.setattr(message, "INLINE_BYTES", 10**9 if request.param == "inline" else -1)

    def receive(data):
        packed = pack_result(data, Origin("actor", 0, "make"))
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
        frozen = [memoryview(bytes(b.raw())) for b in buffers]  # read-only, as in shared memory
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return unpack_result(pickle.loads(head, buffers=frozen))

    return receive


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_are_received_equal_and_writable(send, kind):
    value = TENSORS[kind]
    received = send(DataProto.from_dict({"v": value}))
    back, some = received.batch["v"], received[[3, 1, 1]].batch["v"]
    assert same_value(take_value(value, np.array([3, 1, 1])), some)
    assert same_value(value.contiguous() if not is_jagged(value) else value, back)
    for leaf in back.values(True, True) if isinstance(back, TensorDict) else [back]:
        if leaf.is_nested:
            leaf.values().zero_()
        else:
            leaf.zero_()


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_received_equal_and_writable(send, kind):
    value = ARRAYS[kind]
    back = send(DataProto.from_dict(non_tensors={"v": value})).non_tensor_batch["v"]
    assert back.dtype == value.dtype and back.shape == value.shape
    assert same(value, back)
    back[0] = back[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_large_tensors_are_received_equal(send, dtype):
    """The tensors are large enough to use memory of the buffer pool."""
    value = torch.arange(3_000_001).to(dtype)
    whole = send(DataProto.from_dict({"v": value}))
    part = whole[1:]
    assert torch.equal(whole.batch["v"], value) and torch.equal(part.batch["v"], value[1:])
    assert whole.batch["v"].data_ptr() % 64 == 0
    whole.batch["v"].zero_()


def test_tensors_are_sent_without_gradient(send):
    weight = torch.ones(4, requires_grad=True)
    back = send(DataProto.from_dict({"v": weight * 2})).batch["v"]
    assert not back.requires_grad and back.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(2.5).bfloat16(),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(2, 3, requires_grad=True),
        torch.randn(4, 4)[::2, 1],
        ragged(torch.ones(2), torch.ones(1)),
    ],
)
def test_tensors_in_meta_info_and_outside_batches(send, tensor):
    data = send(DataProto(meta_info={"deep": [{"t": tensor}]}))
    assert same(tensor.detach(), data.meta_info["deep"][0]["t"])
    bare = send({"x": (tensor, 1), "y": [None, "s"]})
    assert same(tensor.detach(), bare["x"][0]) and bare["y"] == [None, "s"]


def test_pickling_copies_no_tensor_and_does_not_use_the_pickle_format_of_torch():
    value = torch.arange(1000.0)
    data = DataProto.from_dict({"v": value}, meta_info={"t": value})
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1500 and b"torch" not in head
    assert [b.raw().nbytes for b in buffers] == [4000, 4000]
    value[0] = 7  # the buffer is the tensor's own memory
    assert np.frombuffer(buffers[0], dtype=np.float32)[0] == 7


def test_plain_tensordicts_are_sent(store):
    td = TensorDict({"v": torch.arange(4), "j": TENSORS["jagged"]}, [4])
    for back in (
        unpack_argument(pack_argument(td)),
        unpack_result(pickle.loads(pickle.dumps(pack_result(td, Origin("a", 0, "m"))))),
    ):
        assert isinstance(back, TensorDict) and same(td, back)
        back["v"] += 1
    assert td["v"].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_that_cannot_be_sent_are_named():
    with pytest.raises(FieldError, match=r"field 'v' is a tensor of layout torch.sparse_coo"):
        encode(torch.eye(3).to_sparse(), "v")
    with pytest.raises(FieldError, match=r"field 'v': expected .* got NonTensorData"):
        encode(NonTensorData(1, batch_size=[3]), "v")
    strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(FieldError, match=r"field 'v'.*layout=torch.jagged"):
        encode(strided, "v")


def test_rows_of_classes_of_a_script_are_left_to_the_transport():
    Weird.__module__, before = "__main__", Weird.__module__
    try:
        spec, payload, _ = encode(ARRAYS["script classes"], "v")
    finally:
        Weird.__module__ = before
    assert spec.kind == "raw" and payload is ARRAYS["script classes"]
    lock = object_array([threading.Lock()])
    assert encode(lock, "v")[0].kind == "raw"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_received_on_the_current_device(send):
    nested = ragged(torch.ones(2), torch.zeros(1)).to("cuda")
    data = DataProto.from_dict({"v": torch.arange(2, device="cuda"), "rag": nested})
    back = send(data.to("cuda"))
    assert back.batch["v"].device == torch.device("cuda", torch.cuda.current_device())
    assert back.batch["rag"].device.type == "cuda"
    assert back.batch["v"].tolist() == [0, 1] and same(nested, back.batch["rag"])
    back.batch["v"] += 1
    assert data.batch["v"].tolist() == [0, 1]


def test_tensors_of_an_unavailable_device_are_received_on_the_cpu(store, monkeypatch):
    """A worker with a GPU returns them to a controller without one."""
    packed = pack_result(DataProto.from_dict({"v": torch.arange(3)}), Origin("a", 0, "m"))
    packed.tensors["v"].spec = packed.tensors["v"].spec._replace(device="xpu")
    packed.head = packed.head[0], "xpu"
    back = unpack_result(packed)
    assert back.batch["v"].device.type == "cpu" and back.batch["v"].tolist() == [0, 1, 2]
