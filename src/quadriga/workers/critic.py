"""The value model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.config.schema import CriticConfig
from quadriga.errors import WorkerError
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

_VALUE_FIELDS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]


class CriticWorker(Worker):
    """A rank of the value model.

    Args:
        config: settings, with `model.path`, `ppo_mini_batch_size` and `ppo_epochs` filled in.
        responses_per_prompt: sequences a prompt; mini-batches are counted in prompts.
        runtime: run-wide facts.
    """

    def __init__(
        self,
        config: CriticConfig,
        responses_per_prompt: int = 1,
        runtime: RankRuntime | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.responses_per_prompt = responses_per_prompt
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime)
        self.critic: TrainEngine | None = None
        self._register_dispatch_collect_info("critic", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and its value head."""
        from quadriga.engines import build_engine

        self.critic = build_engine(
            self.config.model,
            self.config.engine,
            self.config.optim,
            head="value",
            device=self.device,
            total_steps=self.runtime.total_steps,
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` [B, R] float32: of the state in which each response token is chosen."""
        outputs = self._engine().forward({key: data.batch[key] for key in _VALUE_FIELDS})
        return DataProto.from_dict(tensors={"values": outputs["values"]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    def update_critic(self, data: DataProto) -> DataProto:
        """Epochs × mini-batches of the value loss. Reads `values`, `returns`."""
        from quadriga.workers.updates import update_values

        prompts_a_step = self.config.ppo_mini_batch_size or len(data) * self.world_size
        return update_values(
            self._engine(),
            data,
            self.config,
            mini_batch_rows=max(1, prompts_a_step * self.responses_per_prompt // self.world_size),
            epochs=self.config.ppo_epochs or 1,
            length_scale=self.runtime.max_response_length,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None:
        """Each rank saves its shard under `path`."""
        self._engine().save(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load what `save_checkpoint` saved."""
        self._engine().load(path)

    def _engine(self) -> TrainEngine:
        if self.critic is None:
            raise WorkerError(
                "the critic has no model yet: call init_model first", role="critic", rank=self.rank
            )
        return self.critic
