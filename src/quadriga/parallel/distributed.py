"""Joining the ranks of a worker group, and the few reductions that are not gradients.

Every wait has a bound: a rank that never comes makes the others fail after `timeout_s`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from quadriga.errors import CollectiveError
from quadriga.parallel.device import collective_backend, torch_device


def init_distributed(device_name: str = "cpu", *, timeout_s: float = 600.0) -> None:
    """Join the process group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Does nothing when this process is in a group already. One rank alone needs no address and
    opens no port. Raises `CollectiveError` when several ranks are to meet but no address is set.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = collective_backend(device_name)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [k for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise CollectiveError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set; ranks of a worker "
            "group get these before __init__, other launchers must set them"
        )
    dist.init_process_group(backend, timeout=timeout)


def local_device(device: str | torch.device) -> torch.device:
    """The device that this rank computes on, made the current one.

    A kind alone ("cuda") becomes the device of LOCAL_RANK, whether the process sees one device or
    the whole node's; a device with an index is taken as it is.
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return wanted
    if wanted.index is None:
        wanted = torch_device(wanted.type, int(os.environ.get("LOCAL_RANK", "0")))
    getattr(torch, wanted.type).set_device(wanted)
    return wanted


def rank() -> int:
    """This process's rank; 0 outside a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 outside a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Sequence[float], device: torch.device) -> list[float]:
    """Elementwise sum of equally long lists of numbers, in float64."""
    if world_size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def max_over_ranks(value: int, device: torch.device) -> int:
    """The largest of the ranks' integers."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def sum_metrics_over_ranks(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sum per key over ranks; ranks may hold different keys (a rank without rows holds none)."""
    if world_size() == 1:
        return dict(metrics)
    parts: list[dict[str, float]] = [{} for _ in range(world_size())]
    dist.all_gather_object(parts, dict(metrics))
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total
