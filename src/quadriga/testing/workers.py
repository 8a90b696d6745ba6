"""The worker classes that the laws of backends start."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, TypeVar

from quadriga.errors import ConfigError
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

if TYPE_CHECKING:
    from quadriga.protocol import DataProto

ValueT = TypeVar("ValueT")


class Probe(Worker):
    """One role of the process. It has a number, and a mesh in which all ranks share one part."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        if number < 0:
            raise ConfigError(f"number must be 0 or more, got {number}")
        self.number = number
        self.steps: list[str] = []
        self._register_dispatch_collect_info("all", 0, self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int, int]:
        """Return (rank, world size, local rank, local world size)."""
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self) -> tuple[str, str, str, str]:
        """Return the environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, world_size, address, port = (os.environ.get(name, "") for name in names)
        return rank, world_size, address, port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        """Return the sum of the number, x and the rank."""
        return self.number + x + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, x: ValueT) -> tuple[int, ValueT]:
        """Return the rank and its entry of the argument."""
        return self.rank, x

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self) -> int:
        """Return the number of the executing rank, which is 0."""
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self) -> int:
        """Return the rank from a coroutine."""
        await asyncio.sleep(0.001)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def row_by_row(self, data: DataProto) -> Iterator[DataProto]:
        """Yield the rows one by one, doubled, and record each step."""
        try:
            for i in range(len(data)):
                self.steps.append(f"item {i}")
                yield self.double(data[i : i + 1])
        finally:
            self.steps.append("closed")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def up_to(self, counts: list[int]) -> AsyncIterator[int]:
        """Yield as many numbers as `counts` says for this rank."""
        for i in range(counts[self.rank]):
            await asyncio.sleep(0.001)
            yield 10 * self.rank + i

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_after(self, count: int) -> Iterator[int]:
        """Yield `count` numbers, then raise KeyError on rank 1."""
        for i in range(count + 1):
            if i == count and self.rank == 1:
                raise KeyError("planted")
            yield i

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_steps(self) -> list[str]:
        """Return what `row_by_row` has recorded, and forget it."""
        steps, self.steps = self.steps, []
        return steps

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        """Double the rows in place."""
        data.batch["row"] *= 2
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("all"))
    def spoil(self, data: DataProto) -> DataProto:
        """Change the part in place that all ranks share."""
        data.batch["row"] += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> int:
        """Return the sum of the rows of this rank."""
        return int(data.batch["row"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> int:
        """Raise KeyError on one rank."""
        if self.rank == rank:
            raise KeyError("planted")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self, rank: int, seconds: float) -> int:
        """Sleep on one rank."""
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank


class Sibling(Worker):
    """Another role in the same process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask(self, x: int) -> int:
        """Return the result of `add` of the other role."""
        result: int = self.sibling("probe").add(x)
        return result
