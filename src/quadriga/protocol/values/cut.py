"""Cut rows out of a payload, in the process that stores it: numpy only, nothing of torch is loaded.

payload          rows 2, 0                          (values 0 1 2 3 4 5, offsets 0 3 4 6)
array [3, ...]   array [2, ...]: rows 2 and 0       (values 4 5 0 1 2,   offsets 0 2 5)
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.generic]
Ints: TypeAlias = NDArray[np.int64]
Stored: TypeAlias = "Array | tuple[Array, Ints] | dict[str, Stored]"
"""A payload (see `field_spec`), as this module sees it."""


def cut(payload: Stored, rows: Ints) -> Stored:
    """Return the payload of these rows (numbers in the stored payload), in their order."""
    if isinstance(payload, dict):
        return {key: cut(child, rows) for key, child in payload.items()}
    if isinstance(payload, tuple):
        return _ragged(*payload, rows)
    return payload.take(rows, axis=0)


def _ragged(values: Array, offsets: Ints, rows: Ints) -> tuple[Array, Ints]:
    ends = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(offsets[rows + 1] - offsets[rows], out=ends[1:])
    taken = np.empty((int(ends[-1]), *values.shape[1:]), dtype=values.dtype)
    for at, row in enumerate(rows.tolist()):
        taken[ends[at] : ends[at + 1]] = values[offsets[row] : offsets[row + 1]]
    return taken, ends


def payload_bytes(payload: Stored) -> int:
    """Return the bytes of a payload."""
    if isinstance(payload, dict):
        return sum(map(payload_bytes, payload.values()))
    if isinstance(payload, tuple):
        return sum(int(array.nbytes) for array in payload)
    return int(payload.nbytes)
