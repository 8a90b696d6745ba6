"""verl's side of the data-plane benchmark. Runs in an environment with verl 0.9.1."""

from __future__ import annotations

import statistics
import time
from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from plane import step
from plane.measure import WARM, repeat


class Role(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rollout(self, prompts):
        return DataProto.from_dict(step.rollout(len(prompts)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rollout_later(self, prompts):
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
        return len(data)


def start(ranks: int, store_bytes: int) -> None:
    ray.init(
        address="local",
        num_cpus=2 * ranks + 2,
        object_store_memory=store_bytes,
        include_dashboard=False,
        logging_level="error",
    )


def group(ranks: int) -> Any:
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Role)), device_name="cpu")


def prompts(rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(rows)})


def five_calls(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(ranks, 12 * megabytes * 2**20 + 2**28)
    roles = group(ranks)
    rows = step.rows_for(megabytes, ranks)

    def run(rows: int = rows) -> None:
        data = roles.rollout(prompts(rows))
        log_prob = roles.log_prob(data)
        values = roles.values(data)
        roles.update(data.union(log_prob).union(values))

    run(ranks * 4)
    found = repeat(run, times)
    ray.shutdown()
    return {**found, "payload_bytes": rows * step.ROW_BYTES}


def put_get(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(1, 8 * megabytes * 2**20)
    rows = megabytes * 2**20 // 12 // 1024
    data = DataProto.from_dict({f"f{i}": torch.randn(rows, 1024) for i in range(3)})
    puts, gets = [], []
    for _ in range(WARM + times):
        a = time.perf_counter()
        ref = ray.put(data)
        b = time.perf_counter()
        back = ray.get(ref)
        puts.append(b - a)
        gets.append(time.perf_counter() - b)
        del ref, back
    ray.shutdown()
    return {"put_s": statistics.median(puts[WARM:]), "get_s": statistics.median(gets[WARM:])}


def fan_out(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(8, 12 * megabytes * 2**20 + 2**28)
    makers, readers = group(4), group(ranks)
    made = makers.rollout_later(prompts(step.rows_for(megabytes, 12)))
    ray.wait(made.futures, num_returns=4, fetch_local=False)
    found = repeat(lambda: readers.receive(made), times)
    ray.shutdown()
    return found


def tiny(megabytes: int, ranks: int, times: int) -> dict[str, Any]:
    start(ranks, 2**28)
    roles = group(ranks)
    data = DataProto.from_dict({"x": torch.arange(ranks)})
    found = repeat(lambda: roles.echo(data), times, warmup=20)
    ray.shutdown()
    return found


CASES = {"five_calls": five_calls, "put_get": put_get, "fan_out": fan_out, "tiny": tiny}
