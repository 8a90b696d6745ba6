"""Validation: responses to prompts that are not trained on, scored by the training reward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from quadriga.protocol import fields
from quadriga.trainer import stages
from quadriga.trainer.roles.stage_runner import StageRunner
from quadriga.trainer.stages import BatchReward, Metrics

if TYPE_CHECKING:
    from quadriga.data import PromptLoader
    from quadriga.trainer.run.record import RunRecord
    from quadriga.workers.roles import RolloutGroup


class Validator:
    """Generates one response per validation prompt and records the mean score and samples.

    The mean is an accuracy (`val/accuracy`) if all scores so far are 0 or 1: right or wrong.
    Sampling is that of `rollout.val_sampling`, greedy by default. Without a loader `run` does
    nothing. The rollout generates within `generating()`. `run_stage` runs the stages, with those of
    added roles beside them.
    """

    def __init__(
        self,
        seed: int,
        loader: PromptLoader | None,
        rollout: RolloutGroup,
        reward: BatchReward,
        record: RunRecord,
        *,
        generating: Callable[[], AbstractContextManager[None]] = nullcontext,
        run_stage: StageRunner | None = None,
    ) -> None:
        self.seed = seed
        self.loader = loader
        self.rollout = rollout
        self.reward = reward
        self.record = record
        self.generating = generating
        self.run_stage = run_stage or StageRunner()
        self.last: Metrics = {}
        self.scores_right_or_wrong = True

    def run(self, *, step: int, due: bool) -> Metrics:
        """Validate if `due`, and if there is validation data. Return the metrics, else {}."""
        if not due or self.loader is None:
            return {}
        scores: list[float] = []
        with self.record.span("validate"), self.generating():
            for number, prompts in enumerate(self.loader):
                # The seeds depend on the number of the batch and not on the training step, so
                # that validations of different steps sample with the same random numbers.
                run, expand = self.run_stage, stages.expand_prompts
                rows = run(expand, prompts, n=1, step=number, seed=self.seed).batch
                batch = run(stages.generate, rows, self.rollout, "val").batch
                batch = run(stages.score_responses, batch, self.reward).batch
                scores += batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1).tolist()
                if number == 0:
                    self.record.log_samples(step, batch, split="val")
        self.scores_right_or_wrong &= set(scores) <= {0.0, 1.0}
        mean = sum(scores) / len(scores)
        self.last = {"val/score": mean, "val/samples": float(len(scores))}
        if self.scores_right_or_wrong:
            self.last["val/accuracy"] = mean
        self.record.log_validation(step, self.last)
        return self.last
