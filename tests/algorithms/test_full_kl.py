"""KL over the vocabulary: by hand, against a reference implementation, and as a loss term."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from quadriga.algorithms import full_kl
from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.full_kl import kl_full
from quadriga.algorithms.kl import kl_estimate, kl_loss, penalise_rewards
from quadriga.errors import AlgorithmError, NonFiniteError, ShapeError


def softmax(logits: list[float], temperature: float) -> list[float]:
    largest = max(logits)
    weights = [math.exp((z - largest) / temperature) for z in logits]
    return [w / sum(weights) for w in weights]


def reference_kl(logits, reference, temperature: float):
    """Return the KL of each token and its derivative by each logit, computed with loops."""
    values, slopes = [], []
    for z, z_ref in zip(logits, reference, strict=True):
        p, q = softmax(z, temperature), softmax(z_ref, temperature)
        kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        values.append(kl)
        slopes.append(
            [
                a * (math.log(a / b) - kl) / temperature if a > 0 else 0.0
                for a, b in zip(p, q, strict=True)
            ]
        )
    return values, slopes


def test_value_by_hand_and_as_expectation_of_the_estimators() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    want = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    full = kl_full(p.log()[None, None] + 3.0, q.log()[None, None] - 1.0)
    assert full.shape == (1, 1) and full.item() == pytest.approx(want)
    for kind in ("k1", "k3"):
        each = kl_estimate(p.log(), q.log(), kind)
        assert float((p * each).sum()) == pytest.approx(want, rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(0, 7),
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([1, 8, 2**18]),
)
def test_values_and_gradients_against_the_reference(
    seed: int, count: int, vocabulary: int, temperature: float, block: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits, reference = (
        3 * torch.randn(count, vocabulary, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    upstream = torch.randn(count, generator=draw, dtype=torch.float64)
    x = logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_kl, "_CPU_BLOCK", block)
        got = kl_full(x, reference, temperature)
        got.backward(upstream)
    values, slopes = reference_kl(logits.tolist(), reference.tolist(), temperature)
    assert got.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    for row, scale, want in zip(x.grad.tolist(), upstream.tolist(), slopes, strict=True):
        assert row == pytest.approx([scale * slope for slope in want], rel=1e-9, abs=1e-12)


def test_entries_with_probability_zero_contribute_zero() -> None:
    torch.manual_seed(0)
    logits, reference = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    logits[..., 0] = -torch.inf
    both = reference.clone()
    both[..., 0] = -torch.inf
    for other in (reference, both):
        x = logits.clone().requires_grad_()
        kl_full(x, other).sum().backward()
        assert bool(torch.isfinite(x.grad).all()) and not x.grad[..., 0].any()
    without = kl_full(logits[..., 1:], reference[..., 1:])
    torch.testing.assert_close(kl_full(logits, both), without)
    assert kl_full(reference, both).isinf().all()


def test_kl_loss_ignores_values_outside_the_mask() -> None:
    full = torch.tensor([[0.5, math.nan, 2.0]], requires_grad=True)
    result = kl_loss(
        torch.zeros(1, 3), None, torch.tensor([[1, 0, 1]]), kl_loss_coef=0.5, kl_loss_type="full",
        full_kl_BT=full,
    )  # fmt: skip
    assert result.loss_BT.tolist() == [[0.25, 0.0, 1.0]]
    assert merge_partials([result.metrics]) == {"kl_loss": 1.25}
    result.loss_BT.sum().backward()
    assert full.grad.tolist() == [[0.5, 0.0, 0.5]]


def test_invalid_arguments_raise() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ShapeError, match=r"`ref_logits` has shape \[1, 3\]"):
        kl_full(x, torch.zeros(1, 3))
    with pytest.raises(AlgorithmError, match="`temperature` must be above 0, but is 0"):
        kl_full(x, x, 0)
    with pytest.raises(AlgorithmError, match="KL `full` sums over the vocabulary"):
        kl_estimate(x, x, "full")
    with pytest.raises(AlgorithmError, match="KL `full` sums over the vocabulary"):
        penalise_rewards(x, x, x, mask, kl_coef=0.1, kl_penalty="full")
    with pytest.raises(AlgorithmError, match="reads `full_kl`, but received None"):
        kl_loss(x, x, mask, kl_loss_coef=0.1, kl_loss_type="full")
    with pytest.raises(AlgorithmError, match="reads `ref_log_prob`, but received None"):
        kl_loss(x, None, mask, kl_loss_coef=0.1)
    with pytest.raises(NonFiniteError, match="`full_kl` is nan at row 0, token 1"):
        kl_loss(x, None, mask, kl_loss_coef=0.1, kl_loss_type="full",
                full_kl_BT=torch.tensor([[0.0, math.nan]]))  # fmt: skip
