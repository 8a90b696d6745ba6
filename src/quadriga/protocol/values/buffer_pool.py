"""Host memory for large tensors, used again once nobody looks at it any more.

Fresh memory costs a fault a page, which takes several times as long as filling it does. What a step
receives is let go before the next step receives the same sizes again, so a little memory that is
kept saves most faults.
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

LENT_BYTES = 2**20
"""Tensors from here on get lent memory; smaller ones torch's own."""
KEPT_BYTES = 256 * 2**20
"""A process keeps at most so much that nobody uses."""
_STEP = 2**20  # sizes are rounded up to this, so that nearly equal tensors share


class _Lease(np.ndarray):
    """Memory on loan. Every array or tensor over it holds it; the last one's end ends the loan."""

    _of: tuple[Pool, mmap.mmap] | None = None

    def __del__(self) -> None:
        if self._of is not None:  # the loan itself, not a view of it
            pool, memory = self._of
            pool.take_back(memory)


class Pool:
    """Lends memory and takes it back, from any thread and from inside a collection of garbage."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._limit = kept_bytes
        self._free: OrderedDict[int, list[mmap.mmap]] = OrderedDict()
        self._lock = threading.RLock()  # a loan may end while this very thread holds it
        self.kept_bytes = 0

    def lend(self, nbytes: int) -> np.ndarray:
        """At least `nbytes` of uint8, uninitialised and aligned to a page."""
        size = -(-nbytes // _STEP) * _STEP
        with self._lock:
            waiting = self._free.get(size)
            memory = waiting.pop() if waiting else None
            if memory is not None:
                self.kept_bytes -= size
                self._free.move_to_end(size)
        if memory is None:
            memory = _fresh(size)
        # Over a map and not over an array: numpy would let a view hold that and skip the lease.
        lease = np.ndarray.__new__(_Lease, (size,), np.uint8, memory)
        lease._of = self, memory
        return lease.view(np.ndarray)

    def take_back(self, memory: mmap.mmap) -> None:
        """Keep it for the next loan; beyond the limit the sizes longest not asked for go."""
        with self._lock:
            self._free.setdefault(len(memory), []).append(memory)
            self.kept_bytes += len(memory)
            while self.kept_bytes > self._limit:
                size, waiting = next(iter(self._free.items()))
                if waiting:
                    waiting.pop()
                    self.kept_bytes -= size
                if not waiting:
                    del self._free[size]


def _fresh(size: int) -> mmap.mmap:
    """Memory of the kernel's, in huge pages where it has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_pool = Pool()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor; a large one in memory that was used before, if any waits."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LENT_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.from_numpy(_pool.lend(nbytes)[:nbytes])
    return flat.view(dtype).view(tuple(shape))


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense CPU tensor without gradient: one whose result may be written into such memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and type(tensor) is torch.Tensor
    )
