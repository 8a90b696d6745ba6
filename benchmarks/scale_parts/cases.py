"""The cases: for a number of ranks, the steps that are measured."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch

from quadriga import DataProto
from quadriga.backends.ray import health as node_health, pool as bundles
from quadriga.backends.ray.cluster import cluster_nodes
from quadriga.single_controller import ResourcePool

from .figures import RAW_CALL, RAW_PUT, RAW_PUT_AND_CALL
from .simulated import ACTORS, RANKS_PER_NODE, Machines, empty_rows, simulated_nodes

Step = Callable[[], object]
"""What is measured once."""
LOCAL_FIELDS = 4


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    ranks: tuple[int, ...]
    times: int
    """Runs of each step. Fewer if they take longer than `budget_s`."""
    budget_s: float
    """A step is left out at sizes where one run would take more CPU time."""
    wall_s: float
    """A case is left out at sizes where it would take longer, its preparation included."""
    field_bytes: int
    """Bytes of each of the four local fields."""


@contextmanager
def calls(machines: Machines, ranks: int) -> Iterator[dict[str, Step]]:
    """Raw Ray's empty call, and three calls of a group: empty, by reference, permuted."""
    group = machines.group(ranks)
    batch = group.make(empty_rows(ranks))
    if isinstance(batch.batch, dict) or not hasattr(batch.batch, "peek"):
        raise SystemExit("The field of the batch is local; this benchmark needs a remote field.")
    permuted = batch.select()
    permuted.reorder(torch.randperm(len(batch), generator=torch.Generator().manual_seed(0)))
    raw = machines.raw
    yield {
        RAW_CALL: lambda: ray.get([raw[i % ACTORS].nothing.remote() for i in range(ranks)]),
        "empty call": group.nothing,
        "by-reference call": lambda: group.take(batch),
        "permuted rows": lambda: group.take(permuted),
    }


@contextmanager
def futures(machines: Machines, ranks: int) -> Iterator[dict[str, Step]]:
    """Send a future of `ranks` results that has not arrived to `ranks` receivers.

    Once to the moment at which it is sent, once until all ranks have received their parts.
    """
    producers, receivers = machines.group(ranks, 0), machines.group(ranks, 1)
    started: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        gates = (Path(folder, str(number)) for number in itertools.count())

        def send() -> None:
            gate = next(gates)
            future = producers.make.submit(empty_rows(ranks), str(gate))
            started.append(receivers.take.submit(future))
            gate.touch()

        def receive() -> None:
            send()
            while started:
                started.pop().get()

        try:
            yield {"future sent": send, "future sent and received": receive}
        finally:
            for pending in started:
                pending.get()


@contextmanager
def local_fields(machines: Machines, ranks: int, nbytes: int) -> Iterator[dict[str, Step]]:
    """Send four local fields. Raw Ray puts the same parts, and sends each in an empty call."""
    group = machines.group(ranks)
    fields = [torch.zeros(ranks * 2, nbytes // (ranks * 8)) for _ in range(LOCAL_FIELDS)]
    names = [f"x{i}" for i in range(LOCAL_FIELDS)]

    def changed() -> None:
        # A value that was stored before may be used again, so each run sends a new one.
        for tensor in fields:
            tensor[0, 0] += 1

    def ours() -> None:
        changed()
        group.take(DataProto.from_dict(dict(zip(names, fields, strict=True))))

    def put() -> list[ray.ObjectRef]:
        changed()
        parts = zip(*(field.numpy().reshape(ranks, 2, -1) for field in fields), strict=True)
        return [ray.put(part) for part in parts]

    def raw() -> None:
        actors = machines.raw
        ray.get([actors[i % ACTORS].nothing.remote([ref]) for i, ref in enumerate(put())])

    yield {RAW_PUT: put, RAW_PUT_AND_CALL: raw, "four local fields": ours}


@contextmanager
def placement(machines: Machines, ranks: int) -> Iterator[dict[str, Step]]:
    """Look up the bundle and the local rank of each rank of a pool with 8 ranks per node."""
    per_node = min(RANKS_PER_NODE, ranks)
    pool = ResourcePool([per_node] * (ranks // per_node))
    groups = [SimpleNamespace(id=number) for number in range(ranks // per_node)]

    def look_up() -> None:
        places = pool.bundles_of_ranks()
        bundles.local_places([(groups[node], bundle) for node, bundle in places])

    def nodes_of(group: SimpleNamespace) -> dict[int, str]:
        return dict.fromkeys(range(per_node), f"node {group.id}")

    with mock.patch.object(bundles, "nodes_of_bundles", nodes_of):
        yield {"placement look-ups": look_up}


@contextmanager
def watching(machines: Machines, ranks: int) -> Iterator[dict[str, Step]]:
    """One sweep of the watcher over ranks on nodes with 8 ranks each."""
    real = cluster_nodes()
    nodes = simulated_nodes(-(-ranks // RANKS_PER_NODE), real[0])
    group = machines.group(ranks, nodes=[node.node_id for node in nodes])

    def sweep() -> None:
        ranks = group._ranks
        if dead := ranks.backend.dead(ranks.handles):
            raise SystemExit(f"The watcher found a death: {dead}")

    with mock.patch.object(node_health, "cluster_nodes", lambda: [*real, *nodes]):
        yield {"watcher sweep": sweep}


def measure(steps: dict[str, Step], sizes: Sizes, expected_s: dict[str, float]) -> dict[str, float]:
    """Return median CPU seconds of this process for each step. The steps alternate.

    `expected_s`: estimates of one run. Steps above the budget are left out.
    """
    chosen = {n: s for n, s in steps.items() if expected_s.get(n, 0.0) <= sizes.budget_s}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    deadline = time.monotonic() + sizes.budget_s
    for run in itertools.count():
        for name, step in chosen.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
        if run == sizes.times or time.monotonic() > deadline:
            break
    # The first run of each step warms the caches; it counts only where there is no other.
    return {name: statistics.median(runs[1:] or runs) for name, runs in seconds.items()}
