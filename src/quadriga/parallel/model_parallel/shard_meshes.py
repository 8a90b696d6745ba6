"""The ranks over which FSDP divides weights, beside the ranks of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quadriga.config.schema import EngineConfig
from quadriga.parallel.distributed import REPLICATE, SHARD, data_parallel_mesh, world_size
from quadriga.parallel.model_parallel.model_ranks import TENSOR


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
    parts = world_size() // tensor
    whole = data_parallel_mesh(device, size if size == -1 else size * tensor)
    if size in (-1, parts):
        names: tuple[str, ...] = (SHARD,)
        shape: tuple[int, ...] = (parts,)
    else:
        names, shape = (REPLICATE, SHARD), (parts // size, size)
    mesh = init_device_mesh(device.type, (*shape, tensor), mesh_dim_names=(*names, TENSOR))
    return ShardMeshes(whole, mesh[names], mesh[TENSOR])
