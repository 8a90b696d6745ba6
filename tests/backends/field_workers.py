"""Workers whose results have large fields, for `test_results.py`."""

from __future__ import annotations

import torch

from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

WIDTH = 16384  # float32 columns: a row weighs 64 KiB


def fields(rows: torch.Tensor) -> DataProto:
    """Return the row numbers in `one` [n, WIDTH], doubled in `two`, times ten in `small` [n]."""
    one = rows[:, None].float().repeat(1, WIDTH)
    return DataProto.from_dict({"one": one, "two": 2 * one, "small": 10 * rows})


class Fields(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, prompts):
        return fields(prompts.batch["row"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        """Return the fields that were received, and one more."""
        data.batch["three"] = data.batch["one"] * 3
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def several(self, count):
        """Return batches of `count` rows, of one and of no rows."""
        return [fields(torch.arange(n)) for n in (count, 1, 0)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data):
        return {key: float(data.batch[key].sum()) for key in data.batch.keys()}  # noqa: SIM118

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_or_make(self, fail):
        if fail:
            raise ValueError("asked to fail")
        return fields(torch.arange(4))


class Echo(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo_batch(self, data):
        return data


class AsyncEcho(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def echo(self, value):
        return value


class Mine(DataProto):
    """A batch of a class of the user."""


class Interleaving(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def make(self, prompts):
        return fields(prompts.batch["row"])
