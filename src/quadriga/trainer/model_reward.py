"""The reward of a training step from rules and a reward model.

    score of a response = rule_weight × score of the rules + weight × score of the model

consumes      a batch with responses
produces      `token_level_scores`, and `rm_scores` with the model's part
waits for     the reward model, which computes while the controller calls the rules
"""

from __future__ import annotations

from quadriga.config.schema import RewardModelConfig
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.trainer.stages import BatchReward, HasMaskedRows, HasMetrics
from quadriga.workers.method_fields import COMPUTE_RM_SCORE
from quadriga.workers.roles import RewardModelGroup


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
        if isinstance(self.rules, HasMetrics):
            self.metrics = dict(self.rules.metrics)
        if isinstance(self.rules, HasMaskedRows):
            self.masked_rows = list(self.rules.masked_rows)
        return ruled
