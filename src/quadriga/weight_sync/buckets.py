"""Weights as batches of bounded size, from trainer ranks to rollout ranks in other processes.

consumes      the shards of the training engine (all its ranks take part)
produces      batches of one row; the controller passes them on by reference
checks        the digest of each weight of the training engine against what the rollout holds

Every rank of the trainer sends the part of each weight that it has, by a plan whose only target is
rank N, which stands for all ranks of the rollout: each of them reads every batch.

Example: 2 ranks have the rows 0 to 3 and 3 to 5 of weights a and b with 5 rows of 4 bytes. With a
bucket of 64 bytes, half of it is in flight while the other half is packed:

    round     rank 0           rank 1
    0         a rows 0 to 3    a rows 3 to 5     20 bytes
    1         b rows 0 to 3    b rows 3 to 5     20 bytes
    2         digests          digests           each rank's share
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.parallel.distributed import rank, world_size
from quadriga.parallel.layouts import Box, count, shape_of, slices, whole
from quadriga.protocol import DataProto
from quadriga.weight_sync.channels import copy_bytes, typed
from quadriga.weight_sync.digests import digest_of_shares
from quadriga.weight_sync.planning.plan import Plan, Round, listed_names, plan
from quadriga.weight_sync.sources import (
    ShardedSource,
    SourceReader,
    SourceWeights,
    WeightSource,
    describe,
    own_weights,
)
from quadriga.weight_sync.sync import WeightNeeds, scores_of, whole_on
from quadriga.weight_sync.verification import VerifiedTarget, WeightTarget

_BYTES = "weight_bytes"
_HEADER = "header"


@dataclass(frozen=True)
class _Box:
    """One box of a weight in a bucket.

    `names`: the checkpoint name, and those that are tied to it. `start`: its first byte.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    start: int

    @property
    def weight(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class _Verification:
    """What one rank of the trainer tells for the comparison.

    Attributes:
        shares: name → (share of this rank in its digest, elements of the weight).
        scores: of the probe tokens of this version, if the rollout exposes no weights.
    """

    shares: Mapping[str, tuple[int, int]]
    scores: Tensor | None


@dataclass(frozen=True)
class _Header:
    """What a bucket is.

    Attributes:
        version: of the weights.
        index: number of the round.
        sender: rank of the trainer.
        boxes: in the order of their bytes.
        verification: in the last bucket of a rank.
    """

    version: int
    index: int
    sender: int
    boxes: tuple[_Box, ...] = ()
    verification: _Verification | None = None

    def batch(self, data: Tensor) -> DataProto:
        return DataProto.from_dict(tensors={_BYTES: data[None]}, meta_info={_HEADER: self})


class WeightSender:
    """Sends the weights of a training engine in buckets. All ranks have one, and use it together.

    Args:
        source: the training engine.
        bucket_bytes: the memory for weights in flight.
    """

    def __init__(self, source: WeightSource | ShardedSource, bucket_bytes: int) -> None:
        self._source, self._bucket_bytes = source, bucket_bytes
        self._described: SourceWeights | None = None
        self._plan: Plan | None = None

    def send(self, needs: WeightNeeds, version: int) -> Iterator[DataProto]:
        """Yield this rank's part of every round, then what the comparison needs.

        Every rank yields the same number of buckets, and must use up the iterator.

        Args:
            needs: of the rollout. The weights are rounded to its dtypes before they are sent.
            version: the version of these weights.
        """
        self._described = self._described or describe(self._source)
        weights = self._described.sent_as(needs.dtypes)
        if self._plan is None or self._plan.source.weights != weights.layout.weights:
            self._plan = plan(weights.layout, whole_on(weights, [world_size()]))
        index = 0
        with closing(own_weights(self._source)) as stream:
            reader = SourceReader(stream, weights, rank())
            for current in self._plan.rounds(self._bucket_bytes):
                boxes, data = _packed(current, reader, weights)
                yield _Header(version, index, rank(), boxes).batch(data)
                index += 1
            reader.finish()
        sizes = {n: count(whole(w.shape)) for n, w in weights.layout.weights.items()}
        shares = {name: (reader.shares[w], sizes[w]) for name, w in weights.names()}
        scores = None if needs.probe is None else scores_of(self._source, needs.probe, version)
        last = _Header(version, index, rank(), verification=_Verification(shares, scores))
        yield last.batch(torch.zeros(0, dtype=torch.uint8))


def _packed(
    current: Round, reader: SourceReader, weights: SourceWeights
) -> tuple[tuple[_Box, ...], Tensor]:
    """Return this rank's boxes of a round and their bytes, in host memory."""
    own = [t for t in current.transfers if t.source == rank()]
    data = torch.empty(sum(t.num_bytes for t in own), dtype=torch.uint8)
    boxes = []
    start = 0
    for transfer in current.transfers:
        reader.advance(transfer.weight)  # on every rank, because it can be a collective
        if transfer.source == rank():
            name = transfer.weight
            dtype, shape = weights.dtypes[name], weights.layout.weights[name].shape
            values = reader.tensor(transfer.read.tensor)[slices(transfer.read.box)]
            copy_bytes(data[start : start + transfer.num_bytes], values.to(dtype))
            names = (name, *weights.tied_to(name))
            boxes.append(_Box(names, shape, dtype, transfer.box, start))
            start += transfer.num_bytes
    return tuple(boxes), data


class WeightReceiver:
    """Copies buckets into a rollout engine, then compares digests.

    Args:
        target: the rollout engine.
    """

    def __init__(self, target: WeightTarget) -> None:
        self._verified = VerifiedTarget(target)
        self._version: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._index = 0
        self._made: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._told: list[_Verification] = []

    def receive(self, parts: Sequence[DataProto]) -> None:
        """Copy the weights of one round, to which every rank of the trainer gives a bucket.

        Raises:
            WorkerError: a bucket or an element was sent twice, or a bucket before was not sent.
        """
        headers = [_header(part) for part in parts]
        if headers[0].version != self._version:
            # The first round of a sync. If an earlier sync failed, nothing of it counts.
            self._version = headers[0].version
            self._forget()
        self._verified.begin(headers[0].version)
        for sender, header in enumerate(headers):
            self._check(header, sender)
        self._index += 1
        self._told = [h.verification for h in headers if h.verification is not None]
        complete = [
            box
            for part, header in zip(parts, headers, strict=True)
            if header.boxes
            for box in self._written(header, part.batch[_BYTES][0])
        ]
        if complete:
            made = [(box.names, self._made.pop(box.weight)) for box in complete]
            stream = ((name, tensor) for names, tensor in made for name in names)
            self._verified.update_weights(stream, headers[0].version)

    def finish(self) -> int:
        """Compare the digests of all weights, or the scores of probe tokens, and return the
        version.

        Raises:
            WorkerError: no bucket was received, a weight was not sent, or weights differ.
        """
        version, missing, told = self._version, self._missing, self._told
        self._version = None
        self._forget()
        if version is None:
            raise WorkerError("finish_weights was called, but no bucket of weights was received")
        lacking = [name for name, left in missing.items() if left]
        if lacking or not told:
            raise WorkerError(
                f"weight sync to version {version} ended before all buckets were received; "
                f"incomplete weights: {listed_names(lacking) or 'none'}",
                version=version,
                tensors=tuple(lacking),
            )
        sent = {
            name: digest_of_shares([one.shares[name][0] for one in told], elements)
            for name, (_, elements) in told[0].shares.items()
        }
        self._verified.compare(sent, told[0].scores, version)
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

    def _written(self, header: _Header, flat: Tensor) -> Iterator[_Box]:
        """Write the boxes of a bucket; yield those that complete a weight."""
        for part in header.boxes:
            if part.weight not in self._missing:
                self._made[part.weight] = torch.empty(part.shape, dtype=part.dtype)
                self._missing[part.weight] = count(whole(part.shape))
            self._missing[part.weight] -= count(part.box)
            if self._missing[part.weight] < 0:
                raise WorkerError(
                    f"weight sync to version {self._version}: box {part.box} of {part.weight!r} "
                    "was sent twice",
                    tensor=part.weight,
                    tensors=(part.weight,),
                    version=self._version,
                )
            stop = part.start + count(part.box) * part.dtype.itemsize
            values = typed(flat[part.start : stop], part.dtype)
            self._made[part.weight][slices(part.box)] = values.view(shape_of(part.box))
            if not self._missing[part.weight]:
                yield part


def _header(part: DataProto) -> _Header:
    header = part.meta_info[_HEADER]
    assert isinstance(header, _Header)
    return header
