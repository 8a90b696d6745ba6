"""Execute a plan on one rank: copy what it has, send what others need, receive what it lacks.

consumes      the rank's weights, in the order of the plan, and a channel to the other ranks
produces      the rank's target tensors, each as soon as it is complete
waits for     the other ranks of the channel, which must execute the same plan
memory        two rounds of the plan, at most `bucket_bytes`, and the tensors that are not complete,
              which are of two rounds at most

A channel moves the bytes of a round from one process to another. A round is packed, sent and
received. The next round is packed and sent before the last one is received, so that packing and
sending overlap. Every rank of a channel opens and sends every round of the plan, in order.

- `CollectiveChannel`: an all-to-all of a process group, gloo or NCCL. It connects the ranks of one
  worker group, or those of two that have joined a common group.
- `SharedMemoryChannel`: ranks on one node, with weights in host memory. A box that several ranks
  read is written once.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.errors import CollectiveError, WorkerError
from quadriga.parallel.distributed import Collectives
from quadriga.parallel.layouts import Box, count, shape_of, slices
from quadriga.weight_sync.plan import Plan, Round, Slot, Transfer, listed_names

if TYPE_CHECKING:
    from quadriga.weight_sync.sync import SourceReader

Dtypes = Mapping[str, torch.dtype]
"""Weight → the dtype in which it is sent."""

_ALIGNMENT = 16


class CollectiveChannel:
    """An all-to-all per round. Rank r of the plan is rank r of the group.

    Two buffers take turns, so that no round allocates memory.

    Args:
        group: the process group.
        device: of the buffers: the CPU for gloo, the accelerator for NCCL.
        rounds: all rounds that will be sent, for the size of the buffers.
    """

    def __init__(
        self, group: Collectives, device: torch.device, rounds: Iterable[Round], dtypes: Dtypes
    ) -> None:
        self.group, self.dtypes, self._opened = group, dtypes, 0
        size = max((r.staged.get(group.rank(), 0) for r in rounds), default=0) + _ALIGNMENT
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def open(self, current: Round) -> _Exchange:
        """Start to pack a round."""
        self._opened += 1
        return _Exchange(self, current, self._buffers[self._opened % 2])

    def close(self) -> None:
        """Do nothing: the buffers are freed with the channel."""


class _Exchange:
    """One all-to-all. In the buffer, first what is sent, then what is received; in both, all boxes
    to or from one rank are together, in the order of the plan."""

    # Rank 0 of 3 sends a (8 bytes) to rank 2, b (4) to rank 1, c (8) to rank 2, and receives 16:
    #
    #   plan order   a→2  b→1  c→2
    #   buffer       b:0  a:4  c:12  received: 32 to 48     sizes per rank 0 4 16

    def __init__(self, channel: CollectiveChannel, current: Round, buffer: Tensor) -> None:
        self.channel = channel
        own, ranks = channel.group.rank(), channel.group.size()
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
        """Pack the box of a transfer of this rank. Transfers come in the order of the plan."""
        start = self.next[transfer.target]
        self.next[transfer.target] = stop = start + transfer.num_bytes
        copy_bytes(self.sent[start:stop], values)

    def send(self) -> None:
        """Send the round."""
        self.work = self.channel.group.alltoall_base(
            self.received, self.sent, self.sizes_in, self.sizes_out
        )

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        """Yield what this rank receives; each tensor is valid until the next one is asked for.

        Waits for: the ranks that send. Unblocked by: their data, or the timeout of the group.
        """
        self.work.wait()
        start = 0
        for transfer in self.incoming:
            stop = start + transfer.num_bytes
            yield transfer, typed(self.received[start:stop], self.channel.dtypes[transfer.weight])
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

    Raises:
        CollectiveError: the memory of another rank cannot be mapped.
    """

    def __init__(self, group: dist.ProcessGroup, rounds: Iterable[Round], dtypes: Dtypes) -> None:
        self.group, self.dtypes, self._opened = group, dtypes, 0
        self.size = max((_starts(r)[1].get(group.rank(), 0) for r in rounds), default=0)
        own = os.memfd_create("quadriga_weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(own, max(2 * self.size, mmap.PAGESIZE))
            # The path is read by ranks of the same user on the same node.
            paths: list[tuple[str, int]] = [("", 0)] * group.size()
            dist.all_gather_object(paths, (f"/proc/{os.getpid()}/fd/{own}", self.size), group=group)
            self._maps = [_mapped(path) for path, _ in paths]
            self._sizes = [size for _, size in paths]
            self.barrier()  # until all have opened it
        finally:
            os.close(own)

    def open(self, current: Round) -> _Written:
        """Start to pack a round."""
        index, self._opened = self._opened % 2, self._opened + 1
        if self._opened > 2:
            self.barrier()
        return _Written(self, current, index)

    def close(self) -> None:
        """Drop the mapped memory. It is unmapped when the last view is dropped."""
        self._maps.clear()

    def view(self, rank: int, index: int, start: int, num_bytes: int) -> Tensor:
        """Return bytes in a segment of a rank."""
        return self._maps[rank][index * self._sizes[rank] + start :][:num_bytes]

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self.group.barrier().wait()


class _Written:
    """One round in shared memory. See `_Exchange` for the methods."""

    def __init__(self, channel: SharedMemoryChannel, current: Round, index: int) -> None:
        self.channel, self.current, self.index = channel, current, index
        self.starts = _starts(current)[0]
        self.written: set[Slot] = set()

    def put(self, transfer: Transfer, values: Tensor) -> None:
        if transfer.read not in self.written:
            self.written.add(transfer.read)
            copy_bytes(self._bytes(transfer), values)

    def send(self) -> None:
        """Do nothing: `receive` waits until all ranks have written."""

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        self.channel.barrier()
        own = self.channel.group.rank()
        for transfer in self.current.transfers:
            if transfer.target == own and not transfer.is_local:
                yield transfer, typed(self._bytes(transfer), self.channel.dtypes[transfer.weight])

    def _bytes(self, transfer: Transfer) -> Tensor:
        start = self.starts[transfer.source, transfer.read]
        return self.channel.view(transfer.source, self.index, start, transfer.num_bytes)


def _starts(current: Round) -> tuple[dict[tuple[int, Slot], int], dict[int, int]]:
    """Return where each box of a round is in the segment of its source, and the sizes of segments.

    All ranks compute the same.
    """
    starts: dict[tuple[int, Slot], int] = {}
    sizes: dict[int, int] = {}
    for transfer in current.transfers:
        key = (transfer.source, transfer.read)
        if not transfer.is_local and key not in starts:
            starts[key] = sizes.get(transfer.source, 0)
            end = starts[key] + transfer.num_bytes
            sizes[transfer.source] = -(-end // _ALIGNMENT) * _ALIGNMENT
    return starts, sizes


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


class Assembly:
    """Tensors that are put together from boxes. Elements that were sent twice are an error."""

    def __init__(self, device: torch.device) -> None:
        self.missing: dict[str, int] = {}
        """Name → elements that are not written yet, until the tensor is complete."""
        self._device = device
        self._made: dict[str, Tensor] = {}

    def write(
        self,
        name: str,
        box: Box,
        values: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        lasting: bool = False,
    ) -> Tensor | None:
        """Write a box of a tensor. Return the tensor if that completes it. Padding is zero.

        Args:
            lasting: the memory of the values is not used again, so those of a whole tensor are
                passed on without a copy if they have its dtype and device.

        Raises:
            WorkerError: elements were sent twice. Attributes: `tensor`, `tensors`.
        """
        left = self.missing.get(name, 0) - count(box)
        if left < 0:
            raise WorkerError(
                f"box {box} of weight {name!r} was sent twice", tensor=name, tensors=(name,)
            )
        self.missing[name] = left
        if lasting and name not in self._made and tuple(values.shape) == tuple(shape):
            self._made[name] = values.to(self._device, dtype)
        else:
            if name not in self._made:
                self._made[name] = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
            self._made[name][slices(box)] = values
        if left:
            return None
        del self.missing[name]
        return self._made.pop(name)


@dataclass
class Traffic:
    """What one rank did in one weight sync: bytes to and from other processes, and rounds."""

    sent: int = 0
    received: int = 0
    rounds: int = 0


@dataclass
class Transport:
    """One rank's part of one weight sync.

    Args:
        plan: the plan, the same on all ranks.
        rank: this rank.
        read: gives the rank's own weights; None: it only receives.
        channel: to the other ranks; None: the plan has no transfers between processes.
        dtypes: in which weights are sent and written.
        device: of the tensors that are made.
    """

    plan: Plan
    rank: int
    read: SourceReader | None
    channel: CollectiveChannel | SharedMemoryChannel | None
    dtypes: Dtypes
    device: torch.device
    traffic: Traffic = field(default_factory=Traffic)

    def run(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Execute the plan; yield (name, tensor) of each target tensor when it is complete.

        Raises:
            WorkerError: elements of a tensor were not received, or were received twice.
        """
        tensors = self.plan.target.ranks.get(self.rank, ())
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._assembly = Assembly(self.device)
        for tensor in tensors:
            elements = sum(count(piece.box) for piece in tensor.pieces)
            if elements:
                self._assembly.missing[tensor.name] = elements
            else:  # no transfer completes it
                dtype = self.dtypes.get(tensor.name, torch.get_default_dtype())
                yield tensor.name, torch.zeros(tensor.shape, dtype=dtype, device=self.device)
        before: _Exchange | _Written | None = None
        for current in self.plan.rounds(bucket_bytes):
            outgoing = None if self.channel is None else self.channel.open(current)
            yield from self._pack(current, outgoing)
            self.traffic.rounds += 1
            if outgoing is not None:
                outgoing.send()
            yield from self._receive(before)
            before = outgoing
        yield from self._receive(before)
        if self.read is not None:
            self.read.finish()
        if missing := list(self._assembly.missing):
            raise WorkerError(
                f"rank {self.rank} lacks elements of {listed_names(missing)} at the end of the "
                "weight sync",
                tensor=missing[0],
                tensors=tuple(missing),
            )

    def _pack(
        self, current: Round, outgoing: _Exchange | _Written | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Pack what this rank sends; yield what it completes with its own weights."""
        read = self.read
        for transfer in current.transfers if read is not None else ():
            assert read is not None
            # On every rank and in the order of the plan: reading can be a collective.
            read.advance(transfer.weight)
            if transfer.source == self.rank:
                values = read.tensor(transfer.read.tensor)[slices(transfer.read.box)]
                if transfer.is_local:
                    yield from self._write(transfer, values)
                else:
                    assert outgoing is not None, "a transfer between processes needs a channel"
                    outgoing.put(transfer, values.to(self.dtypes[transfer.weight]))
                    self.traffic.sent += transfer.num_bytes

    def _receive(self, sent: _Exchange | _Written | None) -> Iterator[tuple[str, Tensor]]:
        for transfer, flat in sent.receive() if sent is not None else ():
            self.traffic.received += transfer.num_bytes
            yield from self._write(transfer, flat.view(shape_of(transfer.box)))

    def _write(self, transfer: Transfer, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = transfer.write.tensor
        dtype = self.dtypes[transfer.weight]
        shape, box = self._shapes[name], transfer.write.box
        done = self._assembly.write(name, box, values, shape, dtype, lasting=transfer.is_local)
        if done is not None:
            yield name, done
