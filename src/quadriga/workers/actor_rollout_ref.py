"""The policy in its three uses: it learns (actor), it answers (rollout), it stays (reference).

One process may hold all three. The trained parameters are sharded by the training engine; the
rollout engine holds its own copy, brought up to date by `sync_weights` and proved equal by digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quadriga.config.schema import ActorRolloutRefConfig, SamplingConfig
from quadriga.errors import ConfigError, WorkerError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.workers.runtime import RankRuntime, prepare_rank

if TYPE_CHECKING:
    from quadriga.engines.base import TrainEngine
    from quadriga.rollout.base import RolloutEngine

_USES = {
    "actor": {"actor"},
    "rollout": {"rollout"},
    "ref": {"ref"},
    "actor_rollout": {"actor", "rollout"},
    "actor_rollout_ref": {"actor", "rollout", "ref"},
}
_LOG_PROB_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class ActorRolloutRefWorker(Worker):
    """A rank of the policy.

    Args:
        config: settings of model, actor, rollout and reference.
        role: which uses this worker has: `actor`, `rollout`, `ref`, `actor_rollout` or
            `actor_rollout_ref`.
        runtime: run-wide facts.

    Raises:
        ConfigError: `role` is none of these.
    """

    def __init__(
        self, config: ActorRolloutRefConfig, role: str, runtime: RankRuntime | None = None
    ) -> None:
        super().__init__()
        if role not in _USES:
            raise ConfigError(f"role must be one of {sorted(_USES)}, got {role!r}")
        self.config = config
        self.role = role
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime)
        self.actor: TrainEngine | None = None
        self.ref: TrainEngine | None = None
        self.rollout: RolloutEngine | None = None
        self.weight_version = 0
        for mesh_name in sorted(_USES[role]):
            self._register_dispatch_collect_info(mesh_name, dp_rank=self.rank, is_collect=True)

    def uses(self, use: str) -> bool:
        """Whether this worker is an `actor`, a `rollout`, a `ref`."""
        return use in _USES[self.role]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load what the role needs, and give the rollout the actor's weights."""
        from quadriga.engines import build_engine
        from quadriga.rollout import build_rollout

        model, actor = self.config.model, self.config.actor
        if self.uses("actor"):
            self.actor = build_engine(
                model,
                actor.engine,
                actor.optim,
                head="lm",
                device=self.device,
                total_steps=self.runtime.total_steps,
            )
        if self.uses("ref"):
            self.ref = build_engine(
                model, self.config.ref.engine, None, head="lm", device=self.device
            )
        if self.uses("rollout"):
            settings = self.config.rollout
            self.rollout = build_rollout(
                settings.name,
                model,
                device=self.device,
                dtype=settings.dtype,
                micro_batch_size=settings.micro_batch_size,
                **settings.options,
            )
        if self.uses("actor") and self.uses("rollout"):
            self.sync_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> int:
        """Bring the rollout's weights to the actor's. Returns the new version.

        Raises:
            WorkerError: the digests differ afterwards; names the first tensor that does.
        """
        from quadriga.weight_sync import sync_weights

        self.weight_version += 1
        sync_weights(self._engine("actor"), self._rollout(), self.weight_version)
        return self.weight_version

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer each prompt once.

        Reads `input_ids`, `attention_mask` [B, P] and `sample_seed` [B]; `meta_info["sampling"]`
        is "train" (also if absent), "val" or "greedy". Writes prompts, responses, response_mask,
        rollout_log_probs, input_ids, attention_mask, position_ids, sequence_length [B] (tokens),
        finished [B] (1: ended by itself, 0: cut off) and weight_version [B].
        """
        from quadriga.workers.generation import generate_batch, sampling_params

        settings = self.config.rollout
        kinds = {
            "train": settings.sampling,
            "val": settings.val_sampling,
            "greedy": SamplingConfig(temperature=0.0),
        }
        sampling = sampling_params(
            kinds[prompts.meta_info.get("sampling", "train")],
            self.config.model,
            max_new_tokens=self.runtime.max_response_length,
        )
        return generate_batch(self._rollout(), prompts, sampling)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` [B, R] float32 under the actor as it is now."""
        outputs = self._engine("actor").forward(
            _fields(data, _LOG_PROB_FIELDS), temperature=self._temperature(), entropy=True
        )
        return DataProto.from_dict(
            tensors={"old_log_probs": outputs["log_probs"], "entropys": outputs["entropy"]}
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` [B, R] float32 under the reference."""
        outputs = self._engine("ref").forward(
            _fields(data, _LOG_PROB_FIELDS), temperature=self._temperature()
        )
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def update_actor(self, data: DataProto) -> DataProto:
        """Epochs × mini-batches of the policy loss. Returns `meta_info["metrics"]`.

        Reads the log-prob fields, `old_log_probs`, `advantages`, and `ref_log_prob`,
        `rollout_is_weights` where the settings use them. With `kl_loss_type=full` the reference
        is computed beside the policy, so it must be loaded in this worker.
        """
        from quadriga.workers.updates import update_policy

        return update_policy(
            self._engine("actor"),
            data,
            self.config.actor,
            responses_per_prompt=self.config.rollout.n,
            temperature=self._temperature(),
            length_scale=self.runtime.max_response_length,
            world_size=self.world_size,
            seed=self.runtime.seed + self.weight_version,
            reference=self._engine("ref") if self.config.actor.reads_full_kl else None,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Each rank saves its shard under `path`."""
        self._engine("actor").save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, weight_version: int = 0) -> None:
        """Load what `save_checkpoint` saved, and bring the rollout up to date.

        `weight_version`: the version these weights had when they were saved.
        """
        self._engine("actor").load(path)
        self.weight_version = weight_version
        if self.uses("rollout"):
            self.sync_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the actor as an ordinary Hugging Face folder, tokenizer included."""
        self._engine("actor").save_hf(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> None:
        """Make room for generation: the trainer's state leaves the device where settings say so."""
        if self.actor is not None:
            self.actor.offload()
        self._rollout().resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Make room for training: the rollout's memory is given back."""
        if self.rollout is not None:
            self.rollout.release()
        self._engine("actor").reload()

    def _temperature(self) -> float:
        """Log-probabilities are those of the distribution that was sampled from."""
        temperature = self.config.rollout.sampling.temperature
        return temperature if temperature > 0 else 1.0

    def _engine(self, use: str) -> TrainEngine:
        engine = self.actor if use == "actor" else self.ref
        if engine is None:
            raise WorkerError(
                f"role {self.role!r} has no loaded {use}: "
                + ("call init_model first" if self.uses(use) else f"give it a role with {use!r}"),
                role=self.role,
                rank=self.rank,
            )
        return engine

    def _rollout(self) -> RolloutEngine:
        if self.rollout is None:
            raise WorkerError(
                f"role {self.role!r} has no rollout engine: "
                + ("call init_model first" if self.uses("rollout") else "it does not generate"),
                role=self.role,
                rank=self.rank,
            )
        return self.rollout


def _fields(data: DataProto, keys: list[str]) -> Mapping[str, Any]:
    return {key: data.batch[key] for key in keys}
