"""Weights from a training engine to a rollout engine in the same process.

consumes      the engine's stream of full tensors, one at a time (all ranks take part)
produces      the rollout's weights under a new version
checks        a digest of each tensor sent against the one held afterwards
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.parallel.digest import tensor_digest


class WeightSource(Protocol):
    """What gives weights: a `TrainEngine`."""

    def state_stream(self) -> Iterator[tuple[str, Tensor]]: ...


class WeightTarget(Protocol):
    """What takes them: a `RolloutEngine` of this process."""

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def weights_digest(self) -> dict[str, int]: ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]: ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync moved."""

    version: int
    tensors: int
    num_bytes: int


def sync_weights(source: WeightSource, target: WeightTarget, version: int) -> SyncReport:
    """Move every weight, then compare digests.

    A weight held in another dtype is rounded to it before the comparison. Raises `WorkerError`
    (attributes `tensor`, `version`) naming the first tensor that did not arrive, or arrived wrong.
    """
    dtypes = target.weight_dtypes()
    sent: dict[str, int] = {}
    total = 0

    def recorded() -> Iterator[tuple[str, Tensor]]:
        nonlocal total
        for name, tensor in source.state_stream():
            rounded = tensor.detach().to(dtypes.get(name, tensor.dtype))
            sent[name] = tensor_digest(rounded)
            total += rounded.numel() * rounded.element_size()
            yield name, rounded

    target.update_weights(recorded(), version)
    compare_digests(sent, target.weights_digest(), version)
    return SyncReport(version=version, tensors=len(sent), num_bytes=total)


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Raise `WorkerError` for the first weight that is held and was not sent, or differs."""
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
            f"weight sync to version {version}: {name!r} {problem}; stopping, because samples "
            "would come from other weights than the ones trained",
            tensor=name,
            version=version,
        )
