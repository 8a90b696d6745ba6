"""Values and gradients of every policy loss against the reference implementation."""

from typing import Any

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import Case, cases, loss_of
from hypothesis import given, settings
from torch import Tensor

from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.policy_losses import (
    ALIASES,
    POLICY_LOSSES,
    compute_policy_loss,
    get_policy_loss,
    select_tokens,
)


def reference_losses(
    name: str, case: Case, log_prob: Tensor, options: dict[str, float]
) -> list[list[Tensor]]:
    """Return the reference loss of each generated token, sample by sample."""
    low, high = options.get("clip_ratio_low", 0.2), options.get("clip_ratio_high", 0.2)
    dual = options.get("clip_ratio_c", 3.0)
    losses = []
    chosen = largest_covariances(case) if name == "kl_cov" else set()
    for i, positions in enumerate(ref.token_positions(case.mask)):
        lps = [log_prob[i, t] for t in positions]
        olds = [case.old_log_prob[i, t] for t in positions]
        advs = [case.advantages[i, t] for t in positions]
        triples = list(zip(lps, olds, advs, strict=True))
        match name:
            case "ppo_clip":
                row = [ref.ppo_token(*x, low, high, dual) for x in triples]
            case "decoupled_ppo":
                weights = [
                    torch.exp(case.old_log_prob[i, t] - case.rollout_log_prob[i, t])
                    for t in positions
                ]
                row = [
                    w * ref.ppo_token(*x, low, high, dual)
                    for w, x in zip(weights, triples, strict=True)
                ]
            case "cispo":
                row = [ref.cispo_token(*x, low, high) for x in triples]
            case "sapo":
                row = [ref.sapo_token(*x, 1.5, 0.7) for x in triples]
            case "gpg" | "policy_gradient":
                row = [-a * lp for lp, _, a in triples]
            case "gspo" | "gspo_token" if positions:
                row = ref.gspo_sequence(lps, olds, advs, low, high, name == "gspo_token")
            case "geo_mean" if positions:
                row = ref.geo_mean_sequence(lps, olds, advs, low, high)
            case "kl_cov":
                row = [
                    -a * torch.exp(lp - old) + ((lp - old).abs() / 2 if (i, t) in chosen else 0)
                    for t, (lp, old, a) in zip(positions, triples, strict=True)
                ]
            case _:
                row = []
        losses.append(row)
    return losses


def largest_covariances(case: Case) -> set[tuple[int, int]]:
    """Return the quarter of the tokens with the largest covariance, at least one."""
    found = ref.covariances(case.old_log_prob, case.advantages, case.mask)
    number = max(1, int(0.25 * len(found)))
    return set(sorted(found, key=lambda position: -found[position])[:number])


SETTINGS: dict[str, dict[str, float]] = {
    "ppo_clip": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    "decoupled_ppo": {},
    "cispo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
    "sapo": {"tau_pos": 1.5, "tau_neg": 0.7},
    "gpg": {},
    "policy_gradient": {},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "gspo_token": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "geo_mean": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
    "kl_cov": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.5},
}


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", list(SETTINGS))
def test_values_and_gradients(name: str, case: Case) -> None:
    log_prob = case.log_prob.clone().requires_grad_()
    got = loss_of(name, case, log_prob, **SETTINGS[name]).loss_BT
    assert not bool(got[case.mask == 0].any())
    mirror = case.log_prob.clone().requires_grad_()
    wanted = reference_losses(name, case, mirror, SETTINGS[name])
    for i, (row, positions) in enumerate(zip(wanted, ref.token_positions(case.mask), strict=True)):
        for loss, t in zip(row, positions, strict=True):
            assert got[i, t].item() == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    # Unequal weights, so that a gradient at the wrong token is detected.
    weights = torch.linspace(1, 2, got.numel(), dtype=torch.float64).view(got.shape)
    (weights * got).sum().backward()
    total = sum(
        weights[i, t] * loss
        for i, (row, positions) in enumerate(
            zip(wanted, ref.token_positions(case.mask), strict=True)
        )
        for loss, t in zip(row, positions, strict=True)
    )
    if isinstance(total, Tensor):
        total.backward()
        reference = mirror.grad.nan_to_num() * case.mask
        torch.testing.assert_close(log_prob.grad, reference, rtol=1e-6, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_clip_cov_selects_only_tokens_in_its_band(case: Case) -> None:
    options = {"clip_cov_ratio": 0.5, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0}
    got = loss_of("clip_cov", case, case.log_prob, **options, seed=3).loss_BT
    plain = loss_of("ppo_clip", case, case.log_prob, clip_ratio_c=1e9).loss_BT
    covariance = ref.covariances(case.old_log_prob, case.advantages, case.mask)
    band = {position for position, value in covariance.items() if 0.1 < value < 1.0}
    dropped = {position for position in covariance if got[position] == 0 and plain[position] != 0}
    assert dropped <= band
    assert len(dropped) == min(max(1, int(0.5 * len(covariance))), len(band))
    for position in set(covariance) - dropped:
        assert got[position] == plain[position]
    again = loss_of("clip_cov", case, case.log_prob, **options, seed=3).loss_BT
    assert torch.equal(got, again)


def test_every_entry_has_a_reference() -> None:
    """A new loss must be added to these tests."""
    assert set(POLICY_LOSSES) == {*SETTINGS, "clip_cov"}
    assert all(get_policy_loss(alias) is POLICY_LOSSES[name] for alias, name in ALIASES.items())


def one_token(name: str, *, ratio: float, advantage: float, **options: Any) -> float:
    """Return the loss of a single token with log π_old = −1."""
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    log_prob = old + torch.tensor(ratio, dtype=torch.float64).log()
    return compute_policy_loss(
        name, log_prob_BT=log_prob, selected_BT=torch.ones(1, 1, dtype=torch.bool),
        old_log_prob_BT=old, advantages_BT=torch.tensor([[advantage]], dtype=torch.float64),
        response_mask_BT=torch.ones(1, 1), rollout_log_prob_BT=old - torch.tensor(2.0).log(),
        **options,
    ).loss_BT.item()  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "advantage", "want"),
    [
        (1.1, 2.0, -2.2),  # inside the clip range
        (1.5, 2.0, -2.56),  # above 1 + 0.28
        (0.5, 2.0, -1.0),  # below 1 − 0.2, but A > 0 raises r again: not clipped
        (0.5, -2.0, 1.6),  # below 1 − 0.2
        (1.5, -2.0, 3.0),  # above 1 + 0.28, but A < 0 lowers r again: not clipped
        (9.0, -2.0, 6.0),  # dual clip at 3
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, want: float) -> None:
    got = one_token("ppo_clip", ratio=ratio, advantage=advantage, clip_ratio_high=0.28)
    assert got == pytest.approx(want)


