"""Validation: responses to prompts that are not trained on, scored by the training reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quadriga.protocol import DataProto, fields
from quadriga.trainer import stages
from quadriga.trainer.scores import (
    NO_SOURCE,
    PromptScores,
    SourceSummary,
    SummarySettings,
    summarise,
)
from quadriga.trainer.stage_runner import StageRunner
from quadriga.trainer.stages import BatchReward, Metrics

if TYPE_CHECKING:
    from quadriga.data import PromptLoader
    from quadriga.trainer.record import RunRecord
    from quadriga.workers.generation import GeneratingGroup

CORE, OTHER = "val-core", "val-aux"
"""Beginnings of the metrics of a data source, as verl names them: those of all n responses to a
prompt, and those of k < n."""


@runtime_checkable
class HasAnswers(Protocol):
    """A reward function that keeps the answers in the responses of its last call."""

    answers: list[str | None]


AddMetrics = Callable[[Mapping[str, float]], None]
"""Adds metrics to those of the current step."""


class Validator:
    """Generates `n` responses per validation prompt, and records scores and samples.

    The mean is an accuracy (`val/accuracy`) if all scores so far are 0 or 1: right or wrong. Each
    data source has metrics of its own (`source_metrics`). Sampling is that of
    `rollout.val_sampling`, greedy by default; the random numbers of a prompt depend on `seed` and
    on its row of the data, so they are the same in every validation. Without a loader `run` does
    nothing. The rollout generates within `generating(add)`, which adds its metrics to the step.
    `run_stage` runs the stages, with those of added roles beside them.
    """

    def __init__(
        self,
        seed: int,
        loader: PromptLoader | None,
        rollout: GeneratingGroup,
        reward: BatchReward,
        record: RunRecord,
        *,
        n: int = 1,
        generating: Callable[[AddMetrics], AbstractContextManager[object]] = nullcontext,
        run_stage: StageRunner | None = None,
    ) -> None:
        self.seed = seed
        self.loader = loader
        self.rollout = rollout
        self.reward = reward
        self.record = record
        self.n = n
        self.generating = generating
        self.run_stage = run_stage or StageRunner()
        # A run that is resumed continues after the last validation before the checkpoint.
        self.last: Metrics = record.last_validation
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
        self.scores_right_or_wrong &= set(scores) <= {0.0, 1.0}
        mean = sum(scores) / len(scores)
        summaries = summarise(prompts, SummarySettings(seed=self.seed))
        self.last = {"val/score": mean, "val/samples": float(len(scores))}
        if self.scores_right_or_wrong:
            self.last["val/accuracy"] = mean
        self.last |= source_metrics(summaries, self.n)
        self.record.log_validation(step, self.last, summaries)
        return self.last

    def _scored_batches(self, loader: PromptLoader) -> Iterator[DataProto]:
        run, expand = self.run_stage, stages.expand_prompts
        for number, prompts in enumerate(loader):
            rows = run(
                expand, prompts, n=self.n, step=number, seed=self.seed, seed_by_index=True
            ).batch
            batch = run(stages.generate, rows, self.rollout, "val").batch
            if isinstance(self.reward, HasAnswers):
                self.reward.answers = []  # they stay so if a role scores the responses
            yield run(stages.score_responses, batch, self.reward).batch

    def _prompts(self, batch: DataProto) -> Iterator[PromptScores]:
        """Yield the scores of each prompt; its n rows are neighbours."""
        scores = batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist()
        arrays = batch.non_tensor_batch
        sources: Sequence[object] = [None] * len(batch)
        if fields.DATA_SOURCE in arrays:
            sources = arrays[fields.DATA_SOURCE].tolist()
        answers: list[str | None] = [None] * len(batch)
        if isinstance(self.reward, HasAnswers) and self.reward.answers:
            answers = self.reward.answers
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
