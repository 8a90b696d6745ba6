"""The ranks that compute the same rows together, the part of each, and the meshes of FSDP.

Three degrees split one forward pass. Tensor parallelism (t) splits weights, Ulysses sequence
parallelism (s) and context parallelism (c) split tokens. The c · s · t ranks of one *model-parallel
group* receive the same rows; the world has world / (c · s · t) such groups, its data-parallel
ranks.

Example: 8 ranks, c = 1, s = 2, t = 2. Ranks of tensor parallelism exchange most, so they are
neighbours:

    rank             0  1  2  3 │ 4  5  6  7
    data             0  0  0  0 │ 1  1  1  1      receives rows of this part
    sequence         0  0  1  1 │ 0  0  1  1
    tensor           0  1  0  1 │ 0  1  0  1
    slice of tokens  0  1  2  3 │ 0  1  2  3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quadriga.config.schema import EngineConfig
from quadriga.errors import ConfigError
from quadriga.parallel.distributed import (
    REPLICATE,
    SHARD,
    data_parallel_mesh,
    device_mesh,
    rank,
    world_size,
)

DATA, CONTEXT, SEQUENCE, TENSOR = "data", "context", "sequence", "tensor"


@dataclass(frozen=True)
class Subgroup:
    """The ranks along one dimension of a mesh.

    Attributes:
        size: their number.
        index: the place of this rank among them.
        group: their process group; None if there is one rank, or none is needed (memory plan).
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(mesh: DeviceMesh, name: str) -> Subgroup:
        """Return the ranks along the dimension `name` of a mesh."""
        dimension = mesh[name]
        size = dimension.size()
        if size == 1:
            return ALONE
        return Subgroup(size, dimension.get_local_rank(), dimension.get_group())


ALONE = Subgroup()


@dataclass(frozen=True)
class ModelRanks:
    """The model-parallel group of this rank.

    Attributes:
        all: all ranks of the group. `all.index` is also the slice of tokens of this rank.
        context, sequence, tensor: the ranks along each dimension.
    """

    all: Subgroup = ALONE
    context: Subgroup = ALONE
    sequence: Subgroup = ALONE
    tensor: Subgroup = ALONE

    @property
    def is_first(self) -> bool:
        """Whether this rank reports the numbers of the rows of the group."""
        return self.all.index == 0

    @staticmethod
    def simulated(engine: EngineConfig) -> ModelRanks:
        """Return the group of a rank without processes, for tensors on the meta device.

        The rank has the last tokens of the rows. So it has most targets, and attends to most keys.
        """
        context = engine.context_parallel_size
        last = context - 1
        return ModelRanks(
            Subgroup(engine.model_parallel_size, engine.model_parallel_size // context * last),
            Subgroup(context, last),
            Subgroup(engine.sequence_parallel_size),
            Subgroup(engine.tensor_parallel_size),
        )


def model_ranks(engine: EngineConfig, device_type: str) -> ModelRanks:
    """Form the model-parallel groups that the settings of an engine ask for.

    Waits for: all ranks of the worker group, if a degree is above 1.

    Raises:
        ConfigError: the degrees do not divide the number of ranks.
    """
    size = engine.model_parallel_size
    if size == 1:
        return ModelRanks()
    world = _divided_ranks(engine)
    mesh = device_mesh(
        device_type,
        {
            DATA: world // size,
            CONTEXT: engine.context_parallel_size,
            SEQUENCE: engine.sequence_parallel_size,
            TENSOR: engine.tensor_parallel_size,
        },
    )
    subgroups = {name: Subgroup.of(mesh, name) for name in (CONTEXT, SEQUENCE, TENSOR)}
    whole = next((found for found in subgroups.values() if found.size == size), None)
    if whole is None:
        groups = device_mesh(device_type, {DATA: world // size, "all": size})
        whole = Subgroup.of(groups, "all")
    assert whole.index == rank() % size
    return ModelRanks(whole, *subgroups.values())


def _divided_ranks(engine: EngineConfig) -> int:
    """Return the number of ranks. Raises `ConfigError` if the degrees do not divide it."""
    world = world_size()
    if world % engine.model_parallel_size:
        raise ConfigError(
            f"engine.{engine.model_parallel_text()} ranks compute the same rows, which does not "
            f"divide the {world} ranks of the worker group"
        )
    return world


@dataclass(frozen=True)
class ShardMeshes:
    """The ranks over which FSDP divides weights. Dimensions: `shard`, or `replicate` × `shard`.

    Attributes:
        whole: for weights that tensor parallelism does not divide.
        layers: for decoder layers. With t ranks of tensor parallelism, a rank has 1 / t of a layer,
            so `shard` has 1 / t of the ranks that it has in `whole`.
        tensor: the ranks of tensor parallelism; None if there is one.
    """

    whole: DeviceMesh
    layers: DeviceMesh
    tensor: DeviceMesh | None = None


def shard_meshes(engine: EngineConfig, device: torch.device) -> ShardMeshes:
    """Return the meshes of an engine.

    Raises:
        ConfigError: the sizes do not divide the number of ranks.
    """
    tensor, size = engine.tensor_parallel_size, engine.fsdp_size
    if tensor == 1:
        mesh = data_parallel_mesh(device, size)
        return ShardMeshes(mesh, mesh)
    # 8 ranks, t = 2, fsdp_size = 2. A layer is divided over 2 × 2 ranks, and so is the embedding:
    #
    #                   tensor 0   tensor 1                   shard 0  1  2  3
    #   replicate 0     rank 0     rank 1     shard 0         rank  0  1  2  3    replicate 0
    #                   rank 2     rank 3     shard 1         rank  4  5  6  7    replicate 1
    #   replicate 1     rank 4     rank 5     shard 0
    #                   rank 6     rank 7     shard 1
    parts = _divided_ranks(engine) // tensor
    whole = data_parallel_mesh(device, size if size == -1 else size * tensor)
    copies = {SHARD: parts} if size in (-1, parts) else {REPLICATE: parts // size, SHARD: size}
    mesh = device_mesh(device.type, {**copies, TENSOR: tensor})
    return ShardMeshes(whole, mesh[tuple(copies)], mesh[TENSOR])
