"""KL(π‖π_ref) over the whole vocabulary, exact in value and gradient.

    KL = Σ_v π_v (log π_v − log π_ref,v),   ∂KL/∂z_v = π_v (log π_v − log π_ref,v − KL)

z are the policy's logits divided by the temperature. The reference is a constant without gradient.
Shapes: N tokens, V vocabulary entries.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.algorithms.tensors import as_float, require_same_shape
from quadriga.errors import AlgorithmError

# Logits per block. On a CPU: 1 MB of float32, which its caches hold.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 2**18, 2**25


def kl_full(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(π‖π_ref) of each token in nats.

    Both distributions are softmax(logits / temperature). A vocabulary entry that π excludes (logit
    −inf) contributes 0. One that only π_ref excludes makes KL infinite. The backward pass allocates
    one tensor of the shape and dtype of the logits, and blocks of fixed size.

    Args:
        logits: the policy's logits, [..., V], with gradient.
        ref_logits: the reference's logits, [..., V].
        temperature: the temperature of the rollout.

    Returns:
        [...], float32 or float64.

    Raises:
        ShapeError: the logits differ in shape.
        AlgorithmError: the temperature is not above 0.
    """
    require_same_shape("logits", logits, ref_logits=ref_logits)
    if not temperature > 0:
        raise AlgorithmError(f"`temperature` must be above 0, but is {temperature}.")
    vocabulary = logits.shape[-1]
    kl: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        logits.reshape(-1, vocabulary), ref_logits.detach().reshape(-1, vocabulary), temperature
    )
    return kl.view(logits.shape[:-1])


class _FullKL(torch.autograd.Function):
    """KL over the vocabulary, computed block by block of rows.

    Autograd would save both log-softmaxes and their exponentials. This function saves the logits,
    which exist anyway, and the KL of each row, and recomputes the softmaxes in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
        kl = as_float(logits.new_empty(len(logits)))
        for a, b in blocks(logits):
            p, gap = p_and_gap(logits[a:b], ref_logits[a:b], temperature)
            torch.linalg.vecdot(p, gap, out=kl[a:b])
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature = temperature
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor, None, None]:
        logits, ref_logits, kl = ctx.saved_tensors
        grad = torch.empty_like(logits)
        # z = logits / temperature, so ∂KL/∂logits = ∂KL/∂z / temperature.
        scale = grad_kl / ctx.temperature
        for a, b in blocks(logits):
            p, gap = p_and_gap(logits[a:b], ref_logits[a:b], ctx.temperature)
            grad[a:b] = gap.sub_(kl[a:b, None]).mul_(p).mul_(scale[a:b, None])
        return grad, None, None


def blocks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive blocks of rows, each of at most a fixed number of logits.

    A block has at least one row, whatever the size of the vocabulary.
    """
    count, vocabulary = logits_NV.shape
    elements = _CPU_BLOCK if logits_NV.device.type == "cpu" else _ACCELERATOR_BLOCK
    step = max(1, elements // max(vocabulary, 1))
    return ((a, min(a + step, count)) for a in range(0, count, step))


def p_and_gap(logits: Tensor, ref_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (π, log π − log π_ref), both new tensors [N, V], float32 or float64.

    The second is 0 where π is 0: the limit of π·log π is 0, but 0 · (−inf) would be NaN.
    """
    log_p = torch.log_softmax(as_float(logits) / temperature, dim=-1)
    log_q = torch.log_softmax(as_float(ref_logits) / temperature, dim=-1)
    gap = torch.where(log_p == -torch.inf, 0, log_p - log_q)
    return log_p.exp_(), gap
