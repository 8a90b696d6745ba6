"""Device meshes: how the ranks of a group are arranged."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quadriga.errors import ConfigError
from quadriga.parallel.distributed import world_size

REPLICATE = "replicate"
SHARD = "shard"


def data_parallel_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """Ranks that share one copy of the parameters, times copies.

    `fsdp_size` -1 (or the world size) gives one dimension, `shard`: full sharding. A smaller
    divisor gives two, `replicate` × `shard`: hybrid sharding, neighbours sharing a copy.
    Raises `ConfigError` when the world does not divide.
    """
    world = world_size()
    if fsdp_size in (-1, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=(SHARD,))
    if fsdp_size < 1 or world % fsdp_size:
        raise ConfigError(
            f"engine.fsdp_size is {fsdp_size}, which does not divide the {world} ranks of the "
            "group; use -1 for all of them"
        )
    shape = (world // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
