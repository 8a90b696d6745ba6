"""Importance weights and mismatch metrics of rollout engine and training engine."""

import math
import statistics

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import NAN, Case, cases
from hypothesis import given, settings

from quadriga.algorithms.aggregation import merge_partials
from quadriga.algorithms.importance import (
    LEVELS,
    MODES,
    importance_correction,
    mismatch_metrics,
    mismatch_of_statistics,
    mismatch_statistics,
)
from quadriga.errors import AlgorithmError, NonFiniteError, UnknownNameError

# Weights w of the tokens: 2 and 1/2 in row 0, 4 in row 1; row 2 has no token.
OLD = torch.tensor([[math.log(0.8), math.log(0.1)], [math.log(0.4), NAN], [NAN, NAN]])
ROLLOUT = torch.tensor([[math.log(0.4), math.log(0.2)], [math.log(0.1), NAN], [NAN, NAN]])
MASK = torch.tensor([[1, 1], [1, 0], [0, 0]])


@pytest.mark.parametrize(
    ("level", "mode", "want"),
    [
        ("token", "truncate", [2, 0.5, 3, 0, 0, 0]),
        ("token", "mask", [2, 0.5, 0, 0, 0, 0]),
        ("sequence", "truncate", [1, 1, 3, 0, 0, 0]),
    ],
)
def test_weights_by_hand(level: str, mode: str, want: list[float]) -> None:
    got = importance_correction(OLD, ROLLOUT, MASK, level=level, mode=mode, upper=3.0)
    assert got.weights_BT.flatten().tolist() == pytest.approx(want)
    assert got.metrics["is_outside_fraction"] == pytest.approx(1 / 3)
    assert got.metrics["is_sample_fraction_left_out"] == (0.5 if mode == "mask" else 0.0)


def test_normalised_weights_with_a_lower_bound_by_hand() -> None:
    got = importance_correction(OLD, ROLLOUT, MASK, upper=3.0, lower=1.0, normalise=True)
    assert got.weights_BT.flatten().tolist() == pytest.approx([1, 0.5, 1.5, 0, 0, 0])
    assert got.metrics["is_weight_mean"] == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("level", list(LEVELS))
def test_weights_against_the_reference(level: str, mode: str, case: Case) -> None:
    got = importance_correction(
        case.old_log_prob, case.rollout_log_prob, case.mask, level=level, mode=mode, upper=1.2
    )
    for i, row in enumerate(case.mask.tolist()):
        gaps = [
            float(case.old_log_prob[i, t] - case.rollout_log_prob[i, t])
            for t, m in enumerate(row)
            if m
        ]
        for t, m in enumerate(row):
            weight = got.weights_BT[i, t].item()
            if not m:
                assert weight == 0 and not got.mask_BT[i, t]
                continue
            gap = float(case.old_log_prob[i, t] - case.rollout_log_prob[i, t])
            exponent = {
                "token": gap,
                "sequence": math.fsum(gaps),
                "geometric": math.fsum(gaps) / len(gaps),
            }[level]
            raw = math.exp(exponent)
            if mode == "truncate":
                assert weight == pytest.approx(min(raw, 1.2))
            else:
                inside = 1 / 1.2 <= raw <= 1.2
                assert bool(got.mask_BT[i, t]) == inside
                assert weight == pytest.approx(raw if inside else 0.0)


@pytest.mark.parametrize(("bound", "share"), [(0.5, 1.0), (1.0, 1 / 3), (1.5, 0.0)])
def test_the_share_of_tokens_beyond_a_bound_by_hand(bound: float, share: float) -> None:
    """The differences are ln 2, −ln 2 and ln 4."""
    got = mismatch_metrics(OLD, ROLLOUT, MASK, bound=bound)
    assert got["mismatch_beyond"] == pytest.approx(share)


