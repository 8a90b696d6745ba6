"""Bytes of models without numbers, counted on the meta device.

`AllocationCounter` counts the storages of the meta tensors that operators make, and the most that
exist at once. A view takes none, and a storage is counted until the last tensor and the last node
of the autograd graph that refer to it are gone. So the count shows what a real device would hold,
without its allocator's rounding and without the scratch memory inside a kernel.

The meta device has shapes and dtypes, but no numbers and no fused kernels. `kernels_of` replaces
what differs from a device:

- attention would be computed step by step, with all its scores. A device has a fused kernel.
- the product of grouped rows (mixtures of experts) is defined for bfloat16 only.
- a condition on a number (`if (mask == 0).all()`) cannot be decided. It is taken as true, and a
  search (`if pad_token in ids`) finds nothing.

`EngineMemory` is what the memory function of a training engine or a rollout engine returns.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quadriga.errors import QuadrigaError
from quadriga.models.log_probs import meta_tensors

ResultT = TypeVar("ResultT")
META = torch.device("meta")
Bytes = Mapping[str, int]
"""What is held -> bytes."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one engine on one rank.

    Attributes:
        held: on its device all the time, unless the settings offload it.
        adds: pass -> what it adds to that at its largest moment. Passes of a training engine are
            "evaluate", "backward" and "step" (the update of the parameters), that of a rollout
            engine is "generate".
        host: in host memory instead; of a rollout engine, while it is released.
        loading: in host memory while the model is loaded, where shards cannot be read.
        missing: what is not counted, in words; "" if everything is.
        flags: what makes the libraries of the engine faster -> why it is off; "" if it is on.
        rows: of the largest micro-batch in a pass of a training engine.
        weights: elements of the whole weights that a training engine sends, by the dtype in which
            it keeps them; None for weights that are made for the transfer.
        largest_weight: elements of the largest weight.
        processes: processes of a rollout engine that use the device, beside the rank.
        limit: the setting that limits what a rollout engine reserves, and its value.
        shares_weights: a rollout engine can use the tensors of an actor in its process.
        saved: what a checkpoint holds of the rank.
    """

    held: Bytes
    adds: Mapping[str, Bytes]
    host: int = 0
    loading: int = 0
    missing: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[torch.dtype | None, int] = field(default_factory=dict)
    largest_weight: int = 0
    processes: int = 0
    limit: tuple[str, float] | None = None
    shares_weights: bool = False
    saved: int = 0

    def peak(self, *passes: str) -> int:
        """Return the most bytes that one of these passes adds; 0 if the engine has none of them."""
        return max(
            (sum(self.adds[name].values()) for name in passes if name in self.adds), default=0
        )


def largest(*moments: Bytes) -> Bytes:
    """Return the moment with most bytes."""
    return max(moments, key=lambda moment: sum(moment.values()))


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def counted(simulate: Callable[[], ResultT]) -> ResultT | str:
    """Return what a simulation returns, or one line about a model whose code fails on the meta
    device: it reads numbers."""
    try:
        return simulate()
    except QuadrigaError:
        raise
    except Exception as error:  # the code of a model fails in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


class AllocationCounter(TorchDispatchMode):
    """Count the storages of meta tensors that operators make within the block.

    Storages from before the block are not counted.

    Attributes:
        live: bytes that exist now.
        peak: the largest value of `live`.
    """

    # A layer y = relu(x · W), then its backward pass. x and the gradient of W, to which another one
    # is added, are from before the block.
    #
    #   operator         makes       frees     live
    #   mm               a: 40                 40
    #   relu             y: 40       a         80 → 40         relu saves its output only
    #   loss.backward    ∂y: 40                80
    #   relu backward    ∂a: 40      ∂y, y    120 → 40
    #   mm backward      ∂W: 16      ∂a        56 → 16 → 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations here
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for tensor in _meta_tensors(args, kwargs):
            self._note(tensor, counted=False)
        result = grouped_product(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        for tensor in _meta_tensors(result):
            self._note(tensor, counted=True)
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        """Count a storage that is new. One that is an argument first is from before the block."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counted else 0
        self.live += self._sizes[key]
        # The address can belong to another storage once this one is gone.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _meta_tensors(*trees: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            yield leaf


_aten = torch.ops.aten


class DeviceKernels(TorchFunctionMode):
    """Replace what the meta device computes in another way than `device_type` does."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._on_cpu = device_type == "cpu"

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if on_meta and func is scaled_dot_product_attention:
            found = self._attention(*args, **(kwargs or {}))
            if found is not None:
                return found
        if on_meta and func is Tensor.__bool__:
            return True
        if on_meta and func is Tensor.__contains__:
            return False
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Return the output of the fused kernel, [b, H, Lq, size of a value].

        None: the device has no such kernel. The scores then exist as a whole.
        """
        size = value.shape[-1]
        if attn_mask is not None and attn_mask.requires_grad:
            return None
        if query.shape[:-2] != key.shape[:-2] and not enable_gqa:
            return None  # keys that are broadcast over the heads
        if query.shape[-1] != size:
            if self._on_cpu:
                return None
            # Kernels of accelerators have one size of a head, to which values are padded.
            value = pad(value, (0, query.shape[-1] - size))
        if attn_mask is not None and attn_mask.dtype == torch.bool and self._on_cpu:
            # The kernel of the CPU takes a mask in the dtype of the query.
            mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = mask.masked_fill_(attn_mask.logical_not(), -torch.inf)
        output, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return cast(Tensor, output[..., :size])


@contextmanager
def kernels_of(device_type: str, *, entropies_have_gradients: bool = True) -> Iterator[None]:
    """Let meta tensors be computed as on a device of this type, within the block."""
    on_cpu = device_type == "cpu"
    with (
        meta_tensors(stand_for_cpu=on_cpu, entropies_have_gradients=entropies_have_gradients),
        DeviceKernels(device_type),
    ):
        yield


def run_backward(loss: Tensor) -> None:
    """Compute the gradients of a 0-d loss within `kernels_of`.

    `torch.autograd.backward` is a function that a mode can replace, and while such a function runs,
    the mode is inactive. A layer that is computed again in the backward pass needs the mode.
    """
    one = torch.ones_like(loss)
    _engine_run_backward(
        (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def grouped_product(
    func: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> Tensor | None:
    """Return the meta result of `aten._grouped_mm`; None for every other operator.

    Rows [S, K] in G groups and weights [G, K, N] give [S, N]. The gradient of the weights is the
    product of [K, S] and [S, N], whose S is cut into G groups: [G, K, N].
    """
    if func is not _aten._grouped_mm.default:
        return None
    left, right = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    assert isinstance(left, Tensor) and isinstance(right, Tensor)
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim() == 2:
        assert isinstance(offsets, Tensor)
        return left.new_empty(len(offsets), rows, columns)
    return left.new_empty(rows, columns)
