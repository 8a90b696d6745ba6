"""From the scores of several responses to each prompt to metrics with confidence intervals.

    metric    of one prompt with n responses, of which c are correct
    mean@n    mean score
    pass@k    probability that at least one of k responses is correct: 1 − C(n−c, k) / C(n, k)
    best@k    expected largest score of k responses
    maj@n     score of the most frequent answer

The k responses are drawn from the n without replacement. A metric of several prompts is its mean
over the prompts. Its interval is from a bootstrap over prompts, because the responses to one prompt
are not independent.

Shapes: P prompts, N responses to each, M metrics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quadriga.errors import DataError

Floats = npt.NDArray[np.float64]
OVERALL = "overall"
"""The name of the summary over all data sources."""
NO_SOURCE = "unknown"
"""The name of rows without a data source."""


@dataclass(frozen=True)
class PromptScores:
    """The responses to one prompt: their scores, and the answers extracted from them.

    `answers` has one entry for each score; None where a response has no answer.
    """

    data_source: str
    scores: Sequence[float]
    answers: Sequence[str | None]


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its confidence interval; None with fewer than two prompts."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SourceSummary:
    """The metrics of one data source, or of all (`OVERALL`)."""

    data_source: str
    prompts: int
    responses: int
    metrics: Mapping[str, Estimate]


@dataclass(frozen=True)
class SummarySettings:
    """How scores are summarised.

    Attributes:
        ks: of pass@k; empty: 1, 2, 4, … and n.
        correct_at: a response with at least this score is correct.
        resamples: of the bootstrap.
        confidence: of the intervals, between 0 and 1.
        seed: of the bootstrap.
    """

    ks: tuple[int, ...] = ()
    correct_at: float = 1.0
    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0

    def ks_of(self, n: int) -> tuple[int, ...]:
        """Return the k of pass@k for n responses to a prompt, in ascending order.

        For 6 responses and no `ks`: 1 2 4 6.
        """
        if self.ks:
            return tuple(sorted({k for k in self.ks if k <= n}))
        powers = (2**i for i in range(n.bit_length()))
        return tuple(sorted({*(k for k in powers if k <= n), n}))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n responses, drawn without replacement, hold a correct one.

    1 − C(n − c, k) / C(n, k), the unbiased estimator of Chen et al. (arXiv 2107.03374, eq. 1). With
    n = 4, c = 1 and k = 2: 1 − 3 / 6 = 0.5.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at_k(scores_PN: Floats, k: int) -> Floats:
    """Return for each prompt the expected largest of k scores, drawn without replacement, [P].

    Of the C(N, k) subsets, C(i − 1, k − 1) have the i-th smallest score as their largest. Scores
    1 2 5 with k = 2 have the subsets 1 2, 1 5 and 2 5: (1 · 2 + 2 · 5) / 3 = 4.
    """
    n = scores_PN.shape[1]
    weights_N = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    best_P: Floats = np.sort(scores_PN, axis=1) @ weights_N
    return best_P


def majority_score(scores: Sequence[float], answers: Sequence[str | None]) -> float:
    """Return the score of the most frequent answer, and of tied answers the mean of their scores.

    Responses without an answer do not vote, unless none of them has one. The score of an answer is
    the mean over its responses:

        answers   7  7  8  8  None        scores   1  1  0  0  0
        7 and 8 are tied: (1 + 0) / 2 = 0.5
    """
    voters: dict[str | None, list[float]] = defaultdict(list)
    for score, answer in zip(scores, answers, strict=True):
        voters[answer].append(score)
    if len(voters) > 1:
        voters.pop(None, None)
    most = max(map(len, voters.values()))
    winners = [math.fsum(own) / len(own) for own in voters.values() if len(own) == most]
    return math.fsum(winners) / len(winners)


def summarise(
    prompts: Sequence[PromptScores], settings: SummarySettings
) -> tuple[SourceSummary, ...]:
    """Return the metrics of each data source, sorted by name, and with several sources those of all
    prompts together at the end.

    Raises:
        DataError: there are no prompts, or they have different numbers of responses.
    """
    if not prompts:
        raise DataError("there are no prompts to summarise; expected at least one")
    n = len(prompts[0].scores)
    for number, prompt in enumerate(prompts):
        if len(prompt.scores) != n or n == 0:
            raise DataError(
                f"prompt {number} has {len(prompt.scores)} responses and prompt 0 has {n}; give "
                "every prompt the same number of responses, at least one"
            )
    sources: dict[str, list[PromptScores]] = defaultdict(list)
    for prompt in prompts:
        sources[prompt.data_source].append(prompt)
    found = [_summary(name, own, n, settings) for name, own in sorted(sources.items())]
    return (*found, _summary(OVERALL, prompts, n, settings)) if len(found) > 1 else tuple(found)


def _summary(
    name: str, prompts: Sequence[PromptScores], n: int, settings: SummarySettings
) -> SourceSummary:
    columns = _columns(prompts, n, settings)
    values_PM = np.stack(list(columns.values()), axis=1)
    low_M, high_M = bootstrap_interval(
        values_PM,
        resamples=settings.resamples,
        confidence=settings.confidence,
        seed=settings.seed,
    )
    single = len(prompts) == 1
    estimates = {
        metric: Estimate(
            float(column.mean()), None if single else float(low), None if single else float(high)
        )
        for (metric, column), low, high in zip(columns.items(), low_M, high_M, strict=True)
    }
    return SourceSummary(name, len(prompts), n * len(prompts), estimates)


def _columns(
    prompts: Sequence[PromptScores], n: int, settings: SummarySettings
) -> dict[str, Floats]:
    """Return metric → its value for each prompt, [P]."""
    scores_PN = np.array([prompt.scores for prompt in prompts], dtype=np.float64)
    correct_P = (scores_PN >= settings.correct_at).sum(axis=1)
    ks = settings.ks_of(n)
    columns: dict[str, Floats] = {f"mean@{n}": scores_PN.mean(axis=1)}
    for k in ks:
        of_count = np.array([pass_at_k(n, correct, k) for correct in range(n + 1)])
        columns[f"pass@{k}"] = of_count[correct_P]
    if n > 1:
        for k in sorted({*ks, n} - {1}):
            columns[f"best@{k}"] = best_at_k(scores_PN, k)
        if any(answer is not None for prompt in prompts for answer in prompt.answers):
            columns[f"maj@{n}"] = np.array([majority_score(p.scores, p.answers) for p in prompts])
    return columns


def bootstrap_interval(
    values_PM: Floats, *, resamples: int, confidence: float, seed: int
) -> tuple[Floats, Floats]:
    """Return the bounds of the percentile interval of the mean over prompts, each [M].

    Each resample draws P prompts with replacement, the same ones for all metrics (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
    """
    count = len(values_PM)
    generator = np.random.default_rng(seed)
    means_RM = np.empty((resamples, values_PM.shape[1]))
    for number in range(resamples):
        # How often each prompt is drawn; a product with it needs no copy of the drawn rows.
        times_P = np.bincount(generator.integers(count, size=count), minlength=count)
        means_RM[number] = times_P @ values_PM / count
    tail = (1 - confidence) / 2
    low_M, high_M = np.quantile(means_RM, [tail, 1 - tail], axis=0)
    return low_M, high_M


def interval(estimate: Estimate) -> str:
    """Return an interval as text, "0.38 – 0.44"; a dash if there is none."""
    if estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.low:.3f} – {estimate.high:.3f}"


def one_line(summary: SourceSummary) -> str:
    """Return the metrics of a data source in one line: "mean@1 0.412 [0.380 – 0.443], …"."""
    parts = [
        f"{name} {estimate.value:.3f} [{interval(estimate)}]"
        for name, estimate in summary.metrics.items()
        if _is_shown(name, summary.metrics)
    ]
    return f"{', '.join(parts)} ({summary.prompts} prompts)"


def _is_shown(name: str, metrics: Mapping[str, Estimate]) -> bool:
    """Whether a line shows a metric: of pass@k and best@k only that of the largest k above 1."""
    kind, _, k = name.partition("@")
    largest = max(int(other.partition("@")[2]) for other in metrics if other.startswith(kind))
    return kind in ("mean", "maj") or (int(k) == largest and largest > 1)
