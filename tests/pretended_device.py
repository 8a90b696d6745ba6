"""An accelerator that does not exist: its tensors are tensors of the CPU with a mark.

Within `PretendedDevice`, a tensor is of the device "npu" if it was made there, moved there, or
computed from such tensors, and `Tensor.device` says so. An operation on tensors of the device and
of the CPU raises, as on a real device.
"""

from unittest.mock import MagicMock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TYPE = "npu"
DEVICE = f"{TYPE}:0"
_CPU = torch.device("cpu")
# Operations whose arguments may be on several devices: copies, and indices on the CPU.
_BETWEEN_DEVICES = (
    "copy_", "_foreach_copy_", "set_", "index", "index_put_", "index_put", "_to_copy"
)  # fmt: skip


def install() -> None:
    """Let this process have the device, from now on. It computes in order: no stream waits."""
    from quadriga.parallel import device

    module = MagicMock()  # torch.npu
    module.is_available.return_value = module.is_initialized.return_value = True
    module.device_count.return_value, module.current_device.return_value = 1, 0
    module._is_in_bad_fork.return_value = False
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, module)
    device._COLLECTIVE_BACKENDS = {**device._COLLECTIVE_BACKENDS, TYPE: "gloo"}


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _tensors(values: object) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class PretendedDevice(TorchFunctionMode):
    """See the module. What Python asks for passes here, and each operation passes `_Operations`.

    Attributes:
        marked: the storages of the device. They are kept, so that no other one has their number.
        made: storages that torch made within an operation, which are of either device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked, self.made, self.operations = {}, {}, _Operations(self)

    def has(self, tensor: Tensor) -> bool:
        return _storage(tensor)._cdata in self.marked

    def place(self, tensor: Tensor, marked: bool) -> None:
        storage = _storage(tensor)
        for storages in (self.made, self.marked):
            storages.pop(storage._cdata, None)
        if marked:
            self.marked[storage._cdata] = storage

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = _tensors((args, kwargs))
        if name == "__get__" and func == Tensor.device.__get__:
            return torch.device(DEVICE) if self.has(args[0]) else func(*args)
        if name in ("to", "cpu", TYPE) and given:
            return self._moved(func, args, kwargs)
        wanted = torch.device(kwargs.get("device") or _CPU)
        marked = wanted.type == TYPE
        out = func(*args, **kwargs | ({"device": _CPU} if marked else {}))
        if name in ("as_tensor", "asarray") and given and marked != self.has(given[0]):
            out = out.clone()
        if kwargs.get("device") or not given:  # Python made a tensor
            for tensor in _tensors(out):
                self.place(tensor, marked)
        return out

    def _moved(self, func, args, kwargs) -> Tensor:
        """Return a tensor on another device, with another dtype or both."""
        tensor, *others = args
        dtype = kwargs.pop("dtype", None) or tensor.dtype
        wanted = kwargs.pop("device", {"cpu": _CPU, TYPE: DEVICE}.get(func.__name__))
        for value in others:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                wanted = value
        target = torch.device(wanted or (DEVICE if self.has(tensor) else tensor.device))
        marked = target.type == TYPE
        out = Tensor.to(tensor, _CPU if marked else target, dtype, **kwargs)
        if target.type != "meta" and marked != self.has(tensor):
            out = out.clone() if _storage(out)._cdata == _storage(tensor)._cdata else out
            self.place(out, marked)
        return out


class _Operations(TorchDispatchMode):
    """Marks what operations return, and raises where devices differ."""

    def __init__(self, of: PretendedDevice) -> None:
        super().__init__()
        self.of = of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # it computes on its local tensors, which pass here again
        given, of, kwargs = _tensors((args, kwargs)), self.of, dict(kwargs or {})
        # Functions of a backward pass do not pass `PretendedDevice`.
        asked = getattr(kwargs.get("device"), "type", None) == TYPE
        kwargs |= {"device": _CPU} if asked else {}
        if func is torch.ops.aten.histc.default:  # of integers the CPU has none
            args = (args[0].float(), *args[1:])
        out = func(*args, **kwargs)
        known = {_storage(tensor)._cdata for tensor in given}
        there = [tensor for tensor in given if of.has(tensor)]
        unmarked = [x for x in given if _storage(x)._cdata not in of.marked | of.made]
        here = any(tensor.dim() and not tensor.is_meta for tensor in unmarked)
        name = func.overloadpacket.__name__
        if any(tensor.dim() for tensor in there) and here and name not in _BETWEEN_DEVICES:
            shapes = [f"{tuple(t.shape)} on {DEVICE if of.has(t) else 'cpu'}" for t in given]
            raise RuntimeError(f"{func} was given tensors of two devices: {', '.join(shapes)}")
        for tensor in _tensors(out):
            number = _storage(tensor)._cdata
            if number in known or tensor.is_meta:
                continue
            if there or asked:
                of.place(tensor, True)
            elif known <= of.made.keys():  # torch made it, or computed it from what it has made
                of.made[number] = _storage(tensor)
        return out
