"""The worker of the value model."""

from __future__ import annotations

from quadriga.config.schema import CriticConfig
from quadriga.engines.base import VALUES
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import (
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.workers.method_fields import COMPUTE_VALUES, UPDATE_CRITIC
from quadriga.workers.runtime import EngineWorker, RankRuntime


class CriticWorker(EngineWorker[CriticConfig]):
    """The value model in one rank.

    Args:
        config: settings of the critic. `model.path` must be set; the trainer takes it, and
            `ppo_mini_batch_size` and `ppo_epochs`, from the actor where the user gave none.
        responses_per_prompt: sequences per prompt. `ppo_mini_batch_size` counts prompts.
        runtime: what every rank of the role is told about the run.
    """

    def __init__(
        self,
        config: CriticConfig,
        responses_per_prompt: int = 1,
        runtime: RankRuntime | None = None,
    ) -> None:
        super().__init__("critic", config, "value", runtime)
        self.responses_per_prompt = responses_per_prompt

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), reads=COMPUTE_VALUES.inputs
    )
    def compute_values(self, data: DataProto) -> DataProto:
        """Compute `values` [B, R] float32: the value of the state before each response token.

        Reads the fields `COMPUTE_VALUES.reads`.
        """
        outputs = self._engine().forward(
            {key: data.batch[key] for key in COMPUTE_VALUES.reads},
            micro_batch_size=self.config.engine.forward_rows(
                self.config.ppo_micro_batch_size_per_gpu
            ),
        )
        return DataProto.from_dict(tensors={fields.VALUES: outputs[VALUES]})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"), reads=UPDATE_CRITIC.inputs
    )
    def update_critic(self, data: DataProto) -> DataProto:
        """Minimise the value loss: epochs × mini-batches, one optimizer step each.

        Reads the fields `UPDATE_CRITIC.reads`.

        Returns:
            The metrics of the update; see `quadriga.workers.updates.update_values`.
        """
        from quadriga.workers.updates import rows_per_mini_batch, update_values

        return update_values(
            self._engine(),
            data,
            self.config,
            mini_batch_rows=rows_per_mini_batch(
                self.config.ppo_mini_batch_size,
                len(data),
                self.responses_per_prompt,
                self.world_size // self.config.engine.model_parallel_size,
            ),
            epochs=self.config.ppo_epochs or 1,
            length_scale=self.runtime.max_response_length,
        )
