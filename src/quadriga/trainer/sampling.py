"""From prompts to the answers that a step trains on.

consumes      prompts; with refilling, more prompts from the same stream
produces      `rollout.n` rows a prompt, whole groups, in an order that gives ranks equal tokens
waits for     the rollout; with refilling also for the rewards, since they decide what is kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.dynamic_sampling import dynamic_sampling
from quadriga.config.schema import TrainConfig
from quadriga.protocol import DataProto
from quadriga.trainer import stages

Reward = Callable[[DataProto], DataProto]


class Sampler:
    """Draws a step's batch.

    Args:
        rollout: the group that generates. reward_fn: scores a batch.
        stream: batches of prompts without end; refilling draws on it.
        balance_over: ranks to balance tokens over; 1 leaves the order as it is.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollout: Any,
        reward_fn: Reward,
        stream: Iterator[DataProto],
        balance_over: int,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward_fn = reward_fn
        self.stream = stream
        self.balance_over = balance_over
        filter_groups = config.algorithm.filter_groups
        self.refills = filter_groups.enable and filter_groups.mode == "refill"
        estimator = get_advantage(config.algorithm.adv_estimator)
        self.with_baselines = estimator.needs_baseline_scores

    def draw(self, prompts: DataProto, step: int) -> tuple[DataProto, dict[str, float]]:
        """A step's batch, and metrics. Scores are in it already if they decided what to keep."""
        batch, metrics = self._generate(prompts, step, 0), {}
        if self.refills:
            batch, metrics = self._refill(batch, len(prompts), step)
        if self.balance_over > 1:
            batch, spread = stages.balance_over_ranks(batch, self.balance_over)
            metrics |= spread
        return batch, metrics

    def _generate(self, prompts: DataProto, step: int, turn: int) -> DataProto:
        settings = self.config.actor_rollout_ref.rollout
        rows = stages.expand_prompts(
            prompts, n=settings.n, step=step, seed=self.config.trainer.seed, turn=turn
        )
        batch = stages.answer(self.rollout, rows, "train")
        if self.with_baselines:
            greedy = stages.answer(self.rollout, stages.one_row_each(rows, settings.n), "greedy")
            scores = self.reward_fn(greedy).batch["token_level_scores"].sum(-1)
            batch.batch["reward_baselines"] = scores.repeat_interleave(settings.n)
        return batch

    def _refill(
        self, batch: DataProto, wanted: int, step: int
    ) -> tuple[DataProto, dict[str, float]]:
        """Keep groups with signal and draw more until there are `wanted`, or the bound is reached
        (DAPO, arXiv 2503.14476, section 3.2)."""
        settings = self.config.algorithm.filter_groups
        batch = batch.union(self.reward_fn(batch))
        turn = 1
        while True:
            decision = dynamic_sampling(
                batch.batch["token_level_scores"].sum(-1),
                batch.non_tensor_batch["uid"],
                wanted_groups=wanted,
                mode="refill",
                gen_batches=turn,
                max_num_gen_batches=settings.max_num_gen_batches,
                under_filled=settings.under_filled,
            )
            batch = batch.select_idxs(decision.rows)
            if decision.action == "train":
                drawn = {name: decision.metrics[name] for name in ("kept", "gen_batches")}
                return batch, {f"group/{name}": value for name, value in drawn.items()}
            more = self._generate(next(self.stream), step, turn)
            batch = DataProto.concat([batch, more.union(self.reward_fn(more))])
            turn += 1
