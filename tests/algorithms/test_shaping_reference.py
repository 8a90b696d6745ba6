"""Reward shaping, importance weights and mismatch metrics against reference implementations."""

from __future__ import annotations

import math
import statistics

import algorithm_reference as ref
import pytest
from algorithm_cases import Case, cases
from hypothesis import given, settings

from quadriga.algorithms.importance import mismatch_metrics
from quadriga.algorithms.shaping import (
    shape_rewards,
)


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("whiten", [False, True])
def test_clipping_and_whitening(limit: float | None, whiten: bool, case: Case) -> None:
    rows = [
        [min(max(x, -limit), limit) if limit else x for x in row] for row in case.rewards.tolist()
    ]
    if whiten:
        chosen = [
            rows[i][t]
            for i, positions in enumerate(ref.token_positions(case.mask))
            for t in positions
        ]
        centre = ref.mean(chosen) if chosen else 0.0
        rows = [[x + centre for x in row] for row in ref.whiten(rows, case.mask)]
    got = shape_rewards(case.rewards, case.mask, clip=limit, whiten=whiten)
    for i, ms in enumerate(case.mask.tolist()):
        for t, m in enumerate(ms):
            assert got[i, t].item() == pytest.approx(rows[i][t] if m else 0.0, rel=1e-6, abs=1e-7)


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
