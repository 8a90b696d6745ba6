"""The worker of supervised fine-tuning: the policy, trained on given responses.

It has a file of its own because each role has: it adds two methods to the worker of the policy.
"""

from __future__ import annotations

from quadriga.protocol import DataProto, fields
from quadriga.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.method_fields import COMPUTE_SFT_LOG_PROB, UPDATE_SFT


class SFTWorker(ActorRolloutRefWorker):
    """An actor that takes supervised steps, with a rollout if responses are validated."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), reads=UPDATE_SFT.inputs)
    def update_sft(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the mean of −log p over the response tokens of all ranks.

        Reads the fields `UPDATE_SFT.reads`.

        Returns:
            `meta_info["metrics"]`: `sft/loss`, nats per token, and the metrics of the engine.
        """
        from quadriga.workers.objectives import BatchCounts, SupervisedObjective
        from quadriga.workers.updates import rows_of_update

        engine = self._engine("actor")
        rows = rows_of_update(data, UPDATE_SFT.reads)
        objective = SupervisedObjective(BatchCounts.of(rows[fields.RESPONSE_MASK], engine))
        metrics = engine.train_step(
            rows, objective, micro_batch_size=self.config.actor.ppo_micro_batch_size_per_gpu
        )
        return DataProto(meta_info={"metrics": {f"sft/{k}": v for k, v in metrics.items()}})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"),
        reads=COMPUTE_SFT_LOG_PROB.inputs,
    )
    def compute_sft_log_prob(self, data: DataProto) -> DataProto:
        """Compute `old_log_probs` [B, R] float32 of given responses, for the validation loss.

        Reads the fields `COMPUTE_SFT_LOG_PROB.reads`. Unlike `compute_log_prob` it computes no
        entropies, which a loss does not need.
        """
        from quadriga.engines.base import LOG_PROBS

        actor = self.config.actor
        outputs = self._engine("actor").forward(
            {key: data.batch[key] for key in COMPUTE_SFT_LOG_PROB.reads},
            micro_batch_size=actor.engine.forward_rows(actor.ppo_micro_batch_size_per_gpu),
        )
        return DataProto.from_dict(tensors={fields.OLD_LOG_PROBS: outputs[LOG_PROBS]})