def effective_fraction(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_mismatch_metrics(case: Case) -> None:
    rows = [
        [(float(case.old_log_prob[i, t]), float(case.rollout_log_prob[i, t])) for t in positions]
        for i, positions in enumerate(ref.token_positions(case.mask))
        if positions
    ]
    got = mismatch_metrics(case.old_log_prob, case.rollout_log_prob, case.mask)
    if not rows:
        assert got == {}
        return
    gaps = [[old - rollout for old, rollout in row] for row in rows]
    flat = [gap for row in gaps for gap in row]
    ppl = [tuple(math.exp(-ref.mean([pair[k] for pair in row])) for k in (0, 1)) for row in rows]
    want = {
        "mismatch_k1": -ref.mean(flat),
        "mismatch_k3": ref.mean([math.exp(gap) - 1 - gap for gap in flat]),
        "mismatch_abs": ref.mean([abs(gap) for gap in flat]),
        "mismatch_max": max(abs(gap) for gap in flat),
        "mismatch_prob_max": max(abs(math.exp(a) - math.exp(b)) for row in rows for a, b in row),
        "ppl_gap": ref.mean([train - rollout for train, rollout in ppl]),
        "ppl_ratio": math.exp(ref.mean([math.log(train / rollout) for train, rollout in ppl])),
        "effective_sample_size": effective_fraction([math.exp(gap) for gap in flat]),
        "mismatch_sequence_ess": effective_fraction([math.exp(sum(row)) for row in gaps]),
        "mismatch_beyond": ref.mean([float(abs(gap) > 0.5) for gap in flat]),
    }
    pairs = [pair for row in rows for pair in row]
    if min(len({pair[k] for pair in pairs}) for k in (0, 1)) > 1:  # both vary
        want["mismatch_correlation"] = statistics.correlation(*zip(*pairs, strict=True))
    assert got == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_merged_micro_batches_have_the_metrics_of_the_whole_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    train = -3 * torch.rand(6, 4, generator=generator)
    rollout = train + 0.7 * torch.randn(6, 4, generator=generator)
    mask = (torch.rand(6, 4, generator=generator) < 0.7).long()
    parts = [
        mismatch_statistics(train[rows], rollout[rows], mask[rows], bound=0.3)
        for rows in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    merged = mismatch_of_statistics(merge_partials(parts))
    assert merged == pytest.approx(mismatch_metrics(train, rollout, mask, bound=0.3))


def test_equal_log_probabilities_have_no_mismatch() -> None:
    got = mismatch_metrics(OLD, OLD, MASK)
    assert got == {
        **dict.fromkeys(got, 0.0),
        "ppl_ratio": 1.0,
        "effective_sample_size": 1.0,
        "mismatch_sequence_ess": 1.0,
        "mismatch_correlation": 1.0,
    }
    assert importance_correction(OLD, OLD, MASK).weights_BT.tolist() == MASK.tolist()


def test_very_different_log_probabilities_give_finite_numbers() -> None:
    got = mismatch_metrics(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1))
    assert all(math.isfinite(value) for value in got.values())
    weight = importance_correction(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.ones(1, 1))
    assert weight.weights_BT.item() == 2.0


def test_invalid_arguments_raise() -> None:
    with pytest.raises(UnknownNameError, match=r"no importance level 'tokens'.* mean 'token"):
        importance_correction(OLD, ROLLOUT, MASK, level="tokens")
    with pytest.raises(UnknownNameError, match="no importance mode 'clip'"):
        importance_correction(OLD, ROLLOUT, MASK, mode="clip")
    with pytest.raises(AlgorithmError, match="`lower` must be at least 0 and below `upper`"):
        importance_correction(OLD, ROLLOUT, MASK, upper=1.0, lower=2.0)
    with pytest.raises(NonFiniteError, match="`rollout_log_prob` is nan at row 2, token 0"):
        importance_correction(torch.zeros(3, 2), ROLLOUT, torch.tensor([[1, 1], [1, 0], [1, 0]]))
