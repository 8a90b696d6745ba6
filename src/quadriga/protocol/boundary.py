"""The four crossings between the controller and its workers.

    controller --pack_argument--> | wire | --unpack_argument--> worker method
    controller <--unpack_result-- | wire | <--pack_result------ worker method

Lists, tuples and dicts are walked; batches, tensors, arrays and futures inside them are handled,
anything else passes as it is. What comes out shares no memory with what went in, on any backend.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tensordict import TensorDictBase

from quadriga.protocol.dataproto import DataProto, tensordict_message, to_message
from quadriga.protocol.future import DataProtoFuture, unpacked
from quadriga.protocol.values import nested as plain
from quadriga.protocol.values.storage import CONTROLLER, Origin, Store, current_store, use_store

__all__ = [
    "DataProtoFuture",
    "Origin",
    "current_store",
    "pack_argument",
    "pack_result",
    "unpack_argument",
    "unpack_result",
    "use_store",
]


def pack_argument(value: Any, store: Store | None = None) -> Any:
    """On the controller: what a call carries. Local fields above the inline limit are put into
    `store` (that of the ranks' backend; the current one when None), once a call of this function:
    pack a part that several ranks share once."""
    return _pack(value, CONTROLLER, store or current_store())


def pack_result(value: Any, origin: Origin, store: Store | None = None) -> Any:
    """In the worker, after the method: what the reply carries. Fields above the inline limit stay
    here, in `store` (the current one when None); fields that were not read pass on as the
    references that they were."""
    return _pack(value, origin, store or current_store())


def unpack_argument(value: Any) -> Any:
    """In the worker, before the method: what the method sees. Waits for futures; fetches no field
    of a `DataProto`, all fields of a plain `TensorDict`."""
    return unpacked(value)


def unpack_result(value: Any) -> Any:
    """On the controller: what the caller sees. Fetches nothing, except that a plain `TensorDict`
    or a bare tensor is here when it is handed over."""
    return unpacked(value)


def _pack(value: Any, origin: Origin, store: Store) -> Any:
    return plain.walk(value, partial(_pack_leaf, origin=origin, store=store))


def _pack_leaf(value: Any, origin: Origin, store: Store) -> Any:
    if isinstance(value, DataProto):
        return to_message(value, origin, store)
    if isinstance(value, TensorDictBase) and value.batch_dims:
        return tensordict_message(value, origin, store)
    return plain.encode_leaf(value, private=store.in_process)
