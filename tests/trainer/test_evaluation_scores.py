"""Metrics of several responses to a prompt: by hand, and against loops over all subsets."""

import itertools
import random

import numpy as np
import pytest

from quadriga.errors import DataError
from quadriga.trainer import validation


def prompt(scores, answers=None, source="s"):
    return validation.PromptScores(source, scores, answers or [None] * len(scores))


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
        share = sum(any(subset) for subset in subsets) / len(subsets)
        assert validation.pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", range(1, 6))
def test_best_at_k_is_the_mean_over_subsets_of_the_largest_score(k):
    draw = random.Random(k)
    scores = [[draw.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(5)] for _ in range(4)]
    want = [np.mean([max(s) for s in itertools.combinations(row, k)]) for row in scores]
    assert validation.best_at_k(np.array(scores), k).tolist() == pytest.approx(want)
    assert validation.best_at_k(np.array([[5.0, 1.0, 2.0]]), 2).tolist() == pytest.approx([4.0])


@pytest.mark.parametrize(
    ("scores", "answers", "want"),
    [
        ([1, 0, 1], ["7", "8", "7"], 1.0),
        ([1, 0, 0], ["7", "8", "8"], 0.0),
        ([1, 1, 0, 0, 0], ["7", "7", "8", "8", None], 0.5),
        ([0, 0, 1], [None, None, "7"], 1.0),
        ([0.25, 0.75], [None, None], 0.5),
        ([0.5, 1.0, 0.0], ["7", "7", "8"], 0.75),
    ],
)
def test_the_score_of_the_majority_by_hand(scores, answers, want):
    assert validation.majority_score(scores, answers) == want


def test_a_summary_by_hand():
    """Two prompts of source a with 2 and 0 of 4 correct responses, one of source b with 1."""
    found = validation.summarise(
        [
            prompt([1, 0, 1, 0], ["7", "8", "7", None], "a"),
            prompt([0, 0, 0, 0], ["1", "2", "3", "4"], "a"),
            prompt([0, 0.5, 1, 0], source="b"),
        ],
        validation.SummarySettings(resamples=10),
    )
    assert [s.data_source for s in found] == ["a", "b", validation.OVERALL]
    assert [(s.prompts, s.responses) for s in found] == [(2, 8), (1, 4), (3, 12)]
    a, b, both = ({name: e.value for name, e in s.metrics.items()} for s in found)
    assert a == pytest.approx(
        {"mean@4": 0.25, "pass@1": 0.25, "pass@2": 5 / 12, "pass@4": 0.5,
         "best@2": 5 / 12, "best@4": 0.5, "maj@4": 0.5}
    )  # fmt: skip
    # Largest of two of 0 0 0.5 1: one pair 0 0, two pairs with 0.5, three with 1.
    assert b == pytest.approx({"mean@4": 0.375, "pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0,
                               "best@2": 4 / 6, "best@4": 1.0})  # fmt: skip
    assert both["mean@4"] == pytest.approx((0.5 + 0 + 0.375) / 3)
    assert both["pass@2"] == pytest.approx((5 / 6 + 0 + 0.5) / 3)
    assert (found[1].metrics["mean@4"].low, found[1].metrics["mean@4"].high) == (None, None)


def test_the_interval_against_a_naive_bootstrap():
    draw = np.random.default_rng(3)
    values = np.stack([draw.random(40), draw.integers(0, 2, 40).astype(float)], axis=1)
    low, high = validation.bootstrap_interval(
        values, validation.SummarySettings(resamples=300, confidence=0.9, seed=5)
    )
    again = np.random.default_rng(5)
    for column in range(2):
        means = []
        generator = np.random.default_rng(5) if column else again
        for _ in range(300):
            drawn = generator.integers(40, size=40)
            means.append(sum(values[i, column] for i in drawn) / 40)
        means.sort()
        assert means[14] <= low[column] <= means[15]  # 5 % of 299 steps is 14.95
        assert means[284] <= high[column] <= means[285]


def test_different_numbers_of_responses_are_refused():
    with pytest.raises(DataError, match="prompt 1 has 2 responses and prompt 0 has 1"):
        validation.summarise([prompt([1.0]), prompt([1.0, 0.0])], validation.SummarySettings())
    with pytest.raises(DataError, match="no prompts to summarise"):
        validation.summarise([], validation.SummarySettings())
