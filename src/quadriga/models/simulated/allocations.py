"""Count the bytes of the meta tensors that operators make, and the most that exist at once.

The bytes are those of storages. A view takes none, and a storage is counted until the last tensor
and the last node of the autograd graph that refer to it are gone. So the count shows what a real
device would hold, without its allocator's rounding and without the scratch memory inside a kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quadriga.models.simulated.kernels import grouped_product


class AllocationCounter(TorchDispatchMode):
    """Count the storages of meta tensors that operators make within the block.

    Storages from before the block are not counted.

    Attributes:
        live: bytes that exist now, without those set aside.
        peak: the largest value of `live`.
        peak_with_kept: the largest sum of `live` and of the bytes set aside.
    """

    # A layer y = relu(x · W), then its backward pass. x is from before the block. `kept` are the
    # bytes that `set_aside` was called for: the gradients of parameters.
    #
    #   operator         makes       frees     live         kept
    #   mm               a: 40                 40
    #   relu             y: 40       a         80 → 40              relu saves its output only
    #   loss.backward    ∂y: 40                80
    #   relu backward    ∂a: 40      ∂y, y    120 → 40
    #   mm backward      ∂W: 16      ∂a        56 → 16 → 0  16      after `set_aside(∂W)`
    #
    # peak = 120, peak_with_kept = 120.

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations here
        self.live = 0
        self.kept = 0
        self.peak = 0
        self.peak_with_kept = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

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
        self.peak_with_kept = max(self.peak_with_kept, self.live + self.kept)
        return result

    def set_aside(self, tensor: Tensor) -> None:
        """Move the bytes of a tensor from `live` to `kept`, for good."""
        size = self._sizes.get(tensor.untyped_storage()._cdata, 0)
        self._sizes[tensor.untyped_storage()._cdata] = 0
        self.live -= size
        self.kept += size

    def _note(self, tensor: Tensor, *, counted: bool) -> None:
        """Count a storage that is new. One that is an argument first is from before the block."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counted else 0
        self.live += self._sizes[key]
        # The address can belong to another storage once this one is gone.
        self._references[key] = weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._references.pop(key, None)


def _meta_tensors(*trees: object) -> Iterator[Tensor]:
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            yield leaf


@contextmanager
def gradients_set_aside(counter: AllocationCounter, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Set the gradient of each parameter aside when it is complete, within the block."""

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        counter.set_aside(parameter.grad)

    hooks = [
        parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]  # none
        for parameter in parameters
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.grad = None
