"""Held-out accuracy: greedy answers (or as `rollout.val_sampling` says), scored like training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quadriga.protocol import DataProto
from quadriga.trainer import stages

if TYPE_CHECKING:
    from quadriga.trainer.record import RunRecord


class Validator:
    """Answers every held-out prompt once and records mean score and samples."""

    def __init__(
        self,
        seed: int,
        loader: Any | None,
        rollout: Any,
        reward_fn: Callable[[DataProto], DataProto],
        record: RunRecord,
    ) -> None:
        self.seed = seed
        self.loader = loader
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.record = record
        self.last: dict[str, float] = {}

    def run(self, *, step: int, due: bool) -> dict[str, float]:
        """Validate if due and if there is held-out data. Returns the metrics, empty if not."""
        if not due or self.loader is None:
            return {}
        scores: list[float] = []
        with self.record.span("validate"):
            for number, prompts in enumerate(self.loader):
                rows = stages.expand_prompts(prompts, n=1, step=number, seed=self.seed)
                answered = stages.answer(self.rollout, rows, "val")
                answered = answered.union(self.reward_fn(answered))
                scores += answered.batch["token_level_scores"].sum(-1).tolist()
                if number == 0:
                    self.record.samples(step, answered, split="val")
        self.last = {"val/accuracy": sum(scores) / len(scores), "val/samples": float(len(scores))}
        self.record.validation(step, self.last)
        return self.last
