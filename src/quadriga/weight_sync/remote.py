"""Weights to a rollout in other processes: as batches, or over a process group.

As batches of bounded size (`WeightSender`, `WeightReceiver`):

consumes      the shards of the training engine (all its ranks take part)
produces      batches of one row; the controller passes them on by reference
checks        the digest of each weight of the training engine against what the rollout holds

Every rank of the trainer sends the part of each weight that it has, by a plan whose only target is
rank N, which stands for all ranks of the rollout: each of them reads every batch. So a receiver may
be lost meanwhile, which the others do not notice.

Example: 2 ranks have the rows 0 to 3 and 3 to 5 of weights a and b with 5 rows of 4 bytes. With a
bucket of 64 bytes, half of it is in flight while the other half is packed:

    round     rank 0           rank 1
    0         a rows 0 to 3    a rows 3 to 5     20 bytes
    1         b rows 0 to 3    b rows 3 to 5     20 bytes
    2         digests          digests           each rank's share

Over a process group that joins the ranks of both (`JoinedSender`, `JoinedReceiver`):

    controller     needs = rollout.weight_needs()
                   ticket = actor.offer_weights(needs)      rank 0 of the actor serves the store
                   actor.send_weights_over(ticket)          } side by side
                   rollout.receive_weights_over(ticket)     }

Rank r of the actor is rank r of the joined group; the rollout's ranks follow. The controller passes
on where the ranks meet and what is sent, but no weight.

waits for     all ranks of both groups
unblocked by  their part of each round, or the timeout of the group
"""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from quadriga.engines.base import TrainEngine
from quadriga.errors import CollectiveError, WorkerError
from quadriga.parallel.distributed import (
    Collectives,
    joined_group,
    local_device,
    rank,
    serve_store,
    world_size,
)
from quadriga.parallel.layouts import count, shape_of, whole
from quadriga.protocol import DataProto
from quadriga.rollout.base import RolloutEngine, UpdateForm, tensor_digest
from quadriga.rollout.guard import PROBE_ROWS, guarded, probe_ids
from quadriga.weight_sync import transport
from quadriga.weight_sync.plan import Plan, Round, Transfer, listed_names

TIMEOUT = timedelta(seconds=600)
_LOOPBACK = "127.0.0.1"
_BYTES = "weight_bytes"
_HEADER = "header"


@dataclass(frozen=True)
class _Header:
    """What a bucket is.

    Attributes:
        version: of the weights.
        index: number of the round.
        sender: rank of the trainer.
        transfers: the boxes in the bucket, in the order of their bytes.
        weights: all weights, in the first bucket of a rank.
        shares: weight → share of the sender in its digest, in the last bucket of a rank.
        scores: of the probe tokens of this version, also there, if the rollout exposes no weights.
    """

    version: int
    index: int
    sender: int
    transfers: tuple[Transfer, ...] = ()
    weights: transport.SourceWeights | None = None
    shares: Mapping[str, int] | None = None
    scores: Tensor | None = None

    def batch(self, data: Tensor) -> DataProto:
        return DataProto.from_dict(tensors={_BYTES: data[None]}, meta_info={_HEADER: self})


class WeightSender:
    """Sends the weights of a training engine in buckets. All ranks have one, and use it together.

    `bucket_bytes` is the memory for weights in flight.
    """

    def __init__(self, source: TrainEngine, bucket_bytes: int) -> None:
        self._source, self._bucket_bytes = transport.Source(source), bucket_bytes
        self._plan: Plan | None = None

    def send(self, needs: transport.WeightNeeds, version: int) -> Iterator[DataProto]:
        """Yield this rank's part of every round, then what the comparison needs.

        Every rank yields the same number of buckets, and must use up the iterator.

        Args:
            needs: of the rollout. The weights are rounded to its dtypes before they are sent.
            version: the version of these weights.
        """
        weights = self._source.weights(needs)
        self._plan = transport.plan_to({world_size(): {}}, weights, self._plan)
        told = transport.SourceWeights(replace(weights.layout, ranks={}), {})
        header = _Header(version, 0, rank(), weights=told)
        with self._source.reader(needs, weights) as reader:
            for current in self._plan.rounds(self._bucket_bytes):
                transfers, data = _packed(current, reader, weights)
                yield replace(header, transfers=transfers).batch(data)
                header = _Header(version, header.index + 1, rank())
            reader.finish()
        scores = transport.trained_scores(self._source.engine, needs.probe, version)
        last = replace(header, shares=reader.shares, scores=scores)
        yield last.batch(torch.zeros(0, dtype=torch.uint8))


