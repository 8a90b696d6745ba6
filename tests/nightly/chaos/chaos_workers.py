"""The workers that the chaos program calls, and the gate files that hold their methods."""

import asyncio
import os
import time
from pathlib import Path

import torch

from quadriga import DataProto
from quadriga.single_controller import Dispatch, Worker, register

LIMIT = 4096
"""Values of `x` are whole numbers below this, so that float32 arithmetic is exact."""
GATE_LIMIT_S = 60.0
"""A method that waits at a gate gives up after this time, so that no rank waits for ever."""


class PlantedError(Exception):
    """Raised by a worker on purpose."""


class ChaosWorker(Worker):
    """Methods whose results do not depend on how a batch was split.

    Every batch has `id` [B] int64 and `x` [B, W] float32. All other fields are optional.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.seen: list[str] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def affine(self, data: DataProto, factor: int) -> DataProto:
        """Return the batch with x = (factor · x + id) mod LIMIT, computed in place."""
        _affine(data.batch["x"], data.batch["id"], factor)
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fresh(self, data: DataProto, width: int) -> DataProto:
        """Return a batch of new fields that are functions of `id`: x [B, width], rag and name."""
        ids = data.batch["id"]
        x = (ids[:, None] + torch.arange(width)) % LIMIT
        rag = [torch.arange(int(i) % 5, dtype=torch.float32) + int(i) for i in ids]
        tensors = {"id": ids.clone(), "x": x.float()}
        if rag:
            tensors["rag"] = torch.nested.nested_tensor(rag, layout=torch.jagged)
        names = [{"id": int(i), "tags": ["a"] * (int(i) % 3)} for i in ids]
        return DataProto.from_dict(tensors, {"name": names})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def note(self, token: str) -> None:
        """Record that a call started on this rank."""
        self.seen.append(token)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def notes(self) -> list[str]:
        """Return the tokens in the order in which this rank received them."""
        return list(self.seen)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """Return the process id of this rank."""
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_on(self, rank: int, gate: str) -> int:
        """Wait at the gate on one rank."""
        if self.rank == rank:
            wait_for_gate(gate)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows_or_raise(self, data: DataProto, rank: int, gate: str) -> DataProto:
        """Raise PlantedError on one rank. The others wait at the gate and return their rows."""
        if self.rank == rank:
            raise PlantedError(f"rank {rank}")
        wait_for_gate(gate)
        return data


class CoroutineWorker(ChaosWorker):
    """The same with coroutine methods. They return a buffer that the next call overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[tuple[int, ...], torch.Tensor] = {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def affine_later(self, data: DataProto, factor: int, seconds: float) -> DataProto:
        """As `affine`, after a pause, with the result in a buffer of this worker."""
        x, ids = data.batch["x"], data.batch["id"]
        await asyncio.sleep(seconds)
        buffer = self._buffers.setdefault(tuple(x.shape), torch.empty_like(x))
        buffer.copy_(x)
        _affine(buffer, ids, factor)
        return DataProto.from_dict({"id": ids, "x": buffer})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def note_later(self, token: str) -> None:
        """As `note`: the token is recorded before the first pause."""
        self.seen.append(token)
        await asyncio.sleep(0.01)


def _affine(x: torch.Tensor, ids: torch.Tensor, factor: int) -> None:
    x.mul_(factor).add_(ids.reshape(-1, *[1] * (x.dim() - 1))).remainder_(LIMIT)


def wait_for_gate(gate: str) -> None:
    """Wait until the gate file exists."""
    deadline = time.monotonic() + GATE_LIMIT_S
    while not Path(gate).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
