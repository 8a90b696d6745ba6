"""From prompts to the responses that a step trains on.

consumes      prompts; with refilling, more prompts from the same iterator
produces      `rollout.n` rows per prompt, complete prompt groups, next to each other
waits for     the rollout; with refilling also the rewards, which decide what stays
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.dynamic_sampling import dynamic_sampling
from quadriga.algorithms.shaping import drop_truncated
from quadriga.config.schema import AlgorithmConfig, RewardModelConfig, TrainConfig
from quadriga.observability.metrics import MetricSet
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.rewards.functions import FAILURES
from quadriga.trainer import stages
from quadriga.trainer.record import Metrics, StageResult
from quadriga.trainer.stages import BatchReward, StageRunner
from quadriga.workers.generation import GeneratingGroup
from quadriga.workers.method_fields import COMPUTE_RM_SCORE
from quadriga.workers.roles import RewardModelGroup

_FAILED = (*(f"reward/{status}" for status in FAILURES), "reward/masked")
"""Metrics of a reward function that count samples without a score."""


class Sampler:
    """Draws the batch of a step.

    Args:
        rollout: the worker group that generates.
        reward: scores a batch, where sampling depends on scores.
        stream: batches of prompts without end; refilling draws more of them.
        runner: runs the stages; None: without those of added roles.
    """

    def __init__(
        self,
        config: TrainConfig,
        rollout: GeneratingGroup,
        reward: BatchReward,
        stream: Iterator[DataProto],
        runner: StageRunner | None = None,
    ) -> None:
        self.config = config
        self.rollout = rollout
        self.reward = reward
        self.stream = stream
        self.runner = runner or StageRunner()
        estimator = get_advantage(config.algorithm.adv_estimator)
        self.with_baselines = estimator.needs_baseline_scores

    def draw(self, prompts: DataProto, step: int) -> StageResult:
        """Return the batch of a step and metrics. With refilling the rows are scored already."""
        batch, metrics = self._generate(prompts, step, turn=0)
        if self.config.algorithm.filter_groups.refills:
            batch, refilled = self.refill(batch, len(prompts), step)
            metrics = _merged(metrics, refilled)
        return StageResult(batch, metrics)

    def refill(self, batch: DataProto, wanted: int, step: int) -> StageResult:
        """Keep the prompt groups whose scores differ, and draw more until there are `wanted`
        (DAPO, arXiv 2503.14476, section 3.2).

        Only responses that take part in the update count. Stops at
        `filter_groups.max_num_gen_batches` draws, however many groups there are then. The metrics
        of the reward function are those of all draws.
        """
        algorithm = self.config.algorithm
        settings = algorithm.filter_groups
        batch, of_first = self.runner.result(stages.score_responses, batch, self.reward)
        scoring = [of_first]
        turn = 1
        while True:
            decision = dynamic_sampling(
                batch.batch[fields.TOKEN_LEVEL_SCORES].sum(-1),
                batch.non_tensor_batch[fields.UID],
                wanted_groups=wanted,
                member_B=_in_update(batch, algorithm),
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
                return StageResult(batch, {**drawn, **_merged(*scoring)})
            # `turn` is part of the seed, so that a prompt that is drawn twice in one step does
            # not sample the same responses again.
            more, of_greedy = self._generate(next(self.stream), step, turn)
            more, of_more = self.runner.result(stages.score_responses, more, self.reward)
            scoring += [of_greedy, of_more]
            batch = DataProto.concat([batch, more])
            turn += 1

    def _generate(self, prompts: DataProto, step: int, turn: int) -> StageResult:
        """Return the responses to prompts, and what failed in scoring their greedy responses."""
        n = self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed
        expand = stages.expand_prompts
        rows = self.runner.result(expand, prompts, n=n, step=step, seed=seed, turn=turn).batch
        if not self.with_baselines:
            return StageResult(
                self.runner.result(stages.generate, rows, self.rollout, "train").batch, {}
            )
        greedy, scoring = self._score_greedy(rows, n)
        rows = stages.add_baselines(rows, greedy).batch
        batch = self.runner.result(stages.generate, rows, self.rollout, "train").batch
        _mask_without_baseline(batch, greedy)
        return StageResult(batch, {name: scoring[name] for name in _FAILED if name in scoring})

    def _score_greedy(self, rows: DataProto, n: int) -> StageResult:
        """One greedy response per prompt, scored; `n` neighbouring rows have the same prompt."""
        first_of_each = rows.select_idxs(np.arange(0, len(rows), n))
        runner = self.runner.without_updates()
        greedy = runner.result(stages.generate, first_of_each, self.rollout, "greedy").batch
        return runner.result(stages.score_responses, greedy, self.reward)


def _in_update(batch: DataProto, config: AlgorithmConfig) -> Tensor:
    """Return bool [B], True for responses that take part in the update if their group does."""
    left_out = (batch.batch[fields.FINISHED] == 0) & config.overlong.drop_truncated
    return drop_truncated(batch.batch[fields.RESPONSE_MASK], left_out).any(-1)


def _mask_without_baseline(batch: DataProto, greedy: DataProto) -> None:
    """Mask the responses to prompts whose greedy response was left out (`reward.on_failure=mask`).

    A baseline of 0 in its place would make their advantages too large.
    """
    scored_P = greedy.batch[fields.RESPONSE_MASK].any(-1)
    if not scored_P.all():
        mask = batch.batch[fields.RESPONSE_MASK]
        scored_B = scored_P.repeat_interleave(len(batch) // len(greedy))
        batch.batch[fields.RESPONSE_MASK] = mask * scored_B.to(mask.dtype)[:, None]


def _merged(*metrics: Metrics) -> Metrics:
    """Reduce the metrics of several draws by their kinds: counts are added."""
    merged = MetricSet()
    for some in metrics:
        merged.add(some)
    return merged.reduce()


class ModelReward:
    """Scores batches with rules and a reward model. See the docstring of the module.

    Attributes:
        metrics: of the last batch: those of the rules, and the mean of each part before weights.
        masked_rows: rows of the last batch that the rules exclude from the update.
    """

    def __init__(
        self, rules: BatchReward, group: RewardModelGroup, config: RewardModelConfig
    ) -> None:
        self.rules = rules
        self.group = group
        self.config = config
        self.metrics: dict[str, float] = {}
        self.masked_rows: list[int] = []

    def __call__(self, data: DataProto, /) -> DataProto:
        """Return the scores of every row of `data`."""
        inputs = data.select(
            batch_keys=[key for key in COMPUTE_RM_SCORE.reads if key != fields.RAW_PROMPT],
            non_tensor_batch_keys=[fields.RAW_PROMPT],
            meta_info_keys=[],
        )
        # Rows that are added for a rank count are scored for nothing.
        inputs, extra = pad_dataproto_to_divisor(inputs, self.group.world_size)
        pending = self.group.compute_rm_score.submit(inputs)
        ruled = self._rules(data)
        model_BT = unpad_dataproto(pending.get(), extra).batch[fields.RM_SCORES]
        scores_BT = self.config.weight * model_BT
        self.metrics["reward/model"] = float(model_BT.sum(-1).mean())
        if ruled is None:
            tensors = {fields.TOKEN_LEVEL_SCORES: scores_BT, fields.RM_SCORES: model_BT}
            return DataProto.from_dict(tensors=tensors)
        rule_BT = ruled.batch[fields.TOKEN_LEVEL_SCORES]
        self.metrics["reward/rules"] = float(rule_BT.sum(-1).mean())
        ruled.batch[fields.TOKEN_LEVEL_SCORES] = self.config.rule_weight * rule_BT + scores_BT
        ruled.batch[fields.RM_SCORES] = model_BT
        return ruled

    def _rules(self, data: DataProto) -> DataProto | None:
        """Return the result of the rules; None if they have no weight."""
        self.metrics, self.masked_rows = {}, []
        if not self.config.rule_weight:
            return None
        result = self.rules(data)
        ruled = result.get() if isinstance(result, DataProtoFuture) else result
        self.metrics = dict(getattr(self.rules, "metrics", {}))
        self.masked_rows = list(getattr(self.rules, "masked_rows", []))
        return ruled
