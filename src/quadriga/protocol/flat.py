"""Columns as plain tuples: the form in which they are pickled.

A transport's pickler may call Python for every object of a class of its own kind, so a batch
travels as tuples, strings and bytes; only handles of a store, and payloads that are large enough to
go out of band, stay objects. Layouts are written once however many columns share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from quadriga.protocol.column import RefColumn, held
from quadriga.protocol.layout import Block, Rows
from quadriga.protocol.reference import HereHandle, Origin
from quadriga.protocol.serialization import FieldSpec, Payload

Flat = tuple[tuple[Any, ...], tuple[Any, ...]]
_SMALL = 2048
"""Arrays up to this many bytes are written as bytes: cheaper than an out-of-band buffer."""


def flatten(fields: Mapping[str, Any]) -> Flat:
    """`(layouts, columns)`; local values are held as columns first."""
    layouts: dict[int, tuple[int, Rows]] = {}
    columns = []
    for key, column in held(fields).items():
        rows = column.rows
        at, _ = layouts.setdefault(id(rows), (len(layouts), rows))
        handles = tuple(_flat_handle(handle) for handle in column.handles)
        columns.append((key, at, _flat_spec(column.spec), handles))
    return tuple(_flat_rows(rows) for _, rows in layouts.values()), tuple(columns)


def restore(flat: Flat) -> dict[str, RefColumn]:
    """The columns of `flatten`."""
    layouts = [_rows(parts) for parts in flat[0]]
    return {
        key: RefColumn(_spec(spec), layouts[at], tuple(_handle(handle) for handle in handles))
        for key, at, spec, handles in flat[1]
    }


def _flat_spec(spec: FieldSpec) -> tuple[Any, ...]:
    children = tuple((key, _flat_spec(child)) for key, child in spec.children)
    return spec.kind, spec.dtype, tuple(spec.tail), spec.device, children


def _spec(parts: tuple[Any, ...]) -> FieldSpec:
    kind, dtype, tail, device, children = parts
    return FieldSpec(kind, dtype, tail, device, tuple((k, _spec(child)) for k, child in children))


def _flat_rows(rows: Rows) -> tuple[Any, ...]:
    origins: dict[Origin, int] = {}
    blocks = tuple((b.uid, b.rows, origins.setdefault(b.origin, len(origins))) for b in rows.blocks)
    names = tuple((o.role, o.rank, o.method, o.node) for o in origins)
    return blocks, names, rows.segments.tobytes()


def _rows(parts: tuple[Any, ...]) -> Rows:
    blocks, names, segments = parts
    origins = [Origin(*name) for name in names]
    return Rows(
        tuple(Block(uid, rows, origins[origin]) for uid, rows, origin in blocks),
        np.frombuffer(segments, dtype=np.int64).reshape(-1, 3),
    )


def _flat_handle(handle: Any) -> Any:
    if type(handle) is HereHandle:
        return _flat_payload(handle.value), handle.nbytes
    return handle


def _handle(flat: Any) -> Any:
    return HereHandle(_payload(flat[0]), flat[1]) if isinstance(flat, tuple) else flat


def _flat_payload(payload: Payload) -> Payload:
    """Small arrays as `(dtype, shape, bytes)`, within a list that marks them."""
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
