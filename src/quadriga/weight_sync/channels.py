"""Channels: how the bytes of a round get from one process to another.

A round is packed, sent and received. The next round is packed and sent before the last one is
received, so that packing and sending overlap.

- `NoChannel`: one process. All transfers are copies in its memory.
- `CollectiveChannel`: an all-to-all of a process group, gloo or NCCL. It connects the ranks of one
  worker group, or those of two that have joined a common group.
- `SharedMemoryChannel`: ranks on one node, with weights in host memory. A box that several ranks
  read is written once.

Every rank of a channel must open and send every round of the plan, in order.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import TracebackType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.errors import CollectiveError
from quadriga.parallel.distributed import Collectives
from quadriga.weight_sync.planning.plan import Round, Slot, Transfer

Dtypes = Mapping[str, torch.dtype]
"""Weight → the dtype in which it is sent."""

_ALIGNMENT = 16


class Posted(Protocol):
    """A round in flight."""

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        """Yield what this rank receives; each tensor is valid until the next one is asked for.

        Waits for: the ranks that send. Unblocked by: their data, or the timeout of the group.
        """
        ...


class Outgoing(Protocol):
    """A round that this rank packs."""

    def put(self, transfer: Transfer, values: Tensor) -> None:
        """Pack the box of a transfer of this rank. Transfers come in the order of the plan."""
        ...

    def send(self) -> Posted:
        """Send the round."""
        ...


class Channel(Protocol):
    """Connects the processes of a plan; see the module."""

    def open(self, current: Round) -> Outgoing:
        """Start to pack a round."""
        ...


class NoChannel:
    """The channel of a single process.

    Raises:
        CollectiveError: a round has a transfer between two processes.
    """

    def open(self, current: Round) -> Outgoing:
        for transfer in current.transfers:
            if not transfer.is_local:
                raise CollectiveError(
                    f"rank {transfer.source} must send weight {transfer.weight!r} to rank "
                    f"{transfer.target}, but no process group connects them"
                )
        return _Nothing()


class _Nothing:
    def put(self, transfer: Transfer, values: Tensor) -> None:
        raise CollectiveError(f"a single process sends nothing, got {transfer}")

    def send(self) -> Posted:
        return self

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        return iter(())


class CollectiveChannel:
    """An all-to-all per round. Rank r of the plan is rank r of the group.

    Two buffers take turns, so that no round allocates memory.

    Args:
        group: the process group.
        device: of the buffers: the CPU for gloo, the accelerator for NCCL.
        rounds: all rounds that will be sent, for the size of the buffers.
        dtypes: weight → the dtype in which it is sent.
    """

    def __init__(
        self,
        group: Collectives,
        device: torch.device,
        rounds: Iterable[Round],
        dtypes: Dtypes,
    ) -> None:
        self.group, self.dtypes, self._opened = group, dtypes, 0
        size = max((r.staged.get(group.rank(), 0) for r in rounds), default=0) + _ALIGNMENT
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def open(self, current: Round) -> Outgoing:
        self._opened += 1
        return _Exchange(self.group, current, self._buffers[self._opened % 2], self.dtypes)


class _Exchange:
    """One all-to-all. In the buffer, first what is sent, then what is received; in both, all boxes
    to or from one rank are together, in the order of the plan."""

    # Rank 0 of 3 sends a (8 bytes) to rank 2, b (4) to rank 1, c (8) to rank 2, and receives 16:
    #
    #   plan order   a→2  b→1  c→2
    #   buffer       b:0  a:4  c:12  received: 32 to 48     sizes per rank 0 4 16

    def __init__(self, group: Collectives, current: Round, buffer: Tensor, dtypes: Dtypes) -> None:
        self.group, self.dtypes = group, dtypes
        own, ranks = group.rank(), group.size()
        remote = [t for t in current.transfers if not t.is_local]
        self.incoming = sorted((t for t in remote if t.target == own), key=lambda t: t.source)
        self.sizes_out, self.sizes_in = [0] * ranks, [0] * ranks
        for transfer in remote:
            if transfer.source == own:
                self.sizes_out[transfer.target] += transfer.num_bytes
            elif transfer.target == own:
                self.sizes_in[transfer.source] += transfer.num_bytes
        self.next = list(accumulate([0, *self.sizes_out[:-1]]))
        outgoing = sum(self.sizes_out)
        self.sent = buffer[:outgoing]
        start = -(-outgoing // _ALIGNMENT) * _ALIGNMENT
        self.received = buffer[start : start + sum(self.sizes_in)]

    def put(self, transfer: Transfer, values: Tensor) -> None:
        start = self.next[transfer.target]
        self.next[transfer.target] = stop = start + transfer.num_bytes
        copy_bytes(self.sent[start:stop], values)

    def send(self) -> Posted:
        self.work = self.group.alltoall_base(
            self.received, self.sent, self.sizes_in, self.sizes_out
        )
        return self

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        self.work.wait()
        start = 0
        for transfer in self.incoming:
            stop = start + transfer.num_bytes
            yield transfer, typed(self.received[start:stop], self.dtypes[transfer.weight])
            start = stop


def copy_bytes(into: Tensor, values: Tensor) -> None:
    """Copy the elements of a tensor in order into a flat tensor of bytes."""
    if into.storage_offset() % values.element_size():
        # `contiguous` would keep the strides of a single element.
        into.copy_(values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8))
    else:  # without a copy of what is not contiguous
        into.view(values.dtype).view(values.shape).copy_(values)


def typed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as a flat tensor of another dtype."""
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()  # a weight of 1-byte elements was packed before it
    return flat.view(dtype)


