"""Tensors outside batches: in `meta_info`, and as bare arguments and results.

A tensor becomes a `EncodedTensor`, its bytes an out-of-band buffer like a field's. An array comes out as
a private copy, because what a transport hands over may be read-only memory.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.protocol.values.decode import decode
from quadriga.protocol.values.encode_tensors import encode_tensors
from quadriga.protocol.values.field_spec import FieldSpec, Payload
from quadriga.protocol.values.operations import row_count
from quadriga.protocol.values.row_map import Block, Rows
from quadriga.protocol.values.storage import CONTROLLER, snapshot

_SEQUENCES = (list, tuple, set, frozenset)
ATOMS = (str, bytes, int, float, bool, complex, type(None))
"""Types whose values hold nothing else and cannot change."""
_LONG = 64


class EncodedTensor:
    """A dense tensor of any number of dimensions, a jagged one or a `TensorDict`, under way."""

    __slots__ = ("payload", "rows", "spec")

    def __init__(self, spec: FieldSpec, payload: Payload, rows: int) -> None:
        self.spec, self.payload, self.rows = spec, payload, rows

    @staticmethod
    def of(tensor: torch.Tensor | TensorDictBase, private: bool) -> EncodedTensor:
        """`private`: take a snapshot, for a transport that does not copy."""
        if isinstance(tensor, TensorDictBase) or tensor.is_nested:
            rows, (spec, payload, _) = row_count(tensor), encode_tensors(tensor, "argument")
        else:
            rows, (spec, payload, _) = 1, encode_tensors(tensor.detach().unsqueeze(0), "argument")
        return EncodedTensor(spec, snapshot(payload) if private else payload, rows)

    def open(self) -> Any:
        """The tensor, private to the caller."""
        rows = Rows.whole(Block(0, self.rows, CONTROLLER))
        value, _ = decode(self.spec, rows, [self.payload][: len(rows.blocks)])
        return value.squeeze(0) if self.spec.kind == "tensor" else value

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedTensor, (self.spec, self.payload, self.rows)


class Copied:
    """A copy of an object on its way inside one process; each receiver gets one of its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    @staticmethod
    def of(value: Any) -> Any:
        """Immutable objects, and those that refuse to be copied, as they are."""
        try:
            copied = snapshot(value)
        except Exception:  # a lock, an open file: it stays one object
            return value
        return value if copied is value else Copied(copied)

    def open(self) -> Any:
        """A copy for one receiver."""
        return snapshot(self.value)


def decode_tensor(parcel: EncodedTensor) -> Any:
    """The tensor of a parcel: what a tensor inside an object is pickled as."""
    return parcel.open()


def walk(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to everything inside lists, tuples, dicts and sets, which are
    rebuilt.

    Long sequences that begin with a string or a number are taken to hold nothing else.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict or kind is OrderedDict:
        return kind((k, walk(v, leaf)) for k, v in value.items())
    if kind in _SEQUENCES:
        if len(value) > _LONG and isinstance(next(iter(value)), ATOMS):
            return kind(value)
        return kind(walk(v, leaf) for v in value)
    if kind is defaultdict:
        return kind(value.default_factory, {k: walk(v, leaf) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(walk(v, leaf) for v in value))
    return leaf(value)


def encode_leaf(value: Any, private: bool = False) -> Any:
    """Tensors become parcels; with `private`, for a transport that does not copy, any other object
    that can be copied becomes a `Copied`."""
    if isinstance(value, torch.Tensor) or (isinstance(value, TensorDictBase) and value.batch_dims):
        return EncodedTensor.of(value, private)
    return Copied.of(value) if private else value


def decode_leaf(value: Any) -> Any:
    """Parcels become tensors, arrays private, writable copies."""
    if isinstance(value, EncodedTensor | Copied):
        return value.open()
    return snapshot(value) if isinstance(value, np.ndarray) else value
