"""KL over the vocabulary from hidden states against `kl_full` of all logits."""

from __future__ import annotations

import pytest
import torch

from quadriga.algorithms.full_kl import kl_full
from quadriga.errors import AlgorithmError, ShapeError
from quadriga.models.log_probs.linear_full_kl import linear_full_kl

# Tokens, vocabulary, hidden sizes of policy and reference.
SIZES = [(1, 2, 3, 3), (5, 17, 4, 6), (33, 101, 8, 8), (0, 4, 3, 3)]


def problem(tokens: int, vocabulary: int, size: int, ref_size: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, size), (vocabulary, size), (tokens, ref_size), (vocabulary, ref_size)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 300, None])
def test_full_kl_values_and_gradients(size, temperature: float, chunk: int | None) -> None:
    h, w, h_ref, w_ref = problem(*size)
    upstream = torch.linspace(-1, 1, size[0])
    outcomes = []
    for linear in (False, True):
        hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
        if linear:
            kl = linear_full_kl(hidden, weight, h_ref, w_ref, temperature, chunk_elements=chunk)
        else:
            kl = kl_full((hidden @ weight.T).double(), (h_ref @ w_ref.T).double(), temperature)
        kl.backward(upstream.to(kl.dtype))
        outcomes.append([kl.double(), hidden.grad.double(), weight.grad.double()])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_full_kl_in_bfloat16_with_frozen_weight() -> None:
    h, w, h_ref, w_ref = problem(9, 40, 8, 8, torch.bfloat16)
    hidden = h.requires_grad_()
    kl = linear_full_kl(hidden, w, h_ref, w_ref, chunk_elements=100)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_full(h @ w.T, h_ref @ w_ref.T), rtol=1e-4, atol=1e-4)
    kl.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and w.grad is None


def test_mismatched_shapes_are_rejected() -> None:
    h, w, h_ref, w_ref = problem(4, 5, 3, 3)
    with pytest.raises(ShapeError, match="`ref_weight` has 4 rows, but the policy's has 5"):
        linear_full_kl(h, w, h_ref, w_ref[:4])
    with pytest.raises(ShapeError, match="`ref_hidden` has 3 rows, but the policy's has 4"):
        linear_full_kl(h, w, h_ref[:3], w_ref)
    with pytest.raises(ShapeError, match=r"`weight` has shape \[5, 2\]"):
        linear_full_kl(h, w[:, :2], h_ref, w_ref)
    with pytest.raises(AlgorithmError, match="`temperature` must be above 0"):
        linear_full_kl(h, w, h_ref, w_ref, 0.0)
