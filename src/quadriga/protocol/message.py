"""A message: one batch as it crosses, and the plain tuples in which it is pickled.

A transport's pickler may call Python for every object that is not of a built-in type, so a batch
travels as tuples, strings and bytes; only references of a store, and payloads that are large enough
to go out of band, stay objects. Layouts are written once however many fields share them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from quadriga.protocol.columns.column import RemoteColumn
from quadriga.protocol.values.field_spec import FieldSpec, Payload
from quadriga.protocol.values.nested import ATOMS
from quadriga.protocol.values.row_map import Block, Rows
from quadriga.protocol.values.storage import LocalHandle, Origin

Flat = tuple[Any, ...]
_SMALL = 2048
"""Arrays up to this many bytes are written as bytes: cheaper than an out-of-band buffer."""


@dataclass(slots=True)
class Inline:
    """A field of all rows of the message whose bytes come along."""

    spec: FieldSpec
    payload: Payload
    nbytes: int


Entries = dict[str, Inline | RemoteColumn]


@dataclass(slots=True)
class Message:
    """One batch as it crosses. `kind`: its class, None for `DataProto` itself; `head`: batch size
    and kind of device of its tensor half, None when it has none; `rows`: the layout of fields that
    this message brings."""

    kind: type[Any] | None
    head: tuple[tuple[int, ...], str | None] | None
    rows: Rows
    tensors: Entries
    arrays: Entries
    meta: Any

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing but small fields and atoms: no reference, no object or class of
        the user's."""
        entries = (*self.tensors.values(), *self.arrays.values())
        return (
            self.kind is None
            and all(isinstance(e, Inline) and e.spec.kind != "raw" for e in entries)
            and all(type(value) in ATOMS for value in self.meta.values())
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, flatten(self)


def flatten(message: Message) -> Flat:
    """The arguments of `restore`."""
    layouts = _Layouts()
    tensors = _flat_entries(message.tensors, layouts)
    arrays = _flat_entries(message.arrays, layouts)
    rows = layouts.number(message.rows)
    return message.kind, message.head, rows, tuple(layouts.flat), tensors, arrays, message.meta


def restore(
    kind: Any, head: Any, rows: int, layouts: Flat, tensors: Flat, arrays: Flat, meta: Any
) -> Message:
    """The message of `flatten`."""
    known = [_rows(*parts) for parts in layouts]
    return Message(kind, head, known[rows], _entries(tensors, known), _entries(arrays, known), meta)


class _Layouts:
    """Numbers the layouts of one message."""

    def __init__(self) -> None:
        self.flat: list[Flat] = []
        self._numbers: dict[int, int] = {}

    def number(self, rows: Rows) -> int:
        at = self._numbers.get(id(rows))
        if at is None:
            at = self._numbers[id(rows)] = len(self.flat)
            self.flat.append(_flat_rows(rows))
        return at


def _flat_entries(entries: Entries, layouts: _Layouts) -> Flat:
    flat: list[Flat] = []
    for key, entry in entries.items():
        spec = entry.spec.flat()
        if isinstance(entry, Inline):
            flat.append((key, spec, entry.nbytes, _flat_payload(entry.payload)))
        else:
            handles = tuple([_flat_handle(handle) for handle in entry.handles])
            flat.append((key, spec, layouts.number(entry.rows), handles, None))
    return tuple(flat)


def _entries(flat: Flat, layouts: list[Rows]) -> Entries:
    entries: Entries = {}
    for key, spec, number, content, *remote in flat:
        if remote:
            handles = tuple([_handle(*handle) for handle in content])
            entries[key] = RemoteColumn(FieldSpec.of(spec), layouts[number], handles)
        else:
            entries[key] = Inline(FieldSpec.of(spec), _payload(content), number)
    return entries


def _flat_rows(rows: Rows) -> Flat:
    origins: dict[Origin, int] = {}
    blocks = tuple(
        [(b.uid, b.rows, origins.setdefault(b.origin, len(origins))) for b in rows.blocks]
    )
    names = tuple([(o.role, o.rank, o.method, o.node) for o in origins])
    return blocks, names, rows.content


def _rows(blocks: Flat, names: Flat, segments: bytes) -> Rows:
    origins = [Origin(*name) for name in names]
    return Rows(
        tuple([Block(uid, rows, origins[origin]) for uid, rows, origin in blocks]),
        np.frombuffer(segments, dtype=np.int64).reshape(-1, 3),
    )


def _flat_handle(handle: Any) -> Flat:
    kind = type(handle)
    if kind is LocalHandle:
        return None, _flat_payload(handle.value), handle.nbytes
    named: Any = kind
    return _name(named), *handle.__reduce__()[1]


def _handle(kind: tuple[str, str] | None, *arguments: Any) -> Any:
    if kind is None:
        payload, nbytes = arguments
        return LocalHandle(_payload(payload), nbytes)
    return _handle_class(*kind)(*arguments)


@cache
def _name(kind: Any) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


@cache
def _handle_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _flat_payload(payload: Payload) -> Payload:
    """Small arrays as a list of dtype, shape and bytes; a payload is never a list otherwise."""
    if isinstance(payload, np.ndarray):
        if payload.nbytes > _SMALL or payload.dtype == object:
            return payload
        return [payload.dtype.str, payload.shape, payload.tobytes()]
    if isinstance(payload, tuple):
        return tuple(_flat_payload(part) for part in payload)
    return {key: _flat_payload(part) for key, part in payload.items()}


def _payload(flat: Any) -> Payload:
    if isinstance(flat, list):
        dtype, shape, data = flat
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if isinstance(flat, tuple):
        return tuple(_payload(part) for part in flat)
    if isinstance(flat, dict):
        return {key: _payload(part) for key, part in flat.items()}
    return flat
