"""What keeps the states of ranks in the memory of another process, so that they survive a rank.

    rank     begin ─────────────────► keeper: anonymous memory (memfd)
             bytes ─► /proc/PID/fd/N  if the keeper is on this machine
             bytes, in calls ───────► else
             end ───────────────────► complete

A keeper has memory for two entries of a key, and uses it again. So on one machine an entry costs
one copy of its bytes, and after the first two no new memory.
"""

import io
import os
import uuid
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from quadriga.errors import LostObjectError

Bytes = npt.NDArray[np.uint8]
PART_BYTES = 64 << 20
"""Most bytes that are sent to a keeper at once, or read from it."""


class Keeper(Protocol):
    """Keeps entries, by a key and a step. A handle of it can be sent to ranks.

    Every method but `steps` raises `LostObjectError` if the process of the keeper has ended.
    """

    def begin(self, key: str, step: int) -> tuple[str, str]:
        """Begin an entry. Its memory is that of an entry which is not complete or has no earlier
        step, else that of the older one of two.

        Returns:
            The path of the memory, and where the path leads to on the machine of the keeper.
        """

    def write(self, key: str, data: Bytes) -> None:
        """Append bytes to the entry that was begun last."""

    def end(self, key: str) -> None:
        """Note that the entry that was begun last is complete."""

    def steps(self, key: str) -> list[int]:
        """Return the steps of the complete entries of a key; none if the keeper has ended."""

    def read(self, key: str, step: int, start: int, size: int) -> bytes:
        """Return bytes of a complete entry."""


class _Memory:
    step, complete = 0, False

    def __init__(self) -> None:
        self.number = os.memfd_create(f"quadriga-{uuid.uuid4().hex}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


class KeptValues(Keeper):
    """The entries of a keeper, in its process. On the local backend, a keeper by itself."""

    def __init__(self) -> None:
        self._kept: dict[str, list[_Memory]] = {}  # in the order of steps

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # what a rank of this process is sent is the keeper itself

    def begin(self, key: str, step: int) -> tuple[str, str]:
        """See `Keeper`."""
        kept = self._kept.get(key, [])
        free = [m for m in kept if not m.complete or m.step >= step] or kept[:-1]
        memory = free[0] if free else _Memory()
        memory.step, memory.complete = step, False
        os.lseek(memory.number, 0, os.SEEK_SET)
        self._kept[key] = [*(m for m in kept if m not in free), memory]
        path = f"/proc/{os.getpid()}/fd/{memory.number}"
        return path, os.path.realpath(path)

    def write(self, key: str, data: Bytes) -> None:
        """See `Keeper`."""
        with open(self._kept[key][-1].number, "wb", closefd=False) as file:
            file.write(data.data)  # all of it, where `os.write` may write a part

    def end(self, key: str) -> None:
        """See `Keeper`."""
        self._kept[key][-1].complete = True

    def steps(self, key: str) -> list[int]:
        """See `Keeper`."""
        return [memory.step for memory in self._kept.get(key, []) if memory.complete]

    def read(self, key: str, step: int, start: int, size: int) -> bytes:
        """See `Keeper`."""
        if step not in self.steps(key):
            raise LostObjectError(f"no snapshot of step {step} of {key} is kept")
        memory = next(memory for memory in self._kept[key] if memory.step == step)
        return os.pread(memory.number, size, start)


class _Calls(io.RawIOBase):
    """Sends what is written to a keeper of another machine."""

    def __init__(self, keeper: Keeper, key: str) -> None:
        self._keeper, self._key = keeper, key

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = np.frombuffer(data, np.uint8, min(len(data), PART_BYTES))
        self._keeper.write(self._key, part)
        return len(part)


def keep(keeper: Keeper, key: str, step: int, values: Iterable[bytes | memoryview]) -> None:
    """Have a keeper keep an entry: these bytes, one after the other."""
    path, memory = keeper.begin(key, step)
    here = os.path.realpath(path) == memory
    with open(path, "r+b") if here else io.BufferedWriter(_Calls(keeper, key), PART_BYTES) as file:
        file.writelines(values)
    keeper.end(key)
