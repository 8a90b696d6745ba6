"""From prompts to the responses that a step trains on.

consumes      prompts; with refilling, more prompts from the same iterator
produces      `rollout.n` rows per prompt, complete prompt groups, next to each other
waits for     the rollout; with refilling also the rewards, which decide what stays
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.dynamic_sampling import dynamic_sampling
from quadriga.config.schema import TrainConfig
from quadriga.protocol import DataProto, fields
from quadriga.trainer import stages
from quadriga.trainer.dataflow import refills
from quadriga.trainer.roles.stage_runner import StageRunner
from quadriga.trainer.stages import BatchReward, Metrics, StageResult
from quadriga.workers.generation import GeneratingGroup


class Sampler:
    """Draws the batch of a step.

    Args:
        rollout: the worker group that generates.
        reward: scores a batch, where sampling depends on scores.
        stream: batches of prompts without end; refilling draws more of them.
        run: runs the stages, with those of added roles beside them; None: without added roles.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollout: GeneratingGroup,
        reward: BatchReward,
        stream: Iterator[DataProto],
        run: StageRunner | None = None,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward = reward
        self.stream = stream
        self.run = run or StageRunner()
        estimator = get_advantage(config.algorithm.adv_estimator)
        self.with_baselines = estimator.needs_baseline_scores

    def draw(self, prompts: DataProto, step: int) -> StageResult:
        """Return the batch of a step and metrics. With refilling the rows are scored already."""
        batch = self._generate(prompts, step, turn=0)
        metrics: Metrics = {}
        if refills(self.config):
            batch, metrics = self.refill(batch, len(prompts), step)
        return StageResult(batch, metrics)

    def refill(self, batch: DataProto, wanted: int, step: int) -> StageResult:
        """Keep the prompt groups whose scores differ, and draw more until there are `wanted`
        (DAPO, arXiv 2503.14476, section 3.2).

        Stops at `filter_groups.max_num_gen_batches` draws, however many groups there are then. The
        metrics of the reward function are those of the last draw.
        """
        settings = self.config.algorithm.filter_groups
        batch, scoring = self.run(stages.score_responses, batch, self.reward)
        turn = 1
        while True:
            decision = dynamic_sampling(
                batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1),
                batch.non_tensor_batch[fields.UID],
                wanted_groups=wanted,
                mode="refill",
                gen_batches=turn,
                max_num_gen_batches=settings.max_num_gen_batches,
                under_filled=settings.under_filled,
            )
            batch = batch.select_idxs(decision.rows)
            if decision.action == "train":
                drawn = {
                    f"group/{name}": decision.metrics[name] for name in ("kept", "gen_batches")
                }
                return StageResult(batch, {**drawn, **scoring})
            # `turn` is part of the seed, so that a prompt that is drawn twice in one step does
            # not sample the same responses again.
            more = self._generate(next(self.stream), step, turn)
            more, scoring = self.run(stages.score_responses, more, self.reward)
            batch = DataProto.concat([batch, more])
            turn += 1

    def _generate(self, prompts: DataProto, step: int, turn: int) -> DataProto:
        n = self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed
        expand = stages.expand_prompts
        rows = self.run(expand, prompts, n=n, step=step, seed=seed, turn=turn).batch
        if self.with_baselines:
            rows = stages.add_baselines(rows, self._score_greedy(rows, n)).batch
        return self.run(stages.generate, rows, self.rollout, "train").batch

    def _score_greedy(self, rows: DataProto, n: int) -> DataProto:
        """One greedy response per prompt, scored; `n` neighbouring rows have the same prompt."""
        first_of_each = rows.select_idxs(np.arange(0, len(rows), n))
        run = self.run.without_updates()
        greedy = run(stages.generate, first_of_each, self.rollout, "greedy").batch
        return run(stages.score_responses, greedy, self.reward).batch
