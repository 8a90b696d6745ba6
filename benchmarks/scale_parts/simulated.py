"""Groups of thousands of ranks on two processes: every rank is a handle of one of two actors.

The controller does all of its work for each rank: it splits, packs, sends and joins. Only the
processes at the other end are fewer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from quadriga import DataProto
from quadriga.backends.ray.cluster import RayNode
from quadriga.single_controller import Backend, Dispatch, Worker, WorkerGroup, register
from quadriga.single_controller.backend import RankSet

ACTORS = 2
ROLE = "simulated"
ROWS = 2
"""Rows of each rank."""
WIDTH = 10_240
"""Columns of a field: 80 KiB per rank, so that every field is stored and sent by reference."""
RANKS_PER_NODE = 8
GATE_LIMIT_S = 300.0


class Probe(Worker):
    """Methods that take no time in the worker."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Return None."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto, gate: str = "") -> DataProto:
        """Return a stored field, if `gate` is given not before that file exists."""
        deadline = time.monotonic() + GATE_LIMIT_S
        while gate and not Path(gate).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return DataProto.from_dict({"x": torch.zeros(len(data), WIDTH)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def take(self, data: DataProto) -> None:
        """Receive a part of a batch and read nothing of it."""


class Bare:
    """An actor of raw Ray."""

    def nothing(self, value: object = None) -> None:
        """Return None."""


class Machines:
    """Two groups of two real ranks, from which groups of any number of ranks are made."""

    def __init__(self, backend: Backend) -> None:
        self._groups = [
            backend.worker_group(
                backend.resource_pool([ACTORS], use_gpu=False),
                backend.class_with_args(Probe),
                role=ROLE,
            )
            for _ in range(2)
        ]
        self.raw = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(ACTORS)]
        """Actors of raw Ray."""
        ray.get([actor.nothing.remote() for actor in self.raw])

    def group(self, ranks: int, number: int = 0, nodes: Sequence[str] = ()) -> Any:
        """Return a group of `ranks` handles on the actors of group `number`.

        `nodes`: the node ids of the ranks, RANKS_PER_NODE ranks each. Default: the real node.
        """
        real: RankSet = self._groups[number]._ranks
        handles = []
        for rank in range(ranks):
            handle = real.handles[rank % ACTORS]
            node_id = nodes[rank // RANKS_PER_NODE] if nodes else handle.facts.node_id
            facts = replace(handle.facts, rank=rank, world_size=ranks, node_id=node_id)
            handles.append(replace(handle, facts=facts, methods={}))
        simulated = RankSet(real.backend, handles, real.roles, real.name_prefix)
        return WorkerGroup(simulated, ROLE)

    def shutdown(self) -> None:
        """End the real ranks."""
        for group in self._groups:
            group.shutdown()


def simulated_nodes(count: int, real: RayNode) -> list[RayNode]:
    """Return nodes with ids of their own whose raylet is the real one, so that probes connect."""
    return [replace(real, node_id=f"{number:056x}") for number in range(1, count + 1)]


def empty_rows(ranks: int) -> DataProto:
    """Return a small local batch with ROWS rows for each rank."""
    return DataProto.from_dict({"row": torch.arange(ranks * ROWS)})