class SharedMemoryChannel:
    """Two segments of memory per rank, which all ranks of a node map.

    A segment has no name in a file system, so nothing is left if a process is killed.

        rank 0   write round 0   write 1   read 0   write 2   read 1
        segment        A            B         A        A         B

    A rank waits for the others before it writes (all have read what the segment held) and before
    it reads (all have written).

    Args:
        group: the process group, whose ranks are on one node.
        rounds: all rounds that will be sent, for the sizes of the segments.
        dtypes: weight → the dtype in which it is sent.

    Raises:
        CollectiveError: the memory of another rank cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, rounds: Iterable[Round], dtypes: Dtypes) -> None:
        self._group, self._dtypes, self._opened = group, dtypes, 0
        self._size = max((_Places(r).sizes.get(group.rank(), 0) for r in rounds), default=0)
        own = os.memfd_create("quadriga_weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, max(2 * self._size, mmap.PAGESIZE))
            # The path is read by ranks of the same user on the same node.
            paths: list[tuple[str, int]] = [("", 0)] * group.size()
            dist.all_gather_object(
                paths, (f"/proc/{os.getpid()}/fd/{own}", self._size), group=group
            )
            self._maps = [_mapped(path) for path, _ in paths]
            self._sizes = [size for _, size in paths]
            self._barrier()  # until all have opened it
        finally:
            os.close(own)

    def __enter__(self) -> SharedMemoryChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._maps.clear()  # unmapped when the last view is dropped

    def open(self, current: Round) -> Outgoing:
        index, self._opened = self._opened % 2, self._opened + 1
        if self._opened > 2:
            self._barrier()
        return _Written(self, current, index)

    def _view(self, rank: int, index: int, start: int, num_bytes: int) -> Tensor:
        return self._maps[rank][index * self._sizes[rank] + start :][:num_bytes]

    def _barrier(self) -> None:
        self._group.barrier().wait()


class _Places:
    """Where each box of a round is in the segment of its source. All ranks compute the same."""

    def __init__(self, current: Round) -> None:
        self.start: dict[tuple[int, Slot], int] = {}
        self.sizes: dict[int, int] = {}
        for transfer in current.transfers:
            key = (transfer.source, transfer.read)
            if transfer.is_local or key in self.start:
                continue
            self.start[key] = self.sizes.get(transfer.source, 0)
            end = self.start[key] + transfer.num_bytes
            self.sizes[transfer.source] = -(-end // _ALIGNMENT) * _ALIGNMENT


class _Written:
    def __init__(self, channel: SharedMemoryChannel, current: Round, index: int) -> None:
        self.channel, self.current, self.index = channel, current, index
        self.places = _Places(current)
        self.written: set[Slot] = set()

    def put(self, transfer: Transfer, values: Tensor) -> None:
        if transfer.read not in self.written:
            self.written.add(transfer.read)
            copy_bytes(self._bytes(transfer), values)

    def send(self) -> Posted:
        return self

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        self.channel._barrier()
        own = self.channel._group.rank()
        for transfer in self.current.transfers:
            if transfer.target == own and not transfer.is_local:
                yield transfer, typed(self._bytes(transfer), self.channel._dtypes[transfer.weight])

    def _bytes(self, transfer: Transfer) -> Tensor:
        start = self.places.start[transfer.source, transfer.read]
        return self.channel._view(transfer.source, self.index, start, transfer.num_bytes)


def _mapped(path: str) -> Tensor:
    """Map the memory of a rank as a tensor of bytes."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CollectiveError(
            f"the shared memory {path} of a rank on this node cannot be opened: {error}; set "
            "rollout.weight_transport=collective"
        ) from error
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def shares_memory(nodes: Sequence[str], device: torch.device) -> bool:
    """Return whether ranks on these nodes can use a `SharedMemoryChannel`."""
    on_linux = sys.platform == "linux" and hasattr(os, "memfd_create")
    return on_linux and device.type == "cpu" and len(set(nodes)) == 1
