"""Weights as batches of bounded size, from trainer ranks to rollout ranks in other processes.

consumes      the training engine's stream of full tensors (all its ranks take part)
produces      batches of one row; the controller passes them on by reference
checks        the digest of each tensor that was sent against the tensor that the rollout holds

Example: a limit of 64 bytes and three float32 weights of 10, 4 and 20 elements. Each weight begins
at a multiple of 16 bytes. The third is larger than the limit and has a bucket of its own.

    bucket 0   a: bytes 0 to 40    b: bytes 48 to 64
    bucket 1   c: bytes 0 to 80
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto
from quadriga.rollout.base import tensor_digest
from quadriga.weight_sync.sync import WeightSource, WeightTarget, compare_digests

_BYTES = "weight_bytes"
_TABLE = "weights"
_VERSION = "version"
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Entry:
    """One weight of a bucket. `start` is its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    digest: int

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Bucket:
    """Collects weights until they exceed the limit. Without `keep`, only their sizes."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.size = 0
        self.entries: list[_Entry] = []
        self.parts: list[Tensor] = []

    def add(self, name: str, weight: Tensor) -> None:
        start = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        if self.keep:
            flat = weight.contiguous().flatten().view(torch.uint8).cpu()
            padding = torch.zeros(start - self.size, dtype=torch.uint8)
            self.parts += [padding, flat]
            shape, digest = tuple(weight.shape), tensor_digest(weight)
            self.entries.append(_Entry(name, weight.dtype, shape, start, digest))
        self.size = start + weight.numel() * weight.element_size()

    def as_batch(self, version: int) -> DataProto | None:
        if not self.keep:
            return None
        table = [(e.name, e.dtype, e.shape, e.start, e.digest) for e in self.entries]
        return DataProto.from_dict(
            tensors={_BYTES: torch.cat(self.parts)[None]},
            meta_info={_TABLE: table, _VERSION: version},
        )


def weight_buckets(
    source: WeightSource,
    dtypes: Mapping[str, torch.dtype],
    version: int,
    *,
    limit: int,
    keep: bool,
) -> Iterator[DataProto | None]:
    """Yield all weights of a training engine in buckets of at most `limit` bytes.

    A weight that is larger than `limit` has a bucket of its own. Every rank must use up the
    iterator, because every rank takes part in gathering the full tensors.

    Args:
        dtypes: the dtype in which the rollout holds each weight; it is rounded before it is sent.
        version: the version of these weights.
        keep: whether this rank sends. A rank that does not yields None for each bucket.
    """
    bucket = _Bucket(keep)
    for name, weight in source.state_stream():
        dtype = dtypes.get(name, weight.dtype)
        num_bytes = weight.numel() * dtype.itemsize
        if bucket.size and bucket.size + num_bytes > limit:
            yield bucket.as_batch(version)
            bucket = _Bucket(keep)
        bucket.add(name, weight.detach().to(dtype))
    if bucket.size:
        yield bucket.as_batch(version)


class WeightReceiver:
    """Copies buckets into a rollout engine, then compares digests.

    Args:
        target: the rollout engine.
    """

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._sent: dict[str, int] = {}
        self._version: int | None = None

    def receive(self, bucket: DataProto) -> None:
        """Copy the weights of one bucket.

        Raises:
            WorkerError: a weight was sent twice.
        """
        version = int(bucket.meta_info[_VERSION])
        if version != self._version:
            # The first bucket of a sync. If an earlier sync failed, nothing of it counts.
            self._version, self._sent = version, {}
        entries = [_Entry(*row) for row in bucket.meta_info[_TABLE]]
        for entry in entries:
            if entry.name in self._sent:
                raise WorkerError(
                    f"weight sync to version {version}: {entry.name!r} was sent twice",
                    tensor=entry.name,
                    version=version,
                )
            self._sent[entry.name] = entry.digest
        self._target.update_weights(_unpack(bucket.batch[_BYTES][0], entries), version)

    def finish(self) -> int:
        """Compare the digests of all weights and return their version.

        Raises:
            WorkerError: no bucket was received, a weight was not sent, or a weight differs.
        """
        version, sent = self._version, self._sent
        self._version, self._sent = None, {}
        if version is None:
            raise WorkerError("finish_weights was called, but no bucket of weights was received")
        compare_digests(sent, self._target.weights_digest(), version)
        return version


def _unpack(flat: Tensor, entries: Iterable[_Entry]) -> Iterator[tuple[str, Tensor]]:
    for entry in entries:
        part = flat[entry.start : entry.start + entry.num_bytes]
        yield entry.name, part.view(entry.dtype).view(entry.shape)
