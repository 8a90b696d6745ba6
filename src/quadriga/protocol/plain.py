"""Tensors outside batches: in `meta_info`, and as bare arguments and results.

A tensor becomes a `Parcel`, its bytes an out-of-band buffer like a field's. An array comes out as
a private copy, because what a transport hands over may be read-only memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.protocol.layout import Block, Rows
from quadriga.protocol.reference import CONTROLLER, snapshot
from quadriga.protocol.serialization import FieldSpec, Payload, freeze
from quadriga.protocol.thaw import thaw
from quadriga.protocol.values import row_count

_ATOMS = (str, bytes, int, float, bool, complex, type(None))
_LONG = 64


class Parcel:
    """A dense tensor of any number of dimensions, a jagged one or a `TensorDict`, under way."""

    __slots__ = ("payload", "rows", "spec")

    def __init__(self, spec: FieldSpec, payload: Payload, rows: int) -> None:
        self.spec, self.payload, self.rows = spec, payload, rows

    @staticmethod
    def of(tensor: torch.Tensor | TensorDictBase, private: bool) -> Parcel:
        """`private`: take a snapshot, for a transport that does not copy."""
        if isinstance(tensor, TensorDictBase) or tensor.is_nested:
            rows, (spec, payload, _) = row_count(tensor), freeze(tensor, "argument")
        else:
            rows, (spec, payload, _) = 1, freeze(tensor.detach().unsqueeze(0), "argument")
        return Parcel(spec, snapshot(payload) if private else payload, rows)

    def open(self) -> Any:
        """The tensor, private to the caller."""
        rows = Rows.whole(Block(0, self.rows, CONTROLLER))
        value, _ = thaw(self.spec, rows, [self.payload][: len(rows.blocks)])
        return value.squeeze(0) if self.spec.kind == "tensor" else value

    def __reduce__(self) -> tuple[Any, ...]:
        return Parcel, (self.spec, self.payload, self.rows)


def open_parcel(parcel: Parcel) -> Any:
    """The tensor of a parcel: what a tensor inside an object is pickled as."""
    return parcel.open()


def walk(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to everything inside lists, tuples and dicts, which are rebuilt.

    Long sequences that begin with a string or a number are taken to hold nothing else.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        return {k: walk(v, leaf) for k, v in value.items()}
    if kind is list or kind is tuple:
        if len(value) > _LONG and isinstance(value[0], _ATOMS):
            return kind(value)
        return kind(walk(v, leaf) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(walk(v, leaf) for v in value))
    return leaf(value)


def freeze_leaf(value: Any, private: bool = False) -> Any:
    """Tensors become parcels; with `private`, arrays become copies."""
    if isinstance(value, torch.Tensor) or (isinstance(value, TensorDictBase) and value.batch_dims):
        return Parcel.of(value, private)
    if private and isinstance(value, np.ndarray):
        return snapshot(value)
    return value


def thaw_leaf(value: Any) -> Any:
    """Parcels become tensors and arrays private, writable copies."""
    if isinstance(value, Parcel):
        return value.open()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    return value
