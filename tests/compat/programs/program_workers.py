"""Workers of the programs, in verl's spelling."""

import os

import ray
import torch
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

LARGE = 50_000  # numbers of a row that is sent by reference


class Calculator(Worker):
    """Methods of every dispatch mode, waited for and not."""

    def __init__(self, start=0):
        super().__init__()
        self.total = start
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)
        self._register_dispatch_collect_info("replicas", dp_rank=0, is_collect=self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.total += x
        return self.total

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rank_plus(self, x):
        return self.rank + x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def own(self, x, y=0):
        return (self.rank, x, y)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double(self, data):
        return DataProto.from_dict({"a": data.batch["a"] * 2, "rank": ranks_of(self, data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, materialize_futures=False)
    def read_future(self, future):
        assert isinstance(future, DataProtoFuture)
        return future.get()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def in_place(self, data):
        data.batch["a"] += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def count(self, data):
        return len(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def by_mesh(self, data):
        return DataProto.from_dict({"rank": ranks_of(self, data)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("replicas"), blocking=False)
    def replicated(self, data, failing_rank=None):
        if self.rank == failing_rank:
            raise KeyError("lost")
        return data

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail(self):
        raise KeyError("lost")

    def tensor(self, size):
        return torch.full((size,), float(self.rank))

    def batch(self, rows):
        return DataProto.from_dict({"a": torch.ones(rows, LARGE)}, {"name": ["x"] * rows})

    def total_of(self, data):
        return int(data.batch["a"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def put(self, x):
        return ray.put(x)

    def raw(self):
        return b"not a pickle"

    def roles(self):
        return sorted(self.fused_worker_dict)

    def variables(self):
        return dict(os.environ)


def ranks_of(worker, data):
    return torch.full((len(data),), worker.rank)
