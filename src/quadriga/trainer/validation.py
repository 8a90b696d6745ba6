"""Validation: responses to prompts that are not trained on, scored by the training reward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from quadriga.data import PromptLoader
from quadriga.errors import DataError
from quadriga.protocol import DataProto, fields
from quadriga.rewards.manager import RewardManager
from quadriga.streams.playing import EpisodeGenerator
from quadriga.trainer import stages
from quadriga.trainer.record import Metrics, RunRecord
from quadriga.trainer.stages import BatchReward, StageRunner
from quadriga.workers.roles import GeneratingGroup

CORE, OTHER = "val-core", "val-aux"
"""Beginnings of the metrics of a data source, as verl names them: those of all n responses to a
prompt, and those of k < n."""


AddMetrics = Callable[[Mapping[str, float]], None]
"""Adds metrics to those of the current step."""


@dataclass(eq=False)
class Validator:
    """Generates `n` responses per validation prompt, and records scores and samples.

    The mean is an accuracy (`val/accuracy`) if all scores so far are 0 or 1: right or wrong. Each
    data source has metrics of its own (`source_metrics`). Sampling is that of
    `rollout.val_sampling`, greedy by default; the random numbers of a prompt depend on `seed` and
    on its row of the data, so they are the same in every validation. Without a loader `run` does
    nothing. The rollout generates within `generating(add)`, which adds its metrics to the step.
    `runner` runs the stages, and those of added roles beside them.
    """

    seed: int
    loader: PromptLoader | None
    rollout: GeneratingGroup | EpisodeGenerator
    reward: BatchReward
    record: RunRecord
    _: KW_ONLY
    n: int = 1
    generating: Callable[[AddMetrics], AbstractContextManager[object]] = nullcontext
    runner: StageRunner = field(default_factory=StageRunner)

    def __post_init__(self) -> None:
        # A run that is resumed continues after the last validation before the checkpoint.
        self.last: Metrics = self.record.last_validation
        self.scores_right_or_wrong = not self.last or "val/accuracy" in self.last

    def run(self, *, step: int, due: bool) -> Metrics:
        """Validate if `due`, and if there is validation data. Return the metrics, else {}."""
        if not due or self.loader is None:
            return {}
        prompts: list[PromptScores] = []
        written = 0
        with self.record.span("validate"), self.generating(self.record.add):
            for batch in self._scored_batches(self.loader):
                prompts += self._prompts(batch)
                written += self.record.log_samples(step, batch, split="val", written=written)
        scores = [score for prompt in prompts for score in prompt.scores]
        if isinstance(self.reward, RewardManager):
            self.reward.check_any(samples=len(scores))
        self.scores_right_or_wrong &= set(scores) <= {0.0, 1.0}
        mean = sum(scores) / len(scores)
        summaries = summarise(prompts, SummarySettings(seed=self.seed))
        self.last = {"val/score": mean, "val/samples": float(len(scores))}
        if self.scores_right_or_wrong:
            self.last["val/accuracy"] = mean
        self.last |= source_metrics(summaries, self.n)
        lines = [(summary.data_source, one_line(summary)) for summary in summaries]
        self.record.log_validation(step, self.last, lines)
        return self.last

    def _scored_batches(self, loader: PromptLoader) -> Iterator[DataProto]:
        result, expand = self.runner.result, stages.expand_prompts
        for number, prompts in enumerate(loader):
            rows = result(
                expand, prompts, n=self.n, step=number, seed=self.seed, seed_by_index=True
            ).batch
            batch = result(stages.generate, rows, self.rollout, "val").batch
            if hasattr(self.reward, "answers"):
                self.reward.answers = []  # they stay so if a role scores the responses
            yield result(stages.score_responses, batch, self.reward).batch

    def _prompts(self, batch: DataProto) -> Iterator[PromptScores]:
        """Yield the scores of each prompt; its n rows are neighbours."""
        scores = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist()
        arrays = batch.non_tensor_batch
        sources: Sequence[object] = [None] * len(batch)
        if fields.DATA_SOURCE in arrays:
            sources = arrays[fields.DATA_SOURCE].tolist()
        # A reward function may keep the answers in the responses of its last call.
        answers: list[str | None] = getattr(self.reward, "answers", []) or [None] * len(batch)
        for start in range(0, len(batch), self.n):
            own = slice(start, start + self.n)
            source = NO_SOURCE if sources[start] is None else str(sources[start])
            yield PromptScores(source, scores[own], answers[own])


def source_metrics(summaries: Sequence[SourceSummary], n: int) -> Metrics:
    """Return the metrics of each data source under verl's names.

    With n = 4, source gsm8k has among others `val-core/gsm8k/reward/mean@4`,
    `val-core/gsm8k/reward/best@4/mean`, `val-core/gsm8k/reward/pass@4` and
    `val-aux/gsm8k/reward/pass@2`.
    """
    found: Metrics = {}
    for summary in summaries:
        for name, estimate in summary.metrics.items():
            kind, _, k = name.partition("@")
            group = CORE if int(k) == n else OTHER
            ending = "/mean" if kind in ("best", "maj") else ""
            found[f"{group}/{summary.data_source}/reward/{name}{ending}"] = estimate.value
    return found


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
    scores: list[float]
    answers: list[str | None]


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
    low_M, high_M = bootstrap_interval(values_PM, settings)
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


def bootstrap_interval(values_PM: Floats, settings: SummarySettings) -> tuple[Floats, Floats]:
    """Return the bounds of the percentile interval of the mean over prompts, each [M].

    Each resample draws P prompts with replacement, the same ones for all metrics (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
    """
    count = len(values_PM)
    generator = np.random.default_rng(settings.seed)
    means_RM = np.empty((settings.resamples, values_PM.shape[1]))
    for number in range(settings.resamples):
        # How often each prompt is drawn; a product with it needs no copy of the drawn rows.
        times_P = np.bincount(generator.integers(count, size=count), minlength=count)
        means_RM[number] = times_P @ values_PM / count
    tail = (1 - settings.confidence) / 2
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
