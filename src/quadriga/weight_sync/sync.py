"""Weights from a training engine to a rollout engine in the same process.

consumes      the training engine's stream of full tensors, one at a time (all ranks take part)
produces      the rollout engine's weights under a new version
checks        the digest of each tensor that was sent against the tensor that the rollout holds
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.rollout.base import tensor_digest


class WeightSource(Protocol):
    """The part of a `TrainEngine` that sends weights."""

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) of every weight."""
        ...


class WeightTarget(Protocol):
    """The part of a `RolloutEngine` that receives weights."""

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights, one tensor at a time."""
        ...

    def weights_digest(self) -> dict[str, int]:
        """Return the digest of every weight, by checkpoint name."""
        ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype of every weight, by checkpoint name."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """Version, number of tensors and number of bytes of one sync."""

    version: int
    tensors: int
    num_bytes: int


def sync_weights(source: WeightSource, target: WeightTarget, version: int) -> SyncReport:
    """Copy every weight from `source` to `target`, then compare digests.

    If the target holds a weight in another dtype, the weight is rounded to that dtype before its
    digest is taken.

    Raises:
        WorkerError: a weight was not received, or has other values. Names the first such tensor.
            Attributes: `tensor`, `version`.
    """
    dtypes = target.weight_dtypes()
    sent: dict[str, int] = {}
    total = 0

    def recorded() -> Iterator[tuple[str, Tensor]]:
        nonlocal total
        for name, tensor in source.state_stream():
            # A float32 0.1 arrives in a bfloat16 rollout as 0.10009765625. Both sides must take the
            # digest of that number, so the weight is rounded before it is sent. Full tensors exist
            # one at a time: the generator yields one, the target copies it, then it is freed.
            rounded = tensor.detach().to(dtypes.get(name, tensor.dtype))
            sent[name] = tensor_digest(rounded)
            total += rounded.numel() * rounded.element_size()
            yield name, rounded

    target.update_weights(recorded(), version)
    compare_digests(sent, target.weights_digest(), version)
    return SyncReport(version=version, tensors=len(sent), num_bytes=total)


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Raise `WorkerError` for the first weight that was not sent, is not held, or differs."""
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held: b is reported
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            problem = "was never sent, so the rollout still holds an old value"
        elif name not in held:
            problem = "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            problem = "differs between trainer and rollout"
        else:
            continue
        raise WorkerError(
            f"weight sync to version {version}: {name!r} {problem}. The run stops, because its "
            "samples would come from other weights than those that are trained",
            tensor=name,
            version=version,
        )
