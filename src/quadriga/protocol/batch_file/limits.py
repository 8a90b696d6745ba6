"""Limits of a batch file, and checks of JSON values that may come from anyone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeAlias

Json: TypeAlias = object
"""What `json.dumps` accepts and `json.loads` returns."""

MAX_DEPTH = 100
"""Levels of containers within containers."""
MAX_DIMS = 64
"""Dimensions of one tensor or array; the limit of numpy."""
MAX_BYTES = 2**63 - 1
"""Bytes of one tensor or array. Dimensions of length 0 count as 1, as in torch's strides."""
MAX_STACK_ROWS = 1 << 17
"""Rows of all non-tensor stacks within the values of one file. To make one row costs about 15 µs,
for a few bytes of the file; object arrays have no such limit."""
MAX_EQUAL_HASHES = 64
_FEW_KEYS = 1000


class MalformedError(ValueError):
    """A file that `save_to_disk` cannot have written. `load` turns it into a `DataError`."""


def expect_object(raw: Json, *keys: str) -> list[Json]:
    """Return the values of a JSON object that has exactly these keys."""
    if not isinstance(raw, dict) or raw.keys() != set(keys):
        raise MalformedError(
            f"expected an object with the keys {', '.join(keys)}, got {brief(raw)}"
        )
    return [raw[key] for key in keys]


def expect_list(raw: Json, length: int | None = None) -> list[Json]:
    """Return a JSON list, of this length if one is given."""
    if not isinstance(raw, list) or (length is not None and len(raw) != length):
        count = "" if length is None else f" of {length} items"
        raise MalformedError(f"expected a list{count}, got {brief(raw)}")
    return raw


def expect_text(raw: Json) -> str:
    """Return a JSON text."""
    if not isinstance(raw, str):
        raise MalformedError(f"expected a text, got {brief(raw)}")
    return raw


def expect_int(raw: Json, low: int = 0, high: int = MAX_BYTES) -> int:
    """Return a JSON integer from `low` to `high`."""
    if type(raw) is not int or not low <= raw <= high:
        raise MalformedError(f"expected an integer from {low} to {high}, got {brief(raw)}")
    return raw


def expect_pairs(raw: Json) -> list[tuple[Json, Json]]:
    """Return a JSON list of lists of two."""
    return [
        (first, second) for first, second in (expect_list(pair, 2) for pair in expect_list(raw))
    ]


def expect_shape(raw: Json, item_bytes: int) -> tuple[int, ...]:
    """Return a shape whose size in bytes can be calculated without overflow."""
    return checked_shape([expect_int(dim) for dim in expect_list(raw)], item_bytes)


def checked_shape(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return a shape. Raises `MalformedError` if it has too many dimensions or is too large."""
    if len(shape) > MAX_DIMS:
        raise MalformedError(f"{len(shape)} dimensions, the limit is {MAX_DIMS}")
    if math.prod(max(dim, 1) for dim in shape) * max(item_bytes, 1) > MAX_BYTES:
        raise MalformedError(f"shape {list(shape)} is too large")
    return tuple(shape)


def check_hashes(keys: Collection[object]) -> None:
    """Refuse keys that were chosen to have one hash, which makes a dict of n keys cost n² steps.

    Python's hashes of numbers are not random: n and n + k * (2**61 - 1) have the same hash.
    """
    if len(keys) <= _FEW_KEYS or all(type(key) is str for key in keys):
        return
    if max(Counter(map(hash, keys)).values()) > MAX_EQUAL_HASHES:
        raise MalformedError(f"more than {MAX_EQUAL_HASHES} keys of a dict or set have one hash")


def brief(raw: Json) -> str:
    """Return the type and the beginning of a value. Its `repr` may be as long as the file."""
    if isinstance(raw, list | dict):
        return f"a {type(raw).__name__} of {len(raw)}"
    text = raw[:40] if isinstance(raw, str) else raw
    if isinstance(text, int) and text.bit_length() > 128:
        return "a very large integer"
    return f"{text!r} ({type(raw).__name__})"
