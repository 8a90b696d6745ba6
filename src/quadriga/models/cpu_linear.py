"""Linear layers whose products are computed by oneDNN on a CPU.

Torch gives float32 products to MKL, which uses the wide vector units of Intel processors only: on
an AMD processor with AVX-512 it reaches about 40 % of what oneDNN reaches. Torch contains oneDNN
too, but uses it for 16-bit products alone. Both compute in float32; they add in another order.

Shapes: M rows (tokens), K inputs, N outputs.
"""

import os
import platform
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_PRODUCTS = 2**20
"""Multiplications (M · K · N) of the smallest product that is given to oneDNN. Its calls cost some
microseconds more than calls of MKL."""
CACHED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "1"}
"""Products that oneDNN and torch keep compiled, each for one shape; a layer needs three. The cache
of torch saves no time beside that of oneDNN. Both keep 1024 by default, of 0.6 MB each: a process
then grows for hundreds of steps whose micro-batches have new numbers of rows."""


def has_onednn() -> bool:
    """Return whether torch has oneDNN, on a processor for which it was compared with MKL."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # of torch
    return bool(built) and platform.machine() in ("x86_64", "AMD64")


class CpuLinear(nn.Linear):
    """`nn.Linear`, with large float32 products on a CPU computed by oneDNN.

    Everything else (other devices and dtypes, sharded weights, small products) is `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not _is_large(input, weight):
            return super().forward(input)
        if not torch.is_grad_enabled():
            return _product(input, weight, bias)
        rows = input.flatten(0, -2)
        out: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]  # of torch
        # No view for autograd, as of `nn.Linear`: a model may change it in place.
        return cast(Tensor, torch.ops.aten._unsafe_view(out, [*input.shape[:-1], len(weight)]))


def use_cpu_linear(model: nn.Module) -> None:
    """Make every `nn.Linear` of `model` a `CpuLinear`, if torch has oneDNN.

    It also limits how many compiled products are kept (`CACHED`).

    Only the class changes: parameters, hooks and names stay as they are. Subclasses of `nn.Linear`
    compute something of their own and are left out.
    """
    if not has_onednn():
        return
    for cache, products in CACHED.items():
        os.environ.setdefault(cache, products)  # read at the first product
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CpuLinear


def _is_large(rows: Tensor, weight: Tensor) -> bool:
    # A sharded weight (DTensor) and tensors of tracers have types of their own.
    plain = type(rows) is Tensor and type(weight) in (Tensor, nn.Parameter)
    return (
        plain
        and rows.dtype == weight.dtype == torch.float32
        and rows.device.type == weight.device.type == "cpu"
        and rows.numel() * len(weight) >= MIN_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


class _Linear(torch.autograd.Function):
    """rows [M, K] @ weight [N, K]ᵀ + bias [N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = _product(grad, weight.T)
        if ctx.needs_input_grad[1]:
            of_weight = _product_over_rows(grad, rows)
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        return of_rows, of_weight, of_bias


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., K] @ right [N, K]ᵀ + bias [N] by oneDNN."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], ""))


def _product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ @ right [N, K] of left [M, N] and right [M, K]."""
    # oneDNN copies a left side that is transposed, so the narrower matrix is on the left side:
    #
    #   left is narrower     leftᵀ [N, M] @ (rightᵀ [K, M])ᵀ
    #   right is narrower    (rightᵀ [K, M] @ (leftᵀ [N, M])ᵀ)ᵀ
    if left.shape[1] <= right.shape[1]:
        return _product(left.T, right.T)
    return _product(right.T, left.T).T.contiguous()
