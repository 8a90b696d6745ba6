"""Values at the process boundary between the controller and its workers.

    controller  pack_argument  → call →    unpack_argument  worker method
    controller  unpack_result  ← result ←  pack_result      worker method

Lists, tuples and dicts are walked. Batches, tensors, arrays and futures inside them are packed; any
other value is sent as it is. What the receiver gets shares no memory with what was sent, on any
backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import Any

from tensordict import TensorDict, TensorDictBase

from quadriga.protocol import columns, message
from quadriga.protocol.columns import (
    Column,
    RemoteColumn,
    find_stored,
    is_remote,
    local_value,
    remember_stored,
    session_of,
    source_of,
)
from quadriga.protocol.containers import walk
from quadriga.protocol.contents import Contents, MetaInfo
from quadriga.protocol.dataproto import PADDING_FIELD, DataProto, class_and_attributes, from_message
from quadriga.protocol.encoding import decode_leaf, encode, encode_leaf
from quadriga.protocol.message import Inline, Message, has_raw_rows, message_of
from quadriga.protocol.rows import RowMap
from quadriga.protocol.storage import (
    CONTROLLER,
    Handle,
    Origin,
    Store,
    current_store,
    snapshot,
    traffic,
)
from quadriga.protocol.values import FieldSpec, LocalValue, Payload

__all__ = [
    "Deferred",
    "pack_argument",
    "pack_arguments",
    "pack_result",
    "unpack_argument",
    "unpack_result",
    "wait_for_arguments",
    "with_fields",
]


MESSAGE_BYTES = 100 * 1024
"""Small fields of one message up to this size together are sent in the message of a call."""
TINY_BYTES = 4 * 1024
"""Fields up to this size are always sent in the message: reading a stored field costs more."""
TOGETHER_BYTES = 16 * 2**20
"""Large fields are stored together up to this size: their payloads may be copies."""
SHARED_BYTES = 2**20
"""Messages with at most this many bytes to store share objects with those of other ranks of their
node: an object of 256 KiB costs ten times as much as copying its bytes."""
SHARED_MESSAGES = 8
"""How many messages share one object. It exists until all of their ranks have dropped it."""

_Unstored = tuple[RemoteColumn, LocalValue | None, Payload, int]
"""A column without its handle; value, payload and bytes of what is to be stored. The value is None
if its handle is not kept for later calls."""


def with_fields(value: object, names: Container[str], *, futures: bool = True) -> object:
    """Return a batch with only those of its fields that are in `names`, and other values as they
    are. A batch that has none of them stays whole, so that the method can say what it lacks.

    A future whose batch has arrived is replaced by that batch, unless `futures` is False; a pending
    one stays as it is. Marks of padding stay: the caller may be a worker that received padding.
    """
    if isinstance(value, Deferred):
        arrived = value.arrived() if futures else None
        return value if arrived is None else with_fields(arrived, names)
    if not isinstance(value, DataProto):
        return value
    tensors = [] if value.batch is None else list(map(str, value.batch.keys()))
    kept = [name for name in tensors if name in names]
    arrays = [name for name in value.non_tensor_batch if name in names]
    if not kept and not arrays:
        return value
    marks = [name for name in value.non_tensor_batch if name.startswith(PADDING_FIELD)]
    arrays = list(dict.fromkeys([*arrays, *marks]))
    return value.select(batch_keys=kept, non_tensor_batch_keys=arrays)


class Deferred(ABC):
    """A value that may not exist yet. As an argument it is replaced by its value."""

    @abstractmethod
    def get(self) -> Any:
        """Wait for the value."""

    @abstractmethod
    def arrived(self) -> DataProto | None:
        """Return the value if it is a batch that this process has, else None."""

    @staticmethod
    @abstractmethod
    def wait_all(values: Sequence[Deferred], timeout: float | None = None) -> None:
        """Wait for several values at once. Raises the first failure of any of them."""


class Packer:
    """Make the messages of one call or one result: `message` for each batch, then `store_fields`.

    The messages contain no live tensor. Their large fields are put into the store by
    `store_fields`, or before it whenever they have `TOGETHER_BYTES`: storing a field evicts what
    the processor has cached of this code, so the messages of many ranks are made first.
    """

    def __init__(self, origin: Origin, store: Store) -> None:
        """`origin`: the writer of the fields."""
        self._origin, self.store = origin, store
        # A result is stored for its receivers only: a method rarely returns the same tensor twice.
        self._reuse = origin is CONTROLLER
        self._may_store = origin is CONTROLLER and not store.in_process
        self._session: object = None
        self.reader = ""
        """The node to which the next messages go, "" if it is unknown or they go to several."""
        self._waiting: list[tuple[str, list[_Unstored]]] = []
        self._first: dict[tuple[int, tuple[int, int]], RemoteColumn] = {}
        self._same: list[tuple[RemoteColumn, RemoteColumn]] = []
        self._nbytes = 0

    def message(
        self, contents: Contents, kind: type[object] | None, attributes: MetaInfo
    ) -> Message:
        """Return the message of one batch."""
        store, row_map = self.store, None
        unstored: list[_Unstored] = []

        def entry(key: str, column: Column) -> Inline | RemoteColumn:
            nonlocal row_map
            if is_remote(column):
                return columns.for_message(key, column, store)
            if row_map is None:
                row_map = columns.row_map_of_shard(contents.rows, self._origin)
            value = local_value(column)
            spec, payload, nbytes = encode(value, key, narrow=not store.in_process)
            if nbytes <= message.INLINE_BYTES or spec.kind == "raw" or not row_map.shards:
                return Inline(spec, payload, nbytes)
            handle = self._stored(value, spec, payload)
            stored = RemoteColumn(spec, row_map, () if handle is None else (handle,))
            if handle is None and not self._is_waiting(value, stored):
                unstored.append((stored, value, payload, nbytes))
            return stored

        packed = message_of(contents, kind, attributes, entry, store.in_process)
        packed.row_map = row_map
        if row_map is not None:
            unstored += self._small_fields(packed, row_map)
        if unstored:
            self._waiting.append((self.reader, unstored))
            self._nbytes += sum(nbytes for _, _, _, nbytes in unstored)
            if self._nbytes > TOGETHER_BYTES:
                self.store_fields()
        return packed

    def _small_fields(self, packed: Message, row_map: RowMap) -> list[_Unstored]:
        """Complete the small fields: copy them, or return them to be stored if they are many."""
        unstored = self._together(packed, row_map) if self._may_store and row_map.shards else []
        for field in (*packed.tensors.values(), *packed.arrays.values()):
            # The payload may share memory with the live tensor, and is pickled later or never.
            private = not has_raw_rows(field.spec) or self.store.in_process
            if isinstance(field, Inline) and private:
                field.payload = snapshot(field.payload)
        return unstored

    @staticmethod
    def _together(packed: Message, row_map: RowMap) -> list[_Unstored]:
        """Make columns without handles of fields that are small each and large together.

        In the message they would be stored with the call, and the rank would fetch all of them
        before the call starts. As fields of the store they are fetched when they are read. They are
        not noted in `stored_once`: that costs as much as storing them.
        """
        found = [
            (half, key, entry)
            for half in (packed.tensors, packed.arrays)
            for key, entry in half.items()
            if isinstance(entry, Inline) and entry.spec.kind != "raw"
        ]
        unstored: list[_Unstored] = []
        if sum([entry.nbytes for _, _, entry in found]) > MESSAGE_BYTES:
            for half, key, entry in found:
                if entry.nbytes > TINY_BYTES:
                    half[key] = stored = RemoteColumn(entry.spec, row_map, ())
                    unstored.append((stored, None, entry.payload, entry.nbytes))
        return unstored

    def _stored(self, value: LocalValue, spec: FieldSpec, payload: Payload) -> Handle | None:
        """Return the handle of a value that was stored before and is unchanged."""
        if not self._reuse:
            return None
        if self._session is None:
            self._session = session_of(self.store)
        return find_stored(value, spec, payload, self._session)

    def _is_waiting(self, value: LocalValue, stored: RemoteColumn) -> bool:
        """Return whether the same rows of the same tensor wait already: they get one handle."""
        if not self._reuse:
            return False
        source, rows = source_of(value)
        first = self._first.setdefault((id(source), rows), stored)
        if first is not stored:
            self._same.append((stored, first))
        return first is not stored

    def store_fields(self) -> None:
        """Put the large fields into the store. Until then the messages cannot be sent."""
        waiting, self._waiting, self._nbytes = _shared(self._waiting), [], 0
        # One call for fields of messages to one node: a store may put them into one object.
        found = [
            self.store.put_many([(payload, nbytes) for _, _, payload, nbytes in unstored])
            for unstored in waiting
        ]
        for unstored, handles in zip(waiting, found, strict=True):
            for (stored, value, _, nbytes), handle in zip(unstored, handles, strict=True):
                stored.handles = (handle,)
                traffic.stored(nbytes)
                if self._reuse and value is not None:
                    remember_stored(value, stored.spec, handle, self._session)
        for stored, first in self._same:
            stored.handles = first.handles
        self._first, self._same = {}, []


def _shared(waiting: Sequence[tuple[str, list[_Unstored]]]) -> list[list[_Unstored]]:
    """Join the fields of messages that share objects: small ones in a row, to the same node.

    With SHARED_BYTES = 1 MiB, messages to nodes a and b, sizes in MiB:

        a 0.3    a 0.3    a 5    a 0.3    b 0.3    "" 0.3    "" 0.3
        └─ one object ┘   one    one      one      one       one
    """
    objects: list[list[_Unstored]] = []
    last, count = "", 0
    for reader, unstored in waiting:
        small = sum([nbytes for _, _, _, nbytes in unstored]) <= SHARED_BYTES
        if small and reader and reader == last and count < SHARED_MESSAGES:
            objects[-1] += unstored
            count += 1
        else:
            objects.append(unstored)
            last, count = reader if small else "", 1
    return objects


def pack_arguments(
    values: Iterable[object], store: Store | None = None, readers: Sequence[str] | None = None
) -> list[object]:
    """Pack the arguments of a call on the controller.

    Local fields above the inline limit are put into `store` (that of the ranks' backend; the
    current one if None) once for each value, so a part that several ranks share must be packed
    once. `readers`: the node of the only rank that receives each value, "" if there are several.
    """
    packer = Packer(CONTROLLER, store or current_store())
    packed = []
    for i, value in enumerate(values):
        packer.reader = readers[i] if readers else ""
        packed.append(_pack(value, packer))
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
    wherever `unpack_argument` does.
    """
    found: list[Deferred] = []

    def note(value: object) -> None:
        if isinstance(value, Deferred):
            found.append(value)

    for value in values:
        walk(value, note)
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
