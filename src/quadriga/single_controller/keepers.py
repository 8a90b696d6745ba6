"""What keeps values of ranks in the memory of another process, so that they survive a rank."""

from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from quadriga.errors import LostObjectError

Value: TypeAlias = Any
"""A JSON object, or an array of bytes."""


class Keeper(Protocol):
    """Keeps entries: lists of values, by a key and a step. A handle of it can be sent to ranks.

    Every method but `steps` raises `LostObjectError` if the process of the keeper has ended.
    """

    def add(self, key: str, step: int, value: Value) -> None:
        """Append a copy of a value to an entry."""

    def end(self, key: str, step: int) -> None:
        """Note that an entry is complete, and drop all of its key but this and the one before."""

    def steps(self, key: str) -> list[int]:
        """Return the steps of the complete entries of a key; none if the keeper has ended."""

    def value(self, key: str, step: int, index: int) -> Value:
        """Return a value of a complete entry; None after the last one."""

    def read(self, key: str, step: int) -> Iterator[Value]:
        """Yield the values of a complete entry."""
        index = 0
        while (value := self.value(key, step, index)) is not None:
            yield value
            index += 1


class KeptValues(Keeper):
    """The entries of a keeper, in its process. On the local backend, a keeper by itself."""

    def __init__(self) -> None:
        self._complete: dict[str, dict[int, list[Value]]] = {}
        self._begun: dict[str, tuple[int, list[Value]]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # what a rank of this process is sent is the keeper itself

    def add(self, key: str, step: int, value: Value) -> None:
        """See `Keeper`."""
        # What a rank that has ended has left of another step, or of the same one, is dropped.
        begins = not isinstance(value, np.ndarray)
        if begins or self._begun.get(key, (None,))[0] != step:
            self._begun[key] = (step, [])
        self._begun[key][1].append(value if begins else value.copy())

    def end(self, key: str, step: int) -> None:
        """See `Keeper`."""
        entries = self._complete.setdefault(key, {})
        before = [earlier for earlier in sorted(entries) if earlier < step][-1:]
        kept = {earlier: entries[earlier] for earlier in before}
        self._complete[key] = kept | {step: self._begun.pop(key)[1]}

    def steps(self, key: str) -> list[int]:
        """See `Keeper`."""
        return list(self._complete.get(key, {}))

    def value(self, key: str, step: int, index: int) -> Value:
        """See `Keeper`."""
        values = self._complete.get(key, {}).get(step)
        if values is None:
            raise LostObjectError(f"no snapshot of step {step} of {key} is kept")
        return values[index] if index < len(values) else None
