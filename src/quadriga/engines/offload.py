"""Move the storages of tensors to host memory and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

StateT = TypeVar("StateT", bound=str)


@dataclass(frozen=True)
class _HostCopy:
    storage: torch.UntypedStorage
    host: Tensor | None
    size: int


class OffloadedTensors:
    """Tensors whose device memory is free until `reload`.

    The storages are emptied in place. Several objects refer to the storage of one parameter (the
    module, FSDP's flat shard, the optimizer's view), and moving only one of them would leave the
    memory allocated for the others:

        module      ─┐
        FSDP shard  ─┼─► storage of 4 GB  ── offload ──►  storage of 0 bytes, and 4 GB on the host
        optimizer   ─┘

    After `reload` all of them refer to the same storage as before, with the same values.

    Args:
        freed: whether the values are not needed again. They are zeros after `reload`.
    """

    def __init__(self, tensors: Iterable[Tensor], *, freed: bool = False) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Memory that numpy or a mapped file shares belongs to the CPU and cannot be emptied.
            if storage.nbytes() and storage.resizable():
                storages.setdefault(storage.data_ptr(), storage)
        self._copies = [
            _HostCopy(s, None if freed else _to_host(s), s.nbytes()) for s in storages.values()
        ]
        self.num_bytes = sum(copy.size for copy in self._copies)
        for copy in self._copies:
            copy.storage.resize_(0)

    def reload(self) -> None:
        """Allocate the storages again and copy the values back."""
        for copy in self._copies:
            copy.storage.resize_(copy.size)
            if copy.host is None:
                _bytes_of(copy.storage).zero_()
            else:
                _bytes_of(copy.storage).copy_(copy.host, non_blocking=True)
        self._copies = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of the whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    # Pinned memory makes the copies fast. They are in the order of the device's stream, so a
    # storage may be emptied, or its host copy dropped, before the copy has run.
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
    return host.copy_(_bytes_of(storage), non_blocking=True)


class DeviceMemory(Generic[StateT]):
    """Which states of an engine are on the host.

    Args:
        device: the device of the engine. From a CPU nothing is offloaded.
        tensors: returns the tensors of a state that exist.
        freed: states whose values are not needed again. They are zeros after `reload`.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Callable[[StateT], Iterable[Tensor]],
        *,
        freed: Collection[StateT] = (),
    ) -> None:
        self.enabled = device.type != "cpu"
        self.offloaded: dict[StateT, OffloadedTensors] = {}
        self._device = device
        self._tensors = tensors
        self._freed = freed

    def offload(self, *states: StateT) -> None:
        """Move those of the states to the host that are on the device."""
        for state in states:
            if self.enabled and state not in self.offloaded:
                self.offloaded[state] = OffloadedTensors(
                    self._tensors(state), freed=state in self._freed
                )

    def reload(self, *states: StateT) -> list[StateT]:
        """Move those of the states to the device that are on the host, and return them."""
        on_host = [state for state in states if state in self.offloaded]
        for state in on_host:
            self.offloaded.pop(state).reload()
        return on_host

    def return_freed(self) -> None:
        """Return the freed memory to the driver.

        The allocator of torch keeps it otherwise, and only this process's tensors can use it.
        """
        if self._device.type != "cpu":
            getattr(torch, self._device.type).empty_cache()
