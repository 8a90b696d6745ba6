"""verl's sharding managers: a block in which a policy generates with the weights that it trains.

    with manager:                                    # the rollout gets the weights, on the device
        prompts = manager.preprocess_data(prompts)   # the rows of all tensor-parallel ranks
        output = rollout.generate_sequences(prompts)
        output = manager.postprocess_data(output)    # the rows of this rank
                                                     # the rollout leaves the device

They work on `quadriga.weight_sync`, for every training engine and every rollout engine.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quadriga.engines.base import TrainEngine
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.rollout.base import RolloutEngine
from quadriga.weight_sync.sync import WeightSync

ROLLOUT_DIM = "infer_tp"
"""The mesh dimension of the ranks that generate together, as verl names it."""
SEQUENCE_DIM = "sp"
"""The mesh dimension of the ranks that share sequences (Ulysses), as verl names it."""


class BaseShardingManager:
    """Changes nothing. A manager of one's own overrides what it needs."""

    def __enter__(self) -> None:
        """Prepare the generation."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Prepare the training."""

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows that this rank generates from."""
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows of this rank from those that it generated."""
        return data


class FSDPUlyssesShardingManager(BaseShardingManager):
    """The manager of an actor whose ranks share sequences. Here each rank has whole sequences.

    Args:
        device_mesh: a mesh whose dimension `sp` has one rank, or None.

    Raises:
        ConfigError: several ranks would share sequences.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        if device_mesh is None:
            return
        ranks = device_mesh[SEQUENCE_DIM].size()
        if ranks > 1:
            raise ConfigError(
                f"FSDPUlyssesShardingManager: the mesh has {ranks} ranks in its dimension "
                f"{SEQUENCE_DIM!r}, but the managers of quadriga.compat give each rank whole "
                "sequences; use a mesh with one rank in it (ulysses_sequence_parallel_size=1)"
            )


class FSDPVLLMShardingManager(BaseShardingManager):
    """The manager of an actor that is trained with FSDP and generates with vLLM, or any engine.

    Entry resumes the rollout engine and gives it the weights of the training engine under the next
    version, with the comparison of `WeightSync`. Exit releases the rollout engine. All ranks must
    enter and exit together.

    Args:
        module: the training engine, as `quadriga.engines.build_engine` returns it.
        inference_engine: the rollout engine, as `quadriga.rollout.build_rollout` returns it.
        device_mesh: a mesh whose dimension `infer_tp` has the ranks that generate together; None
            if each rank generates by itself.
        offload_param: whether the training engine leaves the device within the block.
        options: verl's further arguments, which are refused.

    Raises:
        ConfigError: the engines are of another kind, or an argument has no meaning here.
    """

    def __init__(
        self,
        module: TrainEngine,
        inference_engine: RolloutEngine,
        *,
        device_mesh: DeviceMesh | None = None,
        offload_param: bool = False,
        **options: object,
    ) -> None:
        if options:
            raise ConfigError(
                f"{type(self).__name__} has no arguments {sorted(options)}: all weights are sent "
                "by a plan of their layouts; remove these arguments"
            )
        if not hasattr(module, "state_stream") or not isinstance(inference_engine, RolloutEngine):
            raise ConfigError(
                f"{type(self).__name__} needs a training engine of quadriga.engines.build_engine "
                "and a rollout engine of quadriga.rollout.build_rollout as "
                f"`inference_engine`, got {type(module).__name__} and "
                f"{type(inference_engine).__name__}"
            )
        self.module, self.inference_engine = module, inference_engine
        self.offload_param = offload_param
        self._group: dist.ProcessGroup | None = None
        if device_mesh is not None:
            self._group = device_mesh.get_group(ROLLOUT_DIM)
        self._sync = WeightSync(module, inference_engine)

    def __enter__(self) -> None:
        self.inference_engine.resume()
        self._sync.run(max(self.inference_engine.version, 0) + 1)
        if self.offload_param:
            self.module.offload()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.inference_engine.release()
        if self.offload_param:
            self.module.reload()

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows of all ranks that generate together, in the order of ranks."""
        if self._group is None or self._group.size() == 1:
            return data
        gathered = [data] * self._group.size()
        dist.all_gather_object(gathered, data, group=self._group)
        return DataProto.concat(gathered)

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Return this rank's part of the rows of `preprocess_data`."""
        if self._group is None or self._group.size() == 1:
            return data
        return data.chunk(self._group.size())[self._group.rank()]


class MegatronVLLMShardingManager(FSDPVLLMShardingManager):
    """The same under verl's name for an actor that is trained with Megatron.

    The layouts of the two engines decide what each rank sends, so one manager serves every training
    engine of `quadriga.engines.build_engine`.

    Args:
        actor_module: the training engine.
        inference_engine, options: as `FSDPVLLMShardingManager`.
    """

    def __init__(
        self, actor_module: TrainEngine, inference_engine: RolloutEngine, **options: Any
    ) -> None:
        super().__init__(actor_module, inference_engine, **options)
