"""The policy, learning from given answers."""

from __future__ import annotations

from quadriga.protocol import DataProto
from quadriga.single_controller import make_nd_compute_dataproto_dispatch_fn, register
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker


class SFTWorker(ActorRolloutRefWorker):
    """An actor (and rollout, for held-out accuracy) that also takes supervised steps."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_sft(self, data: DataProto) -> DataProto:
        """One optimizer step of −mean log-probability over answer tokens of all ranks.

        Reads input_ids, attention_mask, position_ids, responses, response_mask. Returns
        `meta_info["metrics"]` with `sft/loss`, nats a token.
        """
        from quadriga.workers.objectives import BatchCounts, SupervisedObjective
        from quadriga.workers.updates import MODEL_FIELDS

        engine = self._engine("actor")
        rows = {key: data.batch[key] for key in MODEL_FIELDS}
        objective = SupervisedObjective(BatchCounts.of(rows["response_mask"], engine))
        metrics = engine.train_step(
            rows, objective, micro_batch_size=self.config.actor.ppo_micro_batch_size_per_gpu
        )
        return DataProto(meta_info={"metrics": {f"sft/{k}": v for k, v in metrics.items()}})
