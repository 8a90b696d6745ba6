"""Workers of the data-plane tests."""

from __future__ import annotations

import os

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.protocol import DataProto, values
from quadriga.protocol.traffic import traffic
from quadriga.single_controller import Dispatch, Worker, register

WIDTH = 16384  # float32 columns: a row weighs 64 KiB, so that one row is above the inline limit


class Plane(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts):
        """big [n, WIDTH] holds the row's number; small [n]; rag: row i has i % 3 times 4096."""
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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data):
        return DataProto.from_dict({"values": data.batch["big"] + 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def values_later(self, data):
        return DataProto.from_dict({"values": data.batch["big"] + 0.5})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data, keys):
        """What reading these fields costs this rank: (bytes fetched, rows that arrived)."""
        traffic.reset()
        data.prefetch(keys)
        fetched = traffic.reset().fetched_bytes
        return fetched, data.batch[keys[0]][:, 0].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scribble(self, data):
        """Writes in place into everything that it got; gives what it saw before."""
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
        """Overwrites the one field of `data` in place; gives what it held before."""
        (half,) = [
            h for h in (data.batch, data.non_tensor_batch) if h is not None and len(h.keys())
        ]
        value = half[next(iter(half.keys()))]
        seen = values.clone(value)
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
        """Returns what it got, one field changed, the others unread."""
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
