"""KL estimators, the reward penalty, the loss term and the controllers."""

import math

import pytest
import torch
from algorithm_cases import Case, cases
from hypothesis import given, settings

from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.kl import (
    ALIASES,
    SAMPLED_ESTIMATORS,
    AdaptiveKLController,
    kl_estimate,
    kl_loss,
    make_kl_controller,
    penalise_rewards,
)
from quadriga.errors import AlgorithmError, ShapeError, UnknownNameError

# Value and derivative at d = log π − log π_ref, from the definitions.
VALUES = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "low_var_kl": lambda d: min(math.exp(-d) - 1 + d, 10.0),
}
DERIVATIVES = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1, d),
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "low_var_kl": lambda d: 1 - math.exp(-d) if math.exp(-d) - 1 + d < 10 else 0.0,
}


@pytest.mark.parametrize("kind", [*SAMPLED_ESTIMATORS, *ALIASES])
@pytest.mark.parametrize("d", [-4.0, -0.5, -1e-4, 0.3, 2.0])
def test_values_and_derivatives(kind: str, d: float) -> None:
    log_prob = torch.tensor([d - 1.0], dtype=torch.float64, requires_grad=True)
    got = kl_estimate(log_prob, torch.tensor([-1.0], dtype=torch.float64), kind)
    got.sum().backward()
    base = ALIASES.get(kind, kind)
    name = base.removesuffix("+")
    assert got.item() == pytest.approx(VALUES[name](d), rel=1e-9, abs=1e-15)
    derivative = DERIVATIVES["k2" if base.endswith("+") else name](d)
    assert log_prob.grad.item() == pytest.approx(derivative, rel=1e-9, abs=1e-15)


def test_k3_is_accurate_for_nearly_equal_policies() -> None:
    """exp(−d) − 1 + d computed directly in float32 has an error as large as its value here."""
    got = kl_estimate(torch.tensor([-1.0 + 2.0**-11]), torch.tensor([-1.0]), "k3")
    assert got.item() == pytest.approx(2.0**-23, rel=1e-3)


def test_estimates_of_very_different_policies_are_finite() -> None:
    for kind in SAMPLED_ESTIMATORS:
        log_prob = torch.tensor([-500.0, 0.0], requires_grad=True)
        got = kl_estimate(log_prob, torch.tensor([0.0, -500.0]), kind)
        got.sum().backward()
        assert bool(torch.isfinite(got).all()) and bool(torch.isfinite(log_prob.grad).all())


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("kind", ["k1", "abs", "k3"])
def test_penalty_against_the_reference(kind: str, case: Case) -> None:
    rewards, kl = penalise_rewards(
        case.rewards, case.log_prob, case.old_log_prob, case.mask, kl_coef=0.2, kl_penalty=kind
    )
    means = []
    for i, row in enumerate(case.mask.tolist()):
        of_row = []
        for t, m in enumerate(row):
            d = float(case.log_prob[i, t] - case.old_log_prob[i, t])
            want = float(case.rewards[i, t]) - 0.2 * VALUES[kind](d) if m else 0.0
            assert rewards[i, t].item() == pytest.approx(want)
            if m:
                of_row.append(VALUES[kind](d))
        if of_row:
            means.append(sum(of_row) / len(of_row))
    assert kl == pytest.approx(sum(means) / len(means) if means else 0.0)


def test_kl_loss_by_hand() -> None:
    result = kl_loss(
        torch.tensor([[-1.0, -2.0, 5.0]]), torch.tensor([[-2.0, -2.0, 5.0]]),
        torch.tensor([[1, 1, 0]]), kl_loss_coef=0.5, kl_loss_type="k2",
    )  # fmt: skip
    assert result.loss_BT.tolist() == [[0.25, 0.0, 0.0]]
    assert merge_partials([result.metrics]) == {"kl_loss": 0.25}


def test_controllers_by_hand() -> None:
    fixed = make_kl_controller("fixed", kl_coef=0.1)
    fixed.update(99.0, 10)
    assert fixed.value == 0.1
    adaptive = make_kl_controller("adaptive", kl_coef=0.1, target_kl=1.0, horizon=100.0)
    adaptive.update(1.1, 50)
    assert adaptive.value == pytest.approx(0.1 * 1.05)
    adaptive.update(99.0, 50)  # the error is clipped to 0.2
    assert adaptive.value == pytest.approx(0.1 * 1.05 * 1.1)
    adaptive.update(0.0, 50)
    assert adaptive.value == pytest.approx(0.1 * 1.05 * 1.1 * 0.9)
    other = make_kl_controller("adaptive", kl_coef=0.1)
    other.load_state_dict(adaptive.state_dict())
    assert other.value == adaptive.value


def test_invalid_arguments_raise() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(UnknownNameError, match=r"no KL estimator 'low_var'.* mean 'low_var_kl"):
        kl_estimate(x, x, "low_var")
    with pytest.raises(ShapeError, match="`ref_log_prob` has shape"):
        kl_estimate(x, x[:, :1], "k1")
    with pytest.raises(UnknownNameError, match=r"no KL controller 'adaptiv'.* mean 'adaptiv"):
        make_kl_controller("adaptiv", kl_coef=0.1)
    with pytest.raises(AlgorithmError, match="`target_kl` and `horizon` must be above 0"):
        AdaptiveKLController(0.1, target_kl=0.0, horizon=1.0)