def test_a_token_beyond_the_cap_of_its_behaviour_weight_has_loss_zero() -> None:
    assert one_token("decoupled_ppo", ratio=1.0, advantage=3.0) == pytest.approx(-6.0)
    assert one_token("decoupled_ppo", ratio=1.0, advantage=3.0, behaviour_weight_cap=1.5) == 0.0


def test_clip_cov_by_hand() -> None:
    """The covariances (log π − mean)(A − mean) are 2, 0, 2; the band (1, 5) contains both 2s."""
    old = torch.tensor([[-1.0, -2.0, -3.0]])
    advantages = torch.tensor([[3.0, 1.0, -1.0]])
    band = {"clip_cov_ratio": 1.0, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    mask = torch.ones(1, 3)
    chosen = select_tokens("clip_cov", old_log_prob_BT=old, advantages_BT=advantages,
                           response_mask_BT=mask, **band)  # fmt: skip
    assert chosen.tolist() == [[True, False, True]]
    loss = compute_policy_loss(
        "clip_cov", log_prob_BT=old, old_log_prob_BT=old, advantages_BT=advantages,
        response_mask_BT=mask, selected_BT=chosen,
    ).loss_BT  # fmt: skip
    assert loss.tolist() == [[0.0, -1.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_importance_weights_multiply_the_loss(name: str, case: Case) -> None:
    weights = torch.full_like(case.mask, 1, dtype=torch.float64)
    weights[::2] = 0.25
    plain = loss_of(name, case, case.log_prob).loss_BT
    weighted = loss_of(name, case, case.log_prob, importance_weights_BT=weights)
    torch.testing.assert_close(weighted.loss_BT, plain * weights)


def test_importance_weights_of_a_loss_per_sequence_are_averaged() -> None:
    old = torch.zeros(1, 2)
    result = compute_policy_loss(
        "geo_mean", log_prob_BT=old, old_log_prob_BT=old, advantages_BT=torch.ones(1, 2),
        response_mask_BT=torch.ones(1, 2), importance_weights_BT=torch.tensor([[0.5, 1.5]]),
    )  # fmt: skip
    assert result.loss_BT.tolist() == [[-1.0, -1.0]]


def test_metrics_by_hand() -> None:
    old = torch.full((1, 5), -1.0)
    ratio = torch.tensor([[1.0, 1.5, 0.5, 9.0, 2.0]])
    result = compute_policy_loss(
        "ppo_clip",
        log_prob_BT=old + ratio.log(),
        old_log_prob_BT=old,
        advantages_BT=torch.tensor([[1.0, 1.0, 1.0, -1.0, 1.0]]),
        response_mask_BT=torch.tensor([[1, 1, 1, 1, 0]]),
    )
    metrics = merge_partials([result.metrics])
    assert metrics["pg_clipfrac"] == pytest.approx(0.25)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(0.25)
    assert (metrics["ratio_max"], metrics["ratio_min"]) == pytest.approx((9.0, 0.5))
    assert metrics["ppo_kl"] == pytest.approx(-float(ratio[0, :4].log().mean()))
