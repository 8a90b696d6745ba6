"""Execute a plan on one rank: copy what it has, send what others need, receive what it lacks.

consumes      the rank's tensors, in the order of the plan, and a channel to the other ranks
produces      the rank's target tensors, each as soon as it is complete
waits for     the other ranks of the channel, which must execute the same plan
memory        two rounds of the plan, at most `bucket_bytes`; without storage of the target, also
              the tensors that are not complete, which are those of two rounds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.parallel.layouts import count, shape_of, slices
from quadriga.weight_sync.channels import Channel, Dtypes, Posted
from quadriga.weight_sync.planning.plan import Plan, Transfer, listed_names


class Reader(Protocol):
    """Gives the tensors of one rank."""

    def advance(self, weight: str) -> None:
        """Go to a weight. Every rank goes to every weight, in the order of the plan."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of this rank that stores elements of that weight."""
        ...

    def finish(self) -> None:
        """Go to the end."""
        ...


@dataclass(frozen=True)
class TensorsInMemory:
    """A reader of tensors that are all there."""

    tensors: Mapping[str, Tensor]

    def advance(self, weight: str) -> None:
        """Do nothing."""

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def finish(self) -> None:
        """Do nothing."""


@dataclass
class Traffic:
    """What one rank did in one weight sync.

    Attributes:
        sent, received: bytes to and from other processes.
        copied: bytes that were copied in this process.
        in_place: bytes that were already where they belong.
        rounds: number of rounds.
    """

    sent: int = 0
    received: int = 0
    copied: int = 0
    in_place: int = 0
    rounds: int = 0


@dataclass
class Transport:
    """One rank's part of one weight sync.

    Args:
        plan: the plan, the same on all ranks.
        rank: this rank.
        read: gives the rank's own tensors.
        channel: to the other ranks.
        dtypes: weight → the dtype in which it is sent and written.
        device: of the tensors that are made.
        storage: name → tensor of the target, which is written in place. Tensors that are not in it
            are made.
    """

    plan: Plan
    rank: int
    read: Reader
    channel: Channel
    dtypes: Dtypes
    device: torch.device
    storage: Mapping[str, Tensor] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        tensors = self.plan.target.ranks.get(self.rank, ())
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._missing = {t.name: sum(count(piece.box) for piece in t.pieces) for t in tensors}
        self._made: dict[str, Tensor] = {}

    def run(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Execute the plan; yield (name, tensor) of each target tensor when it is complete.

        Raises:
            WorkerError: elements of a tensor were not received, or were received twice.
        """
        yield from self._without_elements()
        before: Posted | None = None
        for current in self.plan.rounds(bucket_bytes):
            outgoing = self.channel.open(current)
            for transfer in current.transfers:
                # On every rank and in the order of the plan: reading can be a collective.
                self.read.advance(transfer.weight)
                if transfer.source == self.rank:
                    if transfer.is_local:
                        yield from self._write(transfer, self._own(transfer))
                    else:
                        outgoing.put(transfer, self._own(transfer).to(self._dtype(transfer)))
                        self.traffic.sent += transfer.num_bytes
            sent = outgoing.send()
            self.traffic.rounds += 1
            if before is not None:
                yield from self._receive(before)
            before = sent
        if before is not None:
            yield from self._receive(before)
        self.read.finish()
        if self._missing:
            raise WorkerError(
                f"rank {self.rank} lacks elements of {listed_names(list(self._missing))} at the "
                "end of the weight sync",
                tensor=next(iter(self._missing)),
                tensors=tuple(self._missing),
            )

    def _without_elements(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that no transfer completes, because they have no elements."""
        for name in [name for name, left in self._missing.items() if not left]:
            del self._missing[name]
            dtype = self.dtypes.get(name, torch.get_default_dtype())
            made = torch.zeros(self._shapes[name], dtype=dtype, device=self.device)
            yield name, self.storage.get(name, made)

    def _own(self, transfer: Transfer) -> Tensor:
        tensor = self.read.tensor(transfer.read.tensor)
        return tensor[slices(transfer.read.box)]

    def _receive(self, sent: Posted) -> Iterator[tuple[str, Tensor]]:
        for transfer, flat in sent.receive():
            self.traffic.received += transfer.num_bytes
            yield from self._write(transfer, flat.view(shape_of(transfer.box)))

    def _write(self, transfer: Transfer, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Write the box of a transfer. Yield its tensor if that completes it."""
        name = transfer.write.tensor
        self._count(transfer)
        given = self.storage.get(name)
        if given is None and name not in self._made and self._covers(transfer):
            # The whole tensor is in one place here: it is passed on without a copy.
            self._made[name] = values.to(self.device, self._dtype(transfer))
            self.traffic.in_place += transfer.num_bytes if transfer.is_local else 0
        else:
            whole = given if given is not None else self._tensor(name, transfer)
            target = whole[slices(transfer.write.box)]
            if same_memory(target, values):
                self.traffic.in_place += transfer.num_bytes
            else:
                target.copy_(values)
                self.traffic.copied += transfer.num_bytes if transfer.is_local else 0
        if not self._missing[name]:
            del self._missing[name]
            yield name, self._made.pop(name) if given is None else given

    def _count(self, transfer: Transfer) -> None:
        name = transfer.write.tensor
        left = self._missing.get(name, 0) - count(transfer.box)
        if left < 0:
            raise WorkerError(
                f"box {transfer.box} of weight {transfer.weight!r} was sent twice to rank "
                f"{self.rank}",
                tensor=transfer.weight,
                tensors=(transfer.weight,),
            )
        self._missing[name] = left

    def _covers(self, transfer: Transfer) -> bool:
        return transfer.is_local and shape_of(transfer.box) == self._shapes[transfer.write.tensor]

    def _tensor(self, name: str, transfer: Transfer) -> Tensor:
        """Return the tensor that is being put together. Padding is zero."""
        if name not in self._made:
            self._made[name] = torch.zeros(
                self._shapes[name], dtype=self._dtype(transfer), device=self.device
            )
        return self._made[name]

    def _dtype(self, transfer: Transfer) -> torch.dtype:
        return self.dtypes[transfer.weight]


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same storage."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )
