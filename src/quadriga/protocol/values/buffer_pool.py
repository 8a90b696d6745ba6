"""Host memory for large tensors, used again after the last reference to it is dropped.

The first write into a fresh page costs a page fault, and the faults take several times as long as
filling the memory. The fields of one step are released before the next step receives fields of the
same sizes, so a little memory that is kept avoids most faults.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

POOLED_BYTES = 2**20
"""Tensors of at least this size use memory of the pool; smaller ones are allocated by torch."""
KEPT_BYTES = 256 * 2**20
"""A process keeps at most this much unused memory."""
_STEP = 2**20  # sizes are rounded up to a multiple of this, so that similar tensors share buffers

Bytes = NDArray[np.uint8]


class _Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A buffer of the pool. Arrays and tensors over it reference it; the last one releases it."""

    _of: tuple[Pool, mmap.mmap] | None = None

    def __del__(self) -> None:
        if self._of is not None:  # set on the buffer itself, not on its views
            pool, memory = self._of
            pool.release(memory)


class Pool:
    """Buffers that are acquired and released, from any thread and during garbage collection."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._limit = kept_bytes
        self._free: OrderedDict[int, list[mmap.mmap]] = OrderedDict()
        # Reentrant: garbage collection may run `release` in a thread that already holds the lock.
        self._lock = threading.RLock()
        self.kept_bytes = 0

    def acquire(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of uninitialised uint8, aligned to a page."""
        size = -(-nbytes // _STEP) * _STEP  # rounded up: 1 byte more than 2 MiB needs 3 MiB
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            if memory is not None:
                self.kept_bytes -= size
                self._free.move_to_end(size)
        if memory is None:
            memory = _map(size)
        # The buffer is made over an mmap: over an array, numpy would let views reference that
        # array directly, and the buffer would be released while they are still in use.
        buffer = np.ndarray.__new__(_Buffer, (size,), np.uint8, memory)
        buffer._of = self, memory
        return buffer.view(np.ndarray)

    def release(self, memory: mmap.mmap) -> None:
        """Keep memory for later use. Above the limit, drop the sizes least recently acquired."""
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)
            self.kept_bytes += len(memory)
            while self.kept_bytes > self._limit:
                size, free = next(iter(self._free.items()))
                if free:
                    free.pop()
                    self.kept_bytes -= size
                if not free:
                    del self._free[size]


def _map(size: int) -> mmap.mmap:
    """Return new anonymous memory, in huge pages where the kernel supports them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_pool = Pool()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor; a large one uses a buffer of the pool."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < POOLED_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    flat = torch.from_numpy(_pool.acquire(nbytes)[:nbytes])
    return flat.view(dtype).view(tuple(shape))


def is_poolable(tensor: torch.Tensor) -> bool:
    """Return whether results computed from a tensor may use the pool: dense, CPU, no gradient."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and type(tensor) is torch.Tensor
    )
