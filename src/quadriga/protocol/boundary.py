"""Values at the process boundary between the controller and its workers.

    controller  pack_argument  → call →    unpack_argument  worker method
    controller  unpack_result  ← result ←  pack_result      worker method

Lists, tuples and dicts are walked. Batches, tensors, arrays and futures inside them are packed; any
other value is sent as it is. What the receiver gets shares no memory with what was sent, on any
backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase

from quadriga.protocol.containers import walk
from quadriga.protocol.dataproto import DataProto, class_and_attributes, from_message
from quadriga.protocol.message import Message, Packer
from quadriga.protocol.values.decode import decode_leaf
from quadriga.protocol.values.encode import encode_leaf
from quadriga.protocol.values.storage import CONTROLLER, Origin, Store, current_store, use_store

__all__ = [
    "Deferred",
    "Origin",
    "current_store",
    "pack_argument",
    "pack_arguments",
    "pack_result",
    "unpack_argument",
    "unpack_result",
    "use_store",
    "wait_for_arguments",
]


class Deferred(ABC):
    """A value that may not exist yet. As an argument it is replaced by its value."""

    @abstractmethod
    def get(self) -> Any:
        """Wait for the value."""

    @staticmethod
    @abstractmethod
    def wait_all(values: Sequence[Deferred], timeout: float | None = None) -> None:
        """Wait for several values at once. Raises the first failure of any of them."""


def pack_arguments(values: Iterable[object], store: Store | None = None) -> list[object]:
    """Pack the arguments of a call on the controller.

    Local fields above the inline limit are put into `store` (that of the ranks' backend; the
    current one if None) once for each value, so a part that several ranks share must be packed
    once.
    """
    packer = Packer(CONTROLLER, store or current_store())
    packed = [_pack(value, packer) for value in values]
    packer.store_fields()
    return packed


def pack_argument(value: object, store: Store | None = None) -> object:
    """Pack one argument on the controller, as `pack_arguments` does."""
    return pack_arguments([value], store)[0]


def pack_result(value: object, origin: Origin, store: Store | None = None) -> object:
    """Pack a result in the worker.

    Fields above the inline limit are put into `store` (the current one if None). Fields that the
    method received and did not read are sent as the references that they were.
    """
    packer = Packer(origin, store or current_store())
    packed = _pack(value, packer)
    packer.store_fields()
    return packed


def wait_for_arguments(values: Iterable[object]) -> None:
    """Wait for all futures among the arguments of a call, before the first of them is unpacked.

    Raises the first failure of any of them, also while another will never return. Finds futures
    among the arguments and in the lists, tuples and dicts among them, not deeper.
    """
    found: list[Deferred] = []
    for value in values:
        items: Iterable[object] = (value,)
        if isinstance(value, list | tuple):
            items = value
        elif isinstance(value, dict):
            items = value.values()
        found += [item for item in items if isinstance(item, Deferred)]
    if len(found) > 1:
        found[0].wait_all(found)


def unpack_argument(value: object) -> Any:
    """Unpack an argument in the worker. Waits for futures.

    Fetches no field of a `DataProto` and all fields of a plain `TensorDict`.
    """
    return walk(value, _unpack_leaf)


def unpack_result(value: object) -> Any:
    """Unpack a result on the controller.

    Fetches no field of a `DataProto`; plain `TensorDict`s and bare tensors are local when this
    function returns.
    """
    return walk(value, _unpack_leaf)


def _pack(value: object, packer: Packer) -> object:
    if isinstance(value, DataProto):
        return packer.message(value.contents, *class_and_attributes(value))
    return walk(value, partial(_pack_leaf, packer=packer))


def _pack_leaf(value: object, packer: Packer) -> object:
    if isinstance(value, DataProto):
        return packer.message(value.contents, *class_and_attributes(value))
    # A TensorDict without batch dimensions has no rows; `encode_leaf` sends it as a single value.
    if isinstance(value, TensorDictBase) and value.batch_dims:
        return packer.message(DataProto.from_tensordict(value).contents, TensorDict, {})
    return encode_leaf(value, private=packer.store.in_process)


def _unpack_leaf(value: object) -> object:
    if isinstance(value, Message):
        return from_message(value)
    if isinstance(value, Deferred):
        return value.get()
    return decode_leaf(value)
