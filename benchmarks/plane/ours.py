"""Quadriga's side of the data-plane benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from plane import raw, step
from plane.measure import WARM, repeat
from quadriga.backends import get_backend
from quadriga.protocol import DataProto
from quadriga.protocol.storage import traffic
from quadriga.single_controller import Dispatch, Worker, register


class Role(Worker):
    """A worker with the methods of all roles of the step."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rollout(self, prompts):
        return DataProto.from_dict(step.rollout(len(prompts)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_prob(self, data):
        return DataProto.from_dict(step.log_prob(data.batch["responses"]))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data):
        return DataProto.from_dict(step.values(data.batch["responses"]))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data):
        return step.update([data.batch[key] for key in step.FIELDS])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data):
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def receive(self, data):
        """Read this rank's part and return the bytes that were fetched for it."""
        traffic.reset()
        data.prefetch()
        return traffic.reset().fetched_bytes


def group(backend: Any, ranks: int) -> Any:
    pool = backend.resource_pool([ranks], use_gpu=False)
    return backend.worker_group(pool, backend.class_with_args(Role))


def start(ranks: int, store_bytes: int) -> Any:
    raw.start(ranks, store_bytes)  # the same cluster settings as for raw Ray
    backend = get_backend("ray")
    backend.start()
    return backend


def prompts(rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(rows)})


def five_calls(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    backend = start(ranks, 6 * megabytes * 2**20 + 2**28)
    roles = group(backend, ranks)
    rows = step.rows_for(megabytes, ranks)

    def run(rows: int = rows) -> None:
        data = roles.rollout(prompts(rows))
        log_prob = roles.log_prob(data)
        values = roles.values(data)
        data.union(log_prob).union(values)
        roles.update(data)

    run(ranks * 4)
    found = repeat(run, times)
    backend.shutdown()
    ray.shutdown()
    return {**found, "payload_bytes": rows * step.ROW_BYTES}


def put_get(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    """Put one batch into the store, get it, and read every field."""
    from quadriga.backends.ray.store import RayStore
    from quadriga.protocol import use_store
    from quadriga.protocol.boundary import pack_argument, unpack_argument

    backend = start(1, 8 * megabytes * 2**20)
    tensors = {f"f{i}": torch.randn(megabytes * 2**20 // 12 // 1024, 1024) for i in range(3)}
    data = DataProto.from_dict(tensors)
    found: dict[str, list[float]] = {"put_s": [], "get_s": [], "read_s": []}
    with use_store(RayStore()):
        for _ in range(WARM + times):
            moments = [time.perf_counter()]
            ref = ray.put(pack_argument(data))
            moments.append(time.perf_counter())
            back = unpack_argument(ray.get(ref))
            moments.append(time.perf_counter())
            back.prefetch()
            moments.append(time.perf_counter())
            for name, a, b in zip(found, moments, moments[1:], strict=False):
                found[name].append(b - a)
            del ref, back
    backend.shutdown()
    ray.shutdown()
    return {name: statistics.median(spans[WARM:]) for name, spans in found.items()}


def fan_out(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    """Pass a future of a result of 4 ranks to `ranks` ranks, which read it."""
    backend = start(8, 6 * megabytes * 2**20 + 2**28)
    makers, readers = group(backend, 4), group(backend, ranks)
    rows = step.rows_for(megabytes, 12)
    made = makers.rollout.submit(prompts(rows))
    made.get()
    received: list[list[int]] = []
    found = repeat(lambda: received.append(readers.receive(made)), times)
    backend.shutdown()
    ray.shutdown()
    bytes_per_row = 28 * step.TOKENS
    return {
        **found,
        "received_bytes": received[-1],
        "needed_bytes": [rows // ranks * bytes_per_row] * ranks,
        "payload_bytes": rows * bytes_per_row,
    }


def tiny(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    backend = start(ranks, 2**28)
    roles = group(backend, ranks)
    data = DataProto.from_dict({"x": torch.arange(ranks)})
    found = repeat(lambda: roles.echo(data), times, warmup=20)
    backend.shutdown()
    ray.shutdown()
    return found


CASES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "five_calls": five_calls,
    "put_get": put_get,
    "fan_out": fan_out,
    "tiny": tiny,
}
