"""Store a local value once while it is unchanged, however many calls receive it.

A batch on the controller is sent to several calls in turn. Each call splits it, so the objects that
are packed are new views each time. A view of rows is therefore noted with its source and its rows,
and the handles of stored rows are kept with the source:

    x = batch.batch["x"]       6 rows, split for 2 ranks
    first call     x[0:3] → put, handle h0    x[3:6] → put, handle h1
                   kept for x: {(0, 3): h0, (3, 6): h1}
    second call    x[0:3] → h0                x[3:6] → h1

A handle is used again only if the bytes are equal. A tensor whose version counter has changed was
written into. Other writes leave the counter as it is (through `x.numpy()`, `x.data`, or the array
from which x was made), so the bytes are compared as well. Comparing reads both copies: it takes
about as long as a put into memory of the store that was used before, and less than a put into fresh
memory (docs/measurements). What it always saves is the memory of a second copy, and its way to
other nodes. Handles are dropped with the source, and the oldest first if those of a source name
more than twice its rows, or all of them together more than `KEPT_BYTES`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from quadriga.errors import LostObjectError
from quadriga.protocol.values import jagged, operations
from quadriga.protocol.values.field_spec import Array, FieldSpec, LocalValue, Payload
from quadriga.protocol.values.rows import RowRange
from quadriga.protocol.values.storage import (
    Handle,
    IdentityMap,
    LocalHandle,
    Store,
    traffic,
)

Rows = tuple[int, int]
NOTED_BYTES = 64 * 1024
"""Views up to this size are not noted: if they are sent at all, then in a message."""
KEPT_BYTES = 2**30
"""A process keeps handles of at most this many bytes for calls that may follow."""
_COMPARED_ITEMS = 2**17  # of 8 bytes: 1 MiB at a time, which stays in the cache of the processor


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a source. The part keeps its source, as any view keeps its base."""

    source: LocalValue
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Copy:
    """Stored rows: their handle and the version counter of the value when they were stored."""

    spec: FieldSpec
    handle: Handle
    version: int


_Key = tuple[object, Rows]  # session (see `session`) and rows


@dataclass(slots=True, weakref_slot=True)
class _Copies:
    """The stored rows of one source, the oldest first, and the sum of their numbers."""

    by_rows: dict[_Key, _Copy] = field(default_factory=dict)
    rows: int = 0

    def drop(self, key: _Key) -> None:
        if self.by_rows.pop(key, None) is not None:
            self.rows -= key[1][1] - key[1][0]


_parts: IdentityMap[_Part] = IdentityMap()
_sources: IdentityMap[_Copies] = IdentityMap()


class _Kept:
    """All stored rows with their bytes, the oldest first; those of dead sources included."""

    def __init__(self) -> None:
        self._entries: deque[tuple[weakref.ref[_Copies], _Key, int]] = deque()
        self._nbytes = 0

    def add(self, copies: _Copies, key: _Key, nbytes: int) -> None:
        """Add stored rows, and drop the oldest above `KEPT_BYTES`."""
        self._entries.append((weakref.ref(copies), key, nbytes))
        self._nbytes += nbytes
        while self._nbytes > KEPT_BYTES or (self._entries and self._entries[0][0]() is None):
            reference, old_key, old_nbytes = self._entries.popleft()
            self._nbytes -= old_nbytes
            owner = reference()
            if owner is not None:
                owner.drop(old_key)


_kept = _Kept()
_lock = threading.RLock()
"""Held while rows are noted: several threads of a controller may send one batch. A garbage
collection inside may end a stream of the user whose last statement sends one, too."""


def note_part(part: LocalValue, source: LocalValue, rows: RowRange) -> None:
    """Note that `part` is a view of these rows of `source`, unless it is too small to be stored."""
    if part is not source and operations.nbytes(part) > NOTED_BYTES:
        _parts[part] = _Part(source, (rows.start, rows.stop))


def find(value: LocalValue, spec: FieldSpec, payload: Payload, session: object) -> Handle | None:
    """Return the handle of the same bytes in the store of `session`, None if there is none."""
    source, rows = place(value)
    copies = _sources.get(source)
    copy = None if copies is None else copies.by_rows.get((session, rows))
    if copy is None or copy.spec != spec or copy.version != _version(value):
        return None
    try:
        stored = copy.handle.fetch()
    except LostObjectError:
        return None
    return copy.handle if _same_bytes(payload, stored) else None


def remember(value: LocalValue, spec: FieldSpec, handle: Handle, session: object) -> None:
    """Keep the handle of a value that was just stored in the store of `session`."""
    source, rows = place(value)
    key, copy = (session, rows), _Copy(spec, handle, _version(value))
    limit = 2 * operations.row_count(source)
    with _lock:
        copies = _sources.get(source)
        if copies is None:
            copies = _sources[source] = _Copies()
        copies.drop(key)
        copies.by_rows[key] = copy
        copies.rows += rows[1] - rows[0]
        while len(copies.by_rows) > 1 and copies.rows > limit:
            copies.drop(next(iter(copies.by_rows)))
        _kept.add(copies, key, handle.nbytes)


def place(value: LocalValue) -> tuple[LocalValue, Rows]:
    """Return the source of a view of rows, and these rows; the value itself if it is no view."""
    part = _parts.get(value)
    return (part.source, part.rows) if part else (value, (0, operations.row_count(value)))


def session(store: Store) -> object:
    """Return what identifies the stored values: stores of one Ray cluster share them."""
    return getattr(store, "session", id(store))


def in_store(handle: Handle, store: Store) -> Handle:
    """Return a handle of the same value in `store`, if this process holds it and it is large.

    Several messages may need the same bytes: those of the parts of one batch, for example.
    """
    if not isinstance(handle, LocalHandle) or handle.nbytes <= NOTED_BYTES:
        return handle
    known = session(store)
    if handle.stored is None or handle.stored[0] != known:
        traffic.stored(handle.nbytes)
        handle.stored = known, store.put(handle.value, handle.nbytes)
    return handle.stored[1]


def _version(value: LocalValue) -> int:
    """Return the version counter of a tensor, which views share; 0 where there is none."""
    if not isinstance(value, torch.Tensor):
        return 0
    tensor = jagged.parts(value)[0] if value.is_nested else value
    return 0 if tensor.is_inference() else tensor._version


def _same_bytes(payload: Payload, stored: Payload) -> bool:
    if isinstance(payload, np.ndarray) and isinstance(stored, np.ndarray):
        return _same_array(payload, stored)
    if isinstance(payload, tuple) and isinstance(stored, tuple):
        return all(map(_same_array, payload, stored))
    if isinstance(payload, dict) and isinstance(stored, dict):
        return all(_same_bytes(payload[key], stored[key]) for key in payload)
    return False


def _same_array(a: Array, b: Array) -> bool:
    """Return whether two contiguous arrays have the same bytes: NaNs too, and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype == object:
        return False
    bytes_a, bytes_b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    whole = len(bytes_a) // 8 * 8
    items_a, items_b = bytes_a[:whole].view(np.int64), bytes_b[:whole].view(np.int64)
    for i in range(0, len(items_a), _COMPARED_ITEMS):
        j = i + _COMPARED_ITEMS
        if not np.array_equal(items_a[i:j], items_b[i:j]):
            return False
    return np.array_equal(bytes_a[whole:], bytes_b[whole:])
