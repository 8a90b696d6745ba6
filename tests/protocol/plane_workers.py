"""Workers of the data-plane tests."""

import time
from pathlib import Path

import numpy as np
import ray
import torch
from protocol_cases import Done

from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.storage import traffic
from quadriga.protocol.tensordicts import TensorDictBase
from quadriga.protocol.values import clone_value
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

WIDTH = 16384  # float32 columns: a row has 64 KiB, so that two rows are above the inline limit


class Plane(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("pairs", self.rank // 2, self.rank % 2 == 0)
        self.received: tuple[list[str], int] = ([], 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts):
        """Return big [n, WIDTH] with the number of each row, small [n], and rag with rows of
        4096 * (1 + i % 3) times 8 numbers."""
        rows = prompts.batch["row"]
        ragged = [torch.full((4096 * (1 + int(i) % 3), 8), float(i)) for i in rows]
        return DataProto.from_dict(
            {
                "big": rows[:, None].float().expand(len(rows), WIDTH),
                "rag": torch.nested.nested_tensor(ragged, layout=torch.jagged),
                "small": rows * 10,
            },
            {"text": [f"{int(i)}" + "x" * 70_000 for i in rows]},
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def call_generate(self, group, prompts):
        """Call another group: this process then owns the results."""
        return group.generate(prompts)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_once_file_exists(self, prompts, path):
        """Do the same as `generate` once a file exists."""
        deadline = time.monotonic() + 30
        while not Path(path).exists():
            assert time.monotonic() < deadline, "the file was not created in time"
            time.sleep(0.02)
        return self.generate(prompts)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def receive_in_pairs(self, data):
        """Ranks 2 i and 2 i + 1 receive the same rows. Record the keys of the stored objects."""
        column = data.batch.columns["big"]
        keys = [handle.key for handle in column.handles]
        traffic.reset()
        data.prefetch(["big"])
        self.received = keys, traffic.reset().fetched_bytes
        return data.select(["big"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what_was_received(self):
        return self.received

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data):
        return DataProto.from_dict({"values": data.batch["big"] + 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data, keys):
        """Read these fields; return (bytes fetched, the first column of the first field)."""
        traffic.reset()
        data.prefetch(keys)
        fetched = traffic.reset().fetched_bytes
        return fetched, data.batch[keys[0]][:, 0].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overwrite(self, data):
        """Overwrite every field of `data` in place; return the values before that."""
        seen = {}
        for half in (data.batch, data.non_tensor_batch):
            for key in list(half.keys()):
                value = half[key]
                seen[key] = clone_value(value)
                tree = isinstance(value, TensorDictBase)
                for leaf in value.values(True, True) if tree else [value]:
                    overwrite(leaf)
        return seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stored(self):
        return traffic.stored_bytes

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def show(self, data):
        rows = data.non_tensor_batch["o"]
        return [ray.get(row["ref"]) if isinstance(row, dict) else row.show() for row in rows]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def first_row(self, holder):
        assert isinstance(holder.data.batch, RemoteBatch)
        return int(holder.data.batch["big"][0, 0])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def show_nested(self, data):
        for row in data.batch["nested"].get("o").tolist():
            row["shown"] = ray.get(row["ref"]) if "ref" in row else row["note"].show()
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sleep(self, data, seconds):
        time.sleep(seconds)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def returns_a_future(self):
        return DataProtoFuture([Done(DataProto.from_dict({"x": torch.arange(4)}))])


def overwrite(leaf):
    if isinstance(leaf, np.ndarray):
        leaf[:] = leaf[::-1].copy()
        if leaf.dtype == object and isinstance(leaf[0], dict | list):
            leaf[0].clear()
    else:
        (leaf.values() if leaf.is_nested else leaf).zero_()
