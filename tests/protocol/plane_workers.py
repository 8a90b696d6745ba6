"""Workers of the data-plane tests."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.protocol import DataProto
from quadriga.protocol.storage import traffic
from quadriga.protocol.values import clone_value
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

WIDTH = 16384  # float32 columns: a row has 64 KiB, so that two rows are above the inline limit


class Box:
    """An object of a class of the user."""

    def __init__(self) -> None:
        self.items = [1]


def bag() -> dict:
    """Return tensors and mutable values in containers of several types."""
    return {
        "state": OrderedDict(w=torch.ones(3), deep=[np.ones(3)]),
        "objects": np.array([np.ones(2), {"k": [1]}, None], dtype=object),
        "names": {"a"},
        "box": Box(),
    }


def spoil(bag: dict) -> None:
    """Change every value of a bag in place."""
    bag["state"]["w"].zero_()
    bag["state"]["deep"][0][:] = 0
    bag["objects"][0][:] = 0
    bag["objects"][1]["k"].append(2)
    bag["names"].add("b")
    bag["box"].items.append(2)


def is_unchanged(bag: dict) -> bool:
    """Return whether a bag is unchanged."""
    return (
        type(bag["state"]) is OrderedDict
        and bag["state"]["w"].tolist() == [1, 1, 1]
        and bag["state"]["deep"][0].tolist() == [1, 1, 1]
        and bag["objects"][0].tolist() == [1, 1]
        and bag["objects"][1] == {"k": [1]}
        and bag["names"] == {"a"}
        and bag["box"].items == [1]
    )


class Plane(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("pairs", self.rank // 2, self.rank % 2 == 0)
        self.kept = bag()
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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil(self, bag):
        seen = is_unchanged(bag)
        spoil(bag)
        return seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def spoil_meta(self, data):
        return self.spoil(data.meta_info)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def show_kept(self):
        return self.kept

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def fetch_handles(self, handles):
        return [handle.fetch().tolist() for handle in handles]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data):
        return DataProto.from_dict({"values": data.batch["big"] + 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def values_later(self, data):
        return DataProto.from_dict({"values": data.batch["big"] + 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data, keys):
        """Read these fields; return (bytes fetched, the first column of the first field)."""
        traffic.reset()
        data.prefetch(keys)
        fetched = traffic.reset().fetched_bytes
        return fetched, data.batch[keys[0]][:, 0].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scribble(self, data):
        """Write in place into everything received; return the values before that."""
        batch, arrays = data.batch, data.non_tensor_batch
        seen = {k: values_of(batch[k]) for k in batch.keys()}  # noqa: SIM118
        for key in list(batch.keys()):
            value = batch[key]
            (value.values() if value.is_nested else value).zero_()
        for key, value in arrays.items():
            seen[key] = [str(v) for v in value]
            value[:] = value[::-1].copy()
        data.meta_info["list"].append(1)
        data.meta_info["tensor"].add_(1)
        return seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overwrite(self, data):
        """Overwrite the only field of `data` in place; return its value before that."""
        (half,) = [
            h for h in (data.batch, data.non_tensor_batch) if h is not None and len(h.keys())
        ]
        value = half[next(iter(half.keys()))]
        seen = clone_value(value)
        leaves = value.values(True, True) if isinstance(value, TensorDictBase) else [value]
        for leaf in leaves:
            if isinstance(leaf, np.ndarray):
                leaf[:] = leaf[::-1].copy()
                if leaf.dtype == object and isinstance(leaf[0], dict | list):
                    leaf[0].clear()
            else:
                (leaf.values() if leaf.is_nested else leaf).zero_()
        return seen

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def passes_on(self, data):
        """Return the batch with one field changed and the others unread."""
        traffic.reset()
        data.batch["small"] += 1
        data.meta_info["fetched"] = traffic.reset().fetched_bytes
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stored(self):
        return traffic.snapshot().stored_bytes

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self):
        os._exit(1)


def values_of(value):
    return (value.values() if value.is_nested else value).flatten()[-4:].tolist()
