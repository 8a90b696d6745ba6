"""verl's sharding managers: a block in which a policy generates with the weights that it trains.

    with manager:                                    # the rollout gets the weights, on the device
        prompts = manager.preprocess_data(prompts)   # the rows of all tensor-parallel ranks
        output = rollout.generate_sequences(prompts)
        output = manager.postprocess_data(output)    # the rows of this rank
                                                     # the rollout leaves the device

They work on `quadriga.weight_sync`, for every training engine and every rollout engine.
"""

import time
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quadriga.engines.base import TrainEngine
from quadriga.errors import ConfigError, LengthError
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

    def __exit__(self, *error: object) -> None:
        """Prepare the training."""

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows that this rank generates from."""
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows of this rank from those that it generated."""
        return data


class _SharedRows(BaseShardingManager):
    """The manager of ranks that compute the same rows together, each of which has a part of them.

    `dimension`: of `device_mesh`, that of these ranks; without a mesh each rank is alone.
    """

    def __init__(self, device_mesh: DeviceMesh | None, dimension: str) -> None:
        self.device_mesh = device_mesh
        self._group = None if device_mesh is None else device_mesh[dimension].get_group()

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Return the rows of all ranks of the group, in the order of ranks.

        Raises `LengthError` if the ranks have different numbers of rows.
        """
        if self._group is None or self._group.size() == 1:
            return data
        gathered = [data] * self._group.size()
        dist.all_gather_object(gathered, data, group=self._group)
        if len(set(map(len, gathered))) > 1:
            raise LengthError(
                f"{type(self).__name__}: the ranks have {[*map(len, gathered)]} rows, which must "
                "be equal to be shared; pad the batch with pad_dataproto_to_divisor"
            )
        return DataProto.concat(gathered)

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Return this rank's part of the rows of `preprocess_data`."""
        if self._group is None or self._group.size() == 1:
            return data
        return data.chunk(self._group.size())[self._group.rank()]


class FSDPUlyssesShardingManager(_SharedRows):
    """The manager of an actor whose ranks share sequences (Ulysses).

    The training engine has process groups of its own for them (`engine.sequence_parallel_size`), so
    entry and exit change nothing. All ranks of a group must gather and split together.

    Args:
        device_mesh: a mesh whose dimension `sp` has the ranks that share sequences; None: each
            rank has whole sequences.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        super().__init__(device_mesh, SEQUENCE_DIM)


class FSDPVLLMShardingManager(_SharedRows):
    """The manager of an actor that is trained with FSDP and generates with vLLM, or any engine.

    Entry resumes the rollout engine and gives it the weights of the training engine under the next
    version, with the comparison of `WeightSync`. Exit releases the rollout engine. All ranks must
    enter and exit together. A row is sampled with a seed of its own, so torch's generators are not
    switched in the block.

    Args:
        module: the training engine, as `quadriga.engines.build_engine` returns it.
        inference_engine: the rollout engine, as `quadriga.rollout.build_rollout` returns it.
        model_config: the config of the model, which must have the model type of `module`.
        full_params, load_format, layered_summon: how verl gathers weights. Here a plan of the
            layouts of both engines sends all of them, so each value has the same result.
        device_mesh: a mesh whose dimensions are `dp` and `infer_tp`, the ranks that generate
            together; None if each rank generates by itself.
        offload_param: whether the training engine leaves the device within the block.
        rollout_config: settings of the rollout, which `inference_engine` has already.
        options: other arguments, which are refused.

    Attributes:
        timing: `reshard`, the seconds of the last entry.

    Raises:
        ConfigError: the engines are of another kind, the config is of another model, or an
            argument has no meaning here.
    """

    def __init__(
        self,
        module: TrainEngine,
        inference_engine: RolloutEngine,
        model_config: object = None,
        rollout_config: object = None,
        full_params: bool = False,
        device_mesh: DeviceMesh | None = None,
        offload_param: bool = False,
        load_format: str = "dummy_hf",
        layered_summon: bool = True,
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
        own = getattr(getattr(module, "module", None), "config", None)
        given, kind = (getattr(config, "model_type", None) for config in (model_config, own))
        if given not in (None, kind):
            raise ConfigError(
                f"{type(self).__name__}: model_config has model_type {given!r}, but the training "
                f"engine has a model of type {kind!r}; pass its config, or None",
                key="model_config",
            )
        super().__init__(device_mesh, ROLLOUT_DIM)
        self.module, self.inference_engine = module, inference_engine
        self.model_config, self.offload_param = model_config, offload_param
        self.timing: dict[str, float] = {}
        self._sync = WeightSync(module, inference_engine)

    def __enter__(self) -> None:
        began = time.perf_counter()
        self.inference_engine.resume()
        self._sync.run(max(self.inference_engine.version, 0) + 1)
        if self.offload_param:
            self.module.offload()
        self.timing = {"reshard": time.perf_counter() - began}

    def __exit__(self, *error: object) -> None:
        self.inference_engine.release()
        if self.offload_param:
            self.module.reload()


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
