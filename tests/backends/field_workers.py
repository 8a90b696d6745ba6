"""Workers whose results have large fields, for `test_results.py`."""

from __future__ import annotations

import torch

from quadriga.protocol import DataProto
from quadriga.protocol.storage import traffic
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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def little(self, prompts):
        """Return a field that is stored, and smaller than a return that Ray stores by itself."""
        rows = prompts.batch["row"]
        return DataProto.from_dict({"one": rows[:, None].float().repeat(1, WIDTH * 5 // 8)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def first_rows(self, prompts, rows):
        return fields(prompts.batch["row"][:rows])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def one_by_one(self, prompts):
        for row in prompts.batch["row"]:
            yield fields(row.repeat(2)).select(["one"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def joined(self, prompts, data):
        """Return received rows, not read, and new ones."""
        return DataProto.concat([data.select(["one"]), self.make(prompts).select(["one"])])


class Apart(Fields):
    """Every stored field of a result is an object of its own."""

    def __init__(self):
        super().__init__()
        from quadriga.backends.ray import store

        store.alone_bytes = lambda: 2


class Caller(Worker):
    """Calls another group, and so owns its results."""

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def call(self, group, prompts):
        return group.make(prompts)


class Reader(Worker):
    """Makes fields that are stored, and reads rows of them."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data):
        """Return `fields` and `rag` with 16384 numbers in each row, in rows of two lengths."""
        rows = data.batch["row"]
        made = fields(rows)
        ragged = [torch.full((8192 * (1 + int(i) % 3),), float(i)) for i in rows]
        made.batch["rag"] = torch.nested.nested_tensor(ragged, layout=torch.jagged)
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data, keys):
        """Return the numbers of the rows, which all fields must have, and the bytes that were cut
        for this read."""
        traffic.reset()
        data.prefetch(keys)
        cut = traffic.reset().cut_bytes
        one = data.batch["one"][:, -1].tolist()
        assert data.batch["two"][:, 0].tolist() == [2 * row for row in one]
        assert [part.unique().tolist() for part in data.batch["rag"].unbind()] == [[r] for r in one]
        return one, cut

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget(self):
        """Look up the row servers again."""
        from quadriga.backends.ray.row_store import servers

        servers._known.clear()


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
