"""Weights from an actor to a rollout in other processes, over a process group that joins both.

    controller     needs = rollout.weight_needs()
                   ticket = actor.offer_weights(needs)      rank 0 of the actor serves the store
                   actor.send_weights_over(ticket)          } side by side
                   rollout.receive_weights_over(ticket)     }

Rank r of the actor is rank r of the joined group; the rollout's ranks follow. The controller passes
on where the ranks meet and what is sent, but no weight.

waits for     all ranks of both groups
unblocked by  their part of each round, or the timeout of the group
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from quadriga.engines.base import TrainEngine
from quadriga.errors import CollectiveError
from quadriga.parallel.distributed import (
    Collectives,
    joined_group,
    local_device,
    rank,
    serve_store,
    world_size,
)
from quadriga.rollout.base import RolloutEngine
from quadriga.weight_sync.plan import Plan, plan
from quadriga.weight_sync.sync import (
    PROBE_ROWS,
    Source,
    VerifiedTarget,
    WeightNeeds,
    probe_ids,
    trained_scores,
    whole_on,
)
from quadriga.weight_sync.transport import (
    CollectiveChannel,
    SourceReader,
    SourceWeights,
    Traffic,
    Transport,
    signed,
)

TIMEOUT = timedelta(seconds=600)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ticket:
    """One weight sync over a joined group.

    Attributes:
        version: of the weights.
        address, port: of the store at which the ranks of both groups meet.
        senders, receivers: number of ranks of the actor and of the rollout.
        weights: what is sent, and in which dtypes.
        needs: of the rollout.
        bucket_bytes: the memory of a rank for weights in flight.
    """

    version: int
    address: str
    port: int
    senders: int
    receivers: int
    weights: SourceWeights
    needs: WeightNeeds
    bucket_bytes: int


class _Joined:
    """This rank's membership in the joined group. It is made at the first sync, and kept."""

    def __init__(self, device: str | torch.device) -> None:
        self._device = local_device(device)
        self._group: Collectives | None = None
        self._store: TCPStore | None = None
        self._key: object = None
        self._plan: Plan | None = None
        self.traffic = Traffic()
        """What this rank did in the last sync."""

    def _run(self, ticket: Ticket, own: int, read: SourceReader | None) -> Transport:
        """Return this rank's part of a sync."""
        group, weights = self._joined(ticket, own), ticket.weights
        if self._plan is None or self._plan.source.weights != weights.layout.weights:
            receivers = range(ticket.senders, ticket.senders + ticket.receivers)
            self._plan = plan(weights.layout, whole_on(weights, receivers))
        rounds = self._plan.rounds(ticket.bucket_bytes)
        channel = CollectiveChannel(group, self._device, rounds, weights.dtypes)
        transport = Transport(self._plan, own, read, channel, weights.dtypes, self._device)
        self.traffic = transport.traffic
        return transport

    def _joined(self, ticket: Ticket, own: int) -> Collectives:
        key = (ticket.address, ticket.port, own)
        if self._group is None or self._key != key:
            size = ticket.senders + ticket.receivers
            self._store, self._group = joined_group(
                self._device.type, self._store, ticket.address, ticket.port, own, size, TIMEOUT
            )
            self._key = key
        return self._group

    def _all_reduce(self, values: Tensor) -> Tensor:
        assert self._group is not None
        self._group.allreduce([values]).wait()
        return values


class JoinedSender(_Joined):
    """The side of the actor. All ranks have one, and use it together."""

    def __init__(
        self, source: TrainEngine, *, bucket_bytes: int, device: str | torch.device
    ) -> None:
        super().__init__(device)
        self._source, self._bucket_bytes = Source(source), bucket_bytes
        self._place: tuple[str, int] | None = None

    def offer(self, needs: list[WeightNeeds], version: int) -> Ticket | None:
        """Return the ticket of a sync to ranks with these needs, on rank 0; None on the others."""
        weights = self._source.weights(needs[0])
        if rank():
            return None
        if self._place is None:
            nodes = {*weights.nodes.values(), *(need.node for need in needs)}
            self._store, self._place = served_store(nodes, world_size() + len(needs))
        address, port = self._place
        return Ticket(
            version, address, port, world_size(), len(needs), weights, needs[0], self._bucket_bytes
        )

    def send(self, ticket: Ticket) -> None:
        """Send this rank's part of the weights, then its shares of the digests."""
        with self._source.reader(ticket.needs, ticket.weights) as reader:
            for _ in self._run(ticket, rank(), reader).run(ticket.bucket_bytes):
                pass  # a sender receives nothing, but must take part in every round
        shares = [signed(share) for share in reader.shares.values()]
        self._all_reduce(torch.tensor(shares, device=self._device))
        scores = trained_scores(self._source.engine, ticket.needs.probe, ticket.version)
        if scores is not None:
            self._all_reduce(scores.to(self._device) * float(rank() == 0))


class JoinedReceiver(_Joined):
    """The side of the rollout. All ranks have one, and use it together."""

    def __init__(self, target: RolloutEngine, *, device: str | torch.device) -> None:
        super().__init__(device)
        self._verified = VerifiedTarget(target)

    def receive(self, ticket: Ticket) -> int:
        """Receive all weights and compare them; return their version.

        Raises:
            WorkerError: weights were not received, or differ. Names them.
        """
        weights, version = ticket.weights, ticket.version
        self._verified.begin(version)
        transport = self._run(ticket, ticket.senders + rank(), None)
        stream = weights.with_tied(transport.run(ticket.bucket_bytes))
        self._verified.update(stream, version)
        for _ in stream:  # an engine need not read to the end
            pass
        zeros = torch.zeros(len(weights.layout.weights), dtype=torch.int64, device=self._device)
        sums = dict(zip(weights.layout.weights, self._all_reduce(zeros).tolist(), strict=True))
        scores = None
        if ticket.needs.probe is not None:
            columns = probe_ids(ticket.needs.probe, version).shape[1] - 1
            zeros = torch.zeros(PROBE_ROWS, columns, device=self._device)
            scores = self._all_reduce(zeros).cpu()
        self._verified.compare(weights.digests(sums), scores, version)
        return version


def served_store(nodes: set[str], size: int) -> tuple[TCPStore, tuple[str, int]]:
    """Serve a store at which `size` ranks on these nodes meet; return it, and its address.

    On one node it listens on loopback. Rank 0 of the actor calls this.

    Raises:
        CollectiveError: the ranks are on several nodes, and MASTER_ADDR is not set.
    """
    address = _LOOPBACK if len(nodes) == 1 else os.environ.get("MASTER_ADDR", "")
    if not address:
        raise CollectiveError(
            f"MASTER_ADDR is not set, so the ranks on the nodes {sorted(nodes)} cannot meet on "
            f"{socket.gethostname()}; a worker group sets it, other launchers must set it too"
        )
    store, port = serve_store(address, size, TIMEOUT, several_nodes=len(nodes) > 1)
    return store, (address, port)
