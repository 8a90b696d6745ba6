"""The process groups of Megatron-core, and the coordinates of this rank.

Megatron-core keeps its groups in one global state, so all engines of a process have the same
degrees.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from quadriga.config.schema import EngineConfig
from quadriga.engines.megatron.families import degrees_of, ranks_of_expert
from quadriga.errors import ConfigError
from quadriga.parallel.distributed import rank, world_size
from quadriga.parallel.layouts import Degrees, Place
from quadriga.parallel.model_ranks import ALONE, ModelRanks, Subgroup
from quadriga.single_controller import RankLayout

GroupKind = Literal["tensor", "pipeline", "replicas", "expert replicas"]

TIMEOUT_MINUTES = 10
"""Of a collective, as of the process group of the worker group."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a Megatron engine, and this one among them.

    Attributes:
        engine: the settings, which have the degrees.
        degrees: of the weights. `expert` × `replicas` ranks have the same part of the model, but
            for experts: the context-parallel ranks of each data-parallel rank.
        place: of this rank.
    """

    engine: EngineConfig
    degrees: Degrees
    place: Place

    @property
    def replica_rank(self) -> int:
        """The number of this rank among those with the same part of the model."""
        return self.place.expert + self.degrees.expert * self.place.replica

    @property
    def context(self) -> Subgroup:
        """The ranks that have the tokens of the same rows in parts."""
        size = self.engine.context_parallel_size
        if size == 1:
            return ALONE
        group = parallel_state.get_context_parallel_group()
        return Subgroup(size, self.replica_rank % size, group)

    @property
    def chunks(self) -> int:
        """Parts of a stage's layers."""
        return self.engine.virtual_pipeline_parallel_size

    @property
    def last_stage(self) -> bool:
        return self.place.stage == self.degrees.pipeline - 1

    @property
    def of_tokens(self) -> ModelRanks:
        """The same ranks as a model-parallel group. Tensor-parallel ranks are not in it, because
        Megatron-core's layers exchange what these need."""
        return ModelRanks(all=self.context, context=self.context)

    @property
    def reports(self) -> bool:
        """Whether this rank reports what its data-parallel rank computed: outputs and metrics."""
        return self.last_stage and self.place.tensor == 0 and self.context.index == 0

    def group(self, kind: GroupKind) -> dist.ProcessGroup:
        """Return ranks of this rank's place: "tensor", of this stage and these rows; "pipeline",
        the stages of these rows; "replicas", with the same part of the model; "expert replicas",
        with the same experts and different rows or tokens."""
        state = parallel_state
        groups: dict[GroupKind, Callable[[], dist.ProcessGroup]] = {
            "tensor": state.get_tensor_model_parallel_group,
            "pipeline": state.get_pipeline_model_parallel_group,
            "replicas": partial(state.get_data_parallel_group, with_context_parallel=True),
            "expert replicas": state.get_expert_data_parallel_group,
        }
        return groups[kind]()


def join_ranks(engine: EngineConfig, seed: int = 0) -> Ranks:
    """Make the process groups, and the generators of random numbers. All ranks call this together.

    Raises:
        ConfigError: the ranks do not divide by the degrees, or the process has groups of others.
    """
    degrees = degrees_of(engine, world_size())
    if parallel_state.model_parallel_is_initialized():
        _check_same(engine)
    else:
        parallel_state.initialize_model_parallel(
            engine.tensor_parallel_size,
            engine.pipeline_parallel_size,
            context_parallel_size=engine.context_parallel_size,
            expert_model_parallel_size=engine.expert_parallel_size,
            expert_tensor_parallel_size=ranks_of_expert(engine),
            distributed_timeout_minutes=TIMEOUT_MINUTES,
            create_gloo_process_groups=False,
        )
        # It seeds the generators of the process too, which belong to the worker.
        state = torch.get_rng_state()
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.set_rng_state(state)
    return Ranks(engine, degrees, degrees.place(rank()))


def layout_of_process() -> RankLayout | None:
    """Return the coordinates of this rank in the groups that the process has made. None: it has
    made none."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return RankLayout(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _check_same(engine: EngineConfig) -> None:
    state = parallel_state
    wanted = (
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.context_parallel_size,
        engine.expert_parallel_size,
        ranks_of_expert(engine),
    )
    found = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
    )
    if wanted != found:
        raise ConfigError(
            f"engine: the ranks of tensor, pipeline, context, expert and expert tensor parallelism "
            f"are {wanted}, but another Megatron engine of this process has {found}, and all of "
            "them have the same ranks; set both equal, or give the roles ranks of their own"
        )