def _packed(
    current: Round, reader: transport.SourceReader, weights: transport.SourceWeights
) -> tuple[tuple[Transfer, ...], Tensor]:
    """Return this rank's transfers of a round and their bytes, in host memory."""
    own = tuple(t for t in current.transfers if t.source == rank())
    data = torch.empty(sum(t.num_bytes for t in own), dtype=torch.uint8)
    start = 0
    for transfer, values in reader.parts(current):
        stop = start + transfer.num_bytes
        transport.copy_bytes(
            data[start:stop], values.to(weights.layout.weights[transfer.weight].dtype)
        )
        start = stop
    return own, data


class WeightReceiver:
    """Copies buckets into a rollout engine, then compares digests."""

    def __init__(self, target: RolloutEngine) -> None:
        self._target = guarded(target)
        self._version: int | None = None
        self._weights: transport.SourceWeights | None = None
        self._forget()

    def _forget(self) -> None:
        self._staged: dict[str, Tensor] = {}
        self._digests: dict[int, int] = {}  # address of a staged tensor → its digest
        self._index = 0
        self._assembly = transport.Assembly(torch.device("cpu"))
        self._last: list[_Header] = []

    def receive(self, parts: Sequence[DataProto], *, stage: bool = False) -> None:
        """Copy the weights of one round, to which every rank of the trainer gives a bucket.

        Args:
            stage: copy them to memory of their own, and leave the engine, which may generate
                meanwhile, as it is until `finish`.

        Raises:
            WorkerError: a bucket or an element was sent twice, or a bucket before was not sent.
        """
        headers: list[_Header] = [part.meta_info[_HEADER] for part in parts]
        if headers[0].version != self._version:
            # The first round of a sync. If an earlier sync failed, nothing of it counts.
            self._version = headers[0].version
            self._forget()
            self._target.moved.clear()
        if not stage:
            self._target.begin_sync(headers[0].version)
        for sender, header in enumerate(headers):
            self._check(header, sender)
        self._index += 1
        self._last = [header for header in headers if header.shares is not None]
        if headers[0].weights is not None:
            self._weights = headers[0].weights
            sizes = {n: count(whole(w.shape)) for n, w in self._weights.layout.weights.items()}
            self._assembly.missing = {name: size for name, size in sizes.items() if size}
        complete = [
            item
            for part, header in zip(parts, headers, strict=True)
            if header.transfers
            for item in self._written(header, part.batch[_BYTES][0])
        ]
        if stage:
            self._staged.update(complete)
            if self._target.engine.shares_weights:  # then these tensors are what it holds
                self._digests |= {t.data_ptr(): tensor_digest(t) for _, t in complete}
        elif complete:
            self._write(complete)

    def _write(self, tensors: Iterable[tuple[str, Tensor]], form: UpdateForm = "whole") -> None:
        assert self._weights is not None and self._version is not None
        self._target.update_weights(self._weights.with_tied(iter(tensors)), self._version, form)

    def finish(self) -> int:
        """Compare the digests of all weights, or the scores of probe tokens, and return the
        version. An engine that can uses staged tensors themselves as its weights.

        Raises:
            WorkerError: no bucket was received, a weight was not sent, or weights differ.
        """
        version, lacking, last = self._version, list(self._assembly.missing), self._last
        self._target.staged_digests = self._digests
        if self._staged and version is not None and not lacking:
            self._target.begin_sync(version)
            form: UpdateForm = "shared" if self._target.engine.shares_weights else "whole"
            self._write(self._staged.items(), form)
        self._version = None
        self._forget()
        if version is None or self._weights is None:
            raise WorkerError("finish_weights was called, but no bucket of weights was received")
        if lacking or not last:
            raise WorkerError(
                f"weight sync to version {version} ended before all buckets were received; "
                f"incomplete weights: {listed_names(lacking) or 'none'}",
                version=version,
                tensors=tuple(lacking),
            )
        shares = [header.shares or {} for header in last]
        sums = {name: sum(own[name] for own in shares) for name in shares[0]}
        self._target.end_sync(self._weights.digests(sums), last[0].scores)
        return version

    def _check(self, header: _Header, sender: int) -> None:
        expected = (self._version, self._index, sender)
        found = (header.version, header.index, header.sender)
        if found != expected:
            twice = header.index < self._index and header.version == self._version
            cause = "it was sent twice" if twice else "one is lost"
            raise WorkerError(
                f"weight sync to version {self._version}: expected bucket {self._index} of rank "
                f"{sender} of the trainer, received bucket {header.index} of rank {header.sender} "
                f"of version {header.version}: {cause}",
                version=self._version,
            )

    def _written(self, header: _Header, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Write the boxes of a bucket; yield the weights that they complete."""
        assert self._weights is not None
        start = 0
        self._target.moved["store"] += flat.nbytes
        for transfer in header.transfers:
            name, stop = transfer.weight, start + transfer.num_bytes
            weight = self._weights.layout.weights[name]
            values = transport.typed(flat[start:stop], weight.dtype).view(shape_of(transfer.box))
            done = self._assembly.write(name, transfer.box, values, weight.shape, weight.dtype)
            if done is not None:
                yield name, done
            start = stop


# Over a process group


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
    weights: transport.SourceWeights
    needs: transport.WeightNeeds
    bucket_bytes: int


class _Joined:
    """This rank's membership in the joined group. It is made at the first sync, and kept."""

    def __init__(self, device: str | torch.device) -> None:
        self._device = local_device(device)
        self._group: Collectives | None = None
        self._store: TCPStore | None = None
        self._key: object = None
        self._plan: Plan | None = None

    def _run(
        self, ticket: Ticket, own: int, read: transport.SourceReader | None
    ) -> transport.Transport:
        """Return this rank's part of a sync."""
        weights, key = ticket.weights, (ticket.address, ticket.port, own)
        if self._group is None or self._key != key:
            size = ticket.senders + ticket.receivers
            self._store, self._group = joined_group(
                self._device.type, self._store, ticket.address, ticket.port, own, size, TIMEOUT
            )
            self._key = key
        receivers = range(ticket.senders, ticket.senders + ticket.receivers)
        self._plan = transport.plan_to(
            {receiver: {} for receiver in receivers}, weights, self._plan
        )
        return transport.Transport(self._plan, own, read, self._group, self._device)

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
        self._source, self._bucket_bytes = transport.Source(source), bucket_bytes
        self._place: tuple[str, int] | None = None

    def offer(self, needs: list[transport.WeightNeeds], version: int) -> Ticket | None:
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
        shares = [transport.signed(share) for share in reader.shares.values()]
        self._all_reduce(torch.tensor(shares, device=self._device))
        scores = transport.trained_scores(self._source.engine, ticket.needs.probe, ticket.version)
        if scores is not None:
            self._all_reduce(scores.to(self._device) * float(rank() == 0))


class JoinedReceiver(_Joined):
    """The side of the rollout. All ranks have one, and use it together."""

    def __init__(self, target: RolloutEngine, *, device: str | torch.device) -> None:
        super().__init__(device)
        self._target = guarded(target)

    def receive(self, ticket: Ticket) -> int:
        """Receive all weights and compare them; return their version.

        Raises:
            WorkerError: weights were not received, or differ. Names them.
        """
        weights, version = ticket.weights, ticket.version
        self._target.begin_sync(version)
        self._target.moved.clear()
        joined = self._run(ticket, ticket.senders + rank(), None)
        joined.moved = self._target.moved
        stream = weights.with_tied(joined.run(ticket.bucket_bytes))
        self._target.update_weights(stream, version)
        for _ in stream:  # an engine need not read to the end
            pass
        zeros = torch.zeros(len(weights.layout.weights), dtype=torch.int64, device=self._device)
        sums = dict(zip(weights.layout.weights, self._all_reduce(zeros).tolist(), strict=True))
        scores = None
        if ticket.needs.probe is not None:
            columns = probe_ids(ticket.needs.probe, version).shape[1] - 1
            zeros = torch.zeros(PROBE_ROWS, columns, device=self._device)
            scores = self._all_reduce(zeros).cpu()
        self._target.end_sync(weights.digests(sums), scores)
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
