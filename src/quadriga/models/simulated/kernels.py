"""Operators that the meta device computes in another way than a device, or not at all.

The meta device has shapes and dtypes, but no numbers and no fused kernels. Three things differ:

- attention would be computed step by step, with all its scores. A device has a fused kernel.
- the product of grouped rows (mixtures of experts) is defined for bfloat16 only.
- a condition on a number (`if (mask == 0).all()`) cannot be decided. It is taken as true, and a
  search (`if pad_token in ids`) finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from quadriga.models.log_probs.softmax_tiles import meta_tensors_stand_for_cpu

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
        found: Tensor = output[..., :size]
        return found


@contextmanager
def kernels_of(device_type: str) -> Iterator[None]:
    """Let meta tensors be computed as on a device of this type, within the block."""
    with meta_tensors_stand_for_cpu(device_type == "cpu"), DeviceKernels(device_type):
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
