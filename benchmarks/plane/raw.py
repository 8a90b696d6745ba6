"""Raw Ray's side of the data-plane benchmark: hand-written code for these calls only."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

from plane import step
from plane.measure import WARM, repeat

Arrays = dict[str, np.ndarray]


def arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    return {key: value.numpy() for key, value in tensors.items()}


def view(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's memory is read-only, and this code only reads
        return torch.from_numpy(array)


@ray.remote(num_cpus=1)
class Role:
    def rollout(self, rows: int) -> Arrays:
        return arrays(step.rollout(rows))

    def log_prob(self, batch: Arrays) -> Arrays:
        return arrays(step.log_prob(view(batch["responses"])))

    def values(self, batch: Arrays) -> Arrays:
        return arrays(step.values(view(batch["responses"])))

    def update(self, *parts: Arrays) -> float:
        joined = {key: value for part in parts for key, value in part.items()}
        return step.update([view(joined[key]) for key in step.FIELDS])

    def echo(self, batch: Arrays) -> Arrays:
        return batch

    def receive(self, start: int, stop: int, *parts: Arrays) -> int:
        """Copy the rows `start:stop` of the concatenated parts. Return the number of bytes."""
        rows = [len(part["input_ids"]) for part in parts]
        ends = np.cumsum([0, *rows])
        total = 0
        for key in parts[0]:
            pieces = [
                part[key][max(start - a, 0) : max(stop - a, 0)]
                for part, a in zip(parts, ends, strict=False)
            ]
            total += np.concatenate(pieces).nbytes
        return total


def start(ranks: int, store_bytes: int) -> None:
    """Start a cluster with Quadriga's setting for the deletion of objects, for both systems.

    Objects without references are deleted after 10 ms instead of 1 s, so that new objects reuse
    memory that was touched before.
    """
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "10")
    ray.init(
        address="local",
        num_cpus=2 * ranks + 2,
        object_store_memory=store_bytes,
        include_dashboard=False,
        logging_level="error",
    )


def group(ranks: int) -> list[Any]:
    actors = [Role.remote() for _ in range(ranks)]
    ray.get([actor.echo.remote({}) for actor in actors])
    return actors


def five_calls(megabytes: int, ranks: int, times: int, blocking: bool = True) -> dict[str, Any]:
    start(ranks, 6 * megabytes * 2**20 + 2**28)
    actors = group(ranks)
    rows = step.rows_for(megabytes, ranks)

    def call(refs: list[Any]) -> list[Any]:
        if blocking:
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
        return refs

    def run() -> None:
        made = call([actor.rollout.remote(rows // ranks) for actor in actors])
        log_prob = call([a.log_prob.remote(m) for a, m in zip(actors, made, strict=True)])
        values = call([a.values.remote(m) for a, m in zip(actors, made, strict=True)])
        parts = zip(actors, made, log_prob, values, strict=True)
        ray.get([actor.update.remote(*refs) for actor, *refs in parts])

    found = repeat(run, times)
    ray.shutdown()
    return {**found, "payload_bytes": rows * step.ROW_BYTES}


def five_calls_pipelined(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    """Run the five calls without waiting between them. An error is raised at the end only."""
    return five_calls(megabytes, ranks, times, blocking=False)


def put_get(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(1, 8 * megabytes * 2**20)
    rows = megabytes * 2**20 // 12 // 1024
    batch = {f"f{i}": torch.randn(rows, 1024).numpy() for i in range(3)}
    puts, gets = [], []
    for _ in range(WARM + times):
        a = time.perf_counter()
        ref = ray.put(batch)
        b = time.perf_counter()
        back = ray.get(ref)
        puts.append(b - a)
        gets.append(time.perf_counter() - b)
        del ref, back
    ray.shutdown()
    return {"put_s": statistics.median(puts[WARM:]), "get_s": statistics.median(gets[WARM:])}


def fan_out(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(8, 6 * megabytes * 2**20 + 2**28)
    makers, readers = group(4), group(ranks)
    rows = step.rows_for(megabytes, 12)
    made = [actor.rollout.remote(rows // 4) for actor in makers]
    ray.wait(made, num_returns=4, fetch_local=False)
    share = rows // ranks

    def run() -> None:
        ray.get(
            [a.receive.remote(r * share, r * share + share, *made) for r, a in enumerate(readers)]
        )

    found = repeat(run, times)
    ray.shutdown()
    return found


def tiny(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(ranks, 2**28)
    actors = group(ranks)
    parts = [{"x": np.arange(1)} for _ in range(ranks)]
    found = repeat(
        lambda: ray.get([a.echo.remote(p) for a, p in zip(actors, parts, strict=True)]),
        times,
        warmup=20,
    )
    ray.shutdown()
    return found


CASES: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "five_calls": five_calls,
    "five_calls_pipelined": five_calls_pipelined,
    "put_get": put_get,
    "fan_out": fan_out,
    "tiny": tiny,
}
