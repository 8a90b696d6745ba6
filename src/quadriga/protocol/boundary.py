"""Values at the process boundary between the controller and its workers.

    controller  pack_argument  → call →    unpack_argument  worker method
    controller  unpack_result  ← result ←  pack_result      worker method

Lists, tuples and dicts are walked. Batches, tensors, arrays and futures inside them are packed; any
other value is sent as it is. What the receiver gets shares no memory with what was sent, on any
backend.

`DataProtoFuture` is the result of a call that may not have returned yet. `future.get(timeout=2.0)`,
`await future`, `future.done()` and `future.cancel()` work as in `concurrent.futures` and Ray;
`as_completed(futures)` yields futures in the order in which they end.
"""

from __future__ import annotations

import copy
import ctypes
import math
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, UntypedStorage

from quadriga.errors import (
    CallTimeoutError,
    FieldError,
    LengthError,
    LostObjectError,
    ProtocolError,
)
from quadriga.protocol import columns, message, storage
from quadriga.protocol.contents import Contents, MetaInfo
from quadriga.protocol.dataproto import (
    PADDING_FIELD,
    DataProto,
    DataProtoConfig,
    class_and_attributes,
    from_message,
)
from quadriga.protocol.message import Message, has_raw_rows, message_of
from quadriga.protocol.tensordicts import TensorDict, TensorDictBase
from quadriga.protocol.threads import PendingValue, in_thread, wait_until
from quadriga.protocol.values import Payload

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

SENT_BYTES = 256 * 2**20
"""A process keeps handles of at most this many bytes for calls that send the same fields again."""

_Source = tuple[UntypedStorage, tuple[object, ...]]
"""The memory of a large local tensor, and the store and the part of the memory that it views: a
split of a batch makes a new view each time."""
_Unstored = tuple[columns.RemoteColumn, Payload, int, _Source | None]
"""A column without its handle; payload and bytes of what is to be stored; where they come from."""
_sent: WeakKeyDictionary[UntypedStorage, dict[object, storage.Handle]] = WeakKeyDictionary()
_sent_lock = threading.Lock()
"""Memory of local tensors → what of it is stored. Both are released together."""
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


def with_fields(value: object, names: Container[str], *, futures: bool = True) -> object:
    """Return a batch with only those of its fields that are in `names`, and other values as they
    are. A batch that has none of them stays whole, so that the method can say what it lacks.

    A future whose batch has arrived is replaced by that batch, unless `futures` is False; a pending
    one stays as it is. Marks of padding stay: the caller may be a worker that received padding.
    """
    if isinstance(value, DataProtoFuture):
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


class Packer:
    """Make the messages of one call or one result: `message` for each batch, then `store_fields`.

    The messages contain no live tensor. Their large fields are put into the store by
    `store_fields`, or before it whenever they have `TOGETHER_BYTES`: storing a field evicts what
    the processor has cached of this code, so the messages of many ranks are made first.
    """

    def __init__(self, origin: storage.Origin, store: storage.Store) -> None:
        """`origin`: the writer of the fields."""
        self._origin, self.store = origin, store
        self.reader = ""
        """The node to which the next messages go, "" if it is unknown or they go to several."""
        self._waiting: list[tuple[str, list[_Unstored]]] = []
        self._nbytes = 0

    def message(
        self, contents: Contents, kind: type[object] | None, attributes: MetaInfo
    ) -> Message:
        """Return the message of one batch."""
        store, row_map = self.store, None
        unstored: list[_Unstored] = []
        small: list[_Unstored] = []

        def pack(key: str, column: columns.Column) -> columns.RemoteColumn:
            nonlocal row_map
            if columns.is_remote(column):
                return _packed_remote(key, column, store)
            if row_map is None:
                row_map = storage.RowMap.of_shard(storage.Shard.new(contents.rows, self._origin))
            value = columns.local_value(column)
            spec, payload, nbytes = columns.encode(value, key, narrow=not store.in_process)
            made = columns.RemoteColumn(spec, row_map, ())
            if not row_map.shards:
                return made
            if nbytes <= message.INLINE_BYTES or spec.kind == "raw":
                small.append((made, payload, nbytes, None))
                return made
            # The handles of a result are complete only in the process that receives it.
            source = _source(value, nbytes, store) if self._origin is storage.CONTROLLER else None
            if source and (handle := _unchanged(source, payload)):
                made.handles = (handle,)
            else:
                unstored.append((made, payload, nbytes, source))
            return made

        packed = message_of(contents, kind, attributes, pack, store.in_process)
        unstored += self._not_in_message(small)
        if unstored:
            self._waiting.append((self.reader, unstored))
            self._nbytes += sum(nbytes for _, _, nbytes, _ in unstored)
            if self._nbytes > TOGETHER_BYTES:
                self.store_fields()
        return packed

    def _not_in_message(self, fields: Sequence[_Unstored]) -> list[_Unstored]:
        """Give fields their bytes, which are sent in the message. Return the fields to be stored:
        those above `TINY_BYTES`, if all together are large.

        In the message they would be stored with the call, and the rank would fetch all of them
        before the call starts. As fields of the store they are fetched when they are read.
        """
        unstored: list[_Unstored] = []
        total = sum([nbytes for column, _, nbytes, _ in fields if column.spec.kind != "raw"])
        is_call = self._origin is storage.CONTROLLER and not self.store.in_process
        for field in fields:
            column, payload, nbytes, _ = field
            small = nbytes <= TINY_BYTES or column.spec.kind == "raw"
            if is_call and total > MESSAGE_BYTES and not small:
                unstored.append(field)
                continue
            # The payload may share memory with a live tensor: it is pickled later or never.
            if self.store.in_process or not has_raw_rows(column.spec):
                payload = storage.snapshot(payload)
            column.handles = (storage.LocalHandle(payload, nbytes),)
        return unstored

    def store_fields(self) -> None:
        """Put the large fields into the store. Until then the messages cannot be sent."""
        # One call for fields of messages to one node: a store may put them into one object.
        for unstored in _shared(self._waiting):
            # What is kept is an object of its own, so that keeping it keeps nothing else.
            together = [entry for entry in unstored if entry[3] is None]
            alone = [[entry] for entry in unstored if entry[3] is not None]
            for group in filter(None, [together, *alone]):
                handles = self.store.put_many(
                    [(payload, nbytes) for _, payload, nbytes, _ in group]
                )
                for (column, _, nbytes, source), handle in zip(group, handles, strict=True):
                    column.handles = (handle,)
                    if source:
                        _keep(source, handle)
                    storage.traffic.add(stored_bytes=nbytes, stored_objects=1)
        self._waiting, self._nbytes = [], 0


def _source(value: object, nbytes: int, store: storage.Store) -> _Source | None:
    large = nbytes > SHARED_BYTES and not store.in_process
    if not large or type(value) is not Tensor or value.is_nested or value.device.type != "cpu":
        return None
    session = getattr(store, "session", id(store))
    return value.untyped_storage(), (session, value.storage_offset(), value.shape, value.stride())


def _unchanged(source: _Source, payload: Any) -> storage.Handle | None:
    """Return the handle of the same bytes; None if they are not stored, or have changed.

    They are compared because nothing counts all writes: torch counts those through tensors, but not
    those through `x.numpy()`. Comparing takes less than half as long as storing.
    """
    memory, place = source
    with _sent_lock:
        handle = _sent.get(memory, {}).get(place)
    try:
        stored: Any = None if handle is None else handle.fetch()
    except LostObjectError:
        return None
    if stored is None or stored.dtype != payload.dtype:
        return None
    return handle if not _compare(stored.ctypes.data, payload.ctypes.data, payload.nbytes) else None


def _keep(source: _Source, handle: storage.Handle) -> None:
    if handle.nbytes > SENT_BYTES:
        return
    with _sent_lock:
        kept = sum(h.nbytes for handles in _sent.values() for h in handles.values())
        if kept + handle.nbytes > SENT_BYTES:
            _sent.clear()
        _sent.setdefault(source[0], {})[source[1]] = handle


def _packed_remote(
    key: str, column: columns.RemoteColumn, store: storage.Store
) -> columns.RemoteColumn:
    """Return a remote column as it is sent in a call or a result.

    References are sent as they are. Bytes that are in this process are sent in the message if they
    are few; otherwise they are put into `store`, once for all messages that need them.
    """
    if store.in_process or storage.LocalHandle not in set(map(type, column.handles)):
        return column.unread()
    if column.has_local_payloads() and column.nbytes() <= message.INLINE_BYTES:
        return columns.without_unused_rows(key, column)
    raw = column.spec.kind == "raw"
    handles = [handle if raw else _in_store(handle, store) for handle in column.handles]
    return columns.RemoteColumn(column.spec, column.row_map, tuple(handles))


def _in_store(handle: storage.Handle, store: storage.Store) -> storage.Handle:
    """Return a handle of the same value in `store`, if this process holds it and it is large."""
    if not isinstance(handle, storage.LocalHandle) or handle.nbytes <= message.INLINE_BYTES:
        return handle
    session = getattr(store, "session", id(store))
    if handle.stored is None or handle.stored[0] != session:
        storage.traffic.add(stored_bytes=handle.nbytes, stored_objects=1)
        handle.stored = session, store.put(handle.value, handle.nbytes)
    return handle.stored[1]


def _shared(waiting: Sequence[tuple[str, list[_Unstored]]]) -> list[list[_Unstored]]:
    """Join the fields of messages that share objects: small ones in a row, to the same node.

    With SHARED_BYTES = 1 MiB, messages to nodes a and b, sizes in MiB:

        a 0.3    a 0.3    a 5    a 0.3    b 0.3    "" 0.3    "" 0.3
        └─ one object ┘   one    one      one      one       one
    """
    objects: list[list[_Unstored]] = []
    last, count = "", 0
    for reader, unstored in waiting:
        small = sum([nbytes for _, _, nbytes, _ in unstored]) <= SHARED_BYTES
        if small and reader and reader == last and count < SHARED_MESSAGES:
            objects[-1] += unstored
            count += 1
        else:
            objects.append(unstored)
            last, count = reader if small else "", 1
    return objects


def pack_arguments(
    values: Iterable[object],
    store: storage.Store | None = None,
    readers: Sequence[str] | None = None,
) -> list[object]:
    """Pack the arguments of a call on the controller.

    Local fields above the inline limit are put into `store` (that of the ranks' backend; the
    current one if None), so a part that several ranks share must be packed once. `readers`:
    the node of the only rank that receives each value, "" if there are several.
    """
    packer = Packer(storage.CONTROLLER, store or storage.current_store())
    packed = []
    for i, value in enumerate(values):
        packer.reader = readers[i] if readers else ""
        packed.append(_pack(value, packer))
    packer.store_fields()
    return packed


def pack_argument(value: object, store: storage.Store | None = None) -> object:
    """Pack one argument on the controller, as `pack_arguments` does."""
    return pack_arguments([value], store)[0]


def pack_result(
    value: object, origin: storage.Origin, store: storage.Store | None = None
) -> object:
    """Pack a result in the worker.

    Fields above the inline limit are put into `store` (the current one if None). Fields that the
    method received and did not read are sent as the references that they were.
    """
    packer = Packer(origin, store or storage.current_store())
    packed = _pack(value, packer)
    packer.store_fields()
    return packed


def wait_for_arguments(values: Iterable[object]) -> None:
    """Wait for all futures among the arguments of a call, before the first of them is unpacked.

    Raises the first failure of any of them, also while another will never return. Finds futures
    wherever `unpack_argument` does.
    """
    found: list[DataProtoFuture] = []

    def note(value: object) -> None:
        if isinstance(value, DataProtoFuture):
            found.append(value)

    for value in values:
        storage.walk(value, note)
    if len(found) > 1:
        found[0].wait_all(found)


def unpack_argument(value: object) -> Any:
    """Unpack an argument in the worker. Waits for futures.

    Fetches no field of a `DataProto` and all fields of a plain `TensorDict`.
    """
    return storage.walk(value, _unpack_leaf)


unpack_result = unpack_argument
"""Unpack a result on the controller, in the same way."""


def _pack(value: object, packer: Packer) -> object:
    if isinstance(value, DataProto):  # without the walk, which costs as much as a small batch
        return _pack_leaf(value, packer)
    return storage.walk(value, partial(_pack_leaf, packer=packer))


def _pack_leaf(value: object, packer: Packer) -> object:
    if isinstance(value, DataProto):
        return packer.message(value.contents, *class_and_attributes(value))
    # A TensorDict without batch dimensions has no rows; `encode_leaf` sends it as a single value.
    if isinstance(value, TensorDictBase) and value.batch_dims:
        return packer.message(DataProto.from_tensordict(value).contents, TensorDict, {})
    return columns.encode_leaf(value, private=packer.store.in_process)


def _unpack_leaf(value: object) -> object:
    if isinstance(value, Message):
        return from_message(value)
    if isinstance(value, DataProtoFuture):
        return value.get()
    return columns.decode_leaf(value)


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a batch; `uneven`: lengths may differ by one."""

    index: int
    count: int
    uneven: bool

    def of(self, batch: DataProto | TensorDictBase) -> DataProto | TensorDictBase:
        """Return this part of a batch, as a value of the same type.

        Raises `FieldError` if the value is no batch.
        """
        if not isinstance(batch, DataProto | TensorDictBase):
            raise FieldError(
                "a part of a future is rows of a DataProto or TensorDict, got "
                f"{type(batch).__name__}; use the future itself, which any rank can receive"
            )
        whole = _as_dataproto(batch)
        bounds = storage.chunk_bounds(
            len(whole), self.count, self.uneven or whole.is_padding_enabled()
        )
        part = whole.slice(bounds[self.index], bounds[self.index + 1])
        return part if isinstance(batch, DataProto) else part.to_tensordict()


class DataProtoFuture(PendingValue):
    """A batch that ranks may still be computing.

    `get()` waits and joins; `chunk` and `concat` do not wait. A future, or a part of one, can be an
    argument of any registered method: the receiving worker gets the batch, and only the rows and
    fields that it reads are fetched.
    """

    def __init__(
        self,
        pending: Sequence[PendingValue],
        collect_fn: Callable[[list[Any]], Any] | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        """`pending`: what to wait for, in order. `collect_fn`: joins the results to one batch
        (`DataProto.concat` if None); must be picklable. `parts`: the part of the batch that this
        future is, from the outermost split to the innermost."""
        # A tuple, so that all parts of a future share one: a list each would be n² entries.
        self.pending = tuple(pending)
        self.collect_fn = collect_fn
        self.parts = parts

    def get(self, timeout: float | None = None) -> Any:
        """Wait for all results at once, join them and return this part.

        Raises the first failure of any rank, also while other ranks are still running, and
        `CallTimeoutError` after `timeout` seconds; the call goes on, and `get` may be called again.
        Raises `ProtocolError` for a timeout that is no number of 0 or more.
        """
        self.wait_all([self], timeout)
        return self._joined([pending.result() for pending in self.pending])

    result = get

    def done(self) -> bool:
        """Return whether `get` returns or raises without waiting for a rank.

        On Ray that is the case when all ranks have ended, when one of them has failed, after the
        deadline of the call, and while a watched group is broken.
        """
        kinds = _by_kind(_leaves(self.pending))
        return all(kind.all_done(pendings) for kind, pendings in kinds.items())

    def cancel(self) -> bool:
        """Drop the results of calls that have not ended.

        On Ray, a rank with coroutine methods ends its call; another rank runs it to the end, now or
        when its turn comes. Returns whether a result was dropped: `get` then raises.
        """
        dropped = [pending.cancel() for pending in _leaves(self.pending)]
        return any(dropped)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result in a thread, so that the event loop goes on."""
        return in_thread(self.get).__await__()

    @staticmethod
    def wait_all(values: Sequence[DataProtoFuture], timeout: float | None = None) -> None:
        """Wait for the results of several futures at once. Raises the first failure of any, and
        `ProtocolError` for a timeout that is no number of 0 or more."""
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 <= timeout < math.inf
        ):
            raise ProtocolError(
                f"timeout: expected a number of seconds, 0 or more, or None, got {timeout!r}"
            )
        expires = None if timeout is None else time.monotonic() + timeout
        for kind, pendings in _by_kind(_leaves(values)).items():
            left = None if expires is None else max(0.0, expires - time.monotonic())
            kind.wait_all(pendings, timeout=left)

    def arrived(self) -> DataProto | None:
        """Return the batch if all ranks have returned it and this process knows that, else None.

        Fetches nothing.
        """
        packed = [pending.value_here for pending in self.pending]
        if not all(isinstance(p, Message) and p.kind is not TensorDict for p in packed):
            return None
        joined = self._joined(packed)
        return joined if isinstance(joined, DataProto) else None

    def _joined(self, packed: Sequence[object]) -> Any:
        results = [unpack_result(value) for value in packed]
        joined = _join(results) if self.collect_fn is None else self.collect_fn(results)
        # chunk(2)[1].chunk(3)[0] has parts (1 of 2), (0 of 3): the outermost split comes first.
        for part in self.parts:
            joined = part.of(joined)
        return joined

    def chunk(self, chunks: int, uneven: bool = False) -> list[DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting.

        A length that does not divide raises `LengthError` when a part is read, unless `uneven` is
        set or padding is enabled in this process or for the batch.
        """
        if chunks < 1:
            raise LengthError(f"expected at least 1 part to split a batch into, got {chunks}")
        uneven = uneven or DataProtoConfig.auto_padding
        parts = [Part(i, chunks, uneven) for i in range(chunks)]
        return [
            DataProtoFuture(self.pending, self.collect_fn, (*self.parts, part)) for part in parts
        ]

    @property
    def part(self) -> Part:
        """The innermost split: which part this future is of `whole()`."""
        return self.parts[-1] if self.parts else Part(0, 1, uneven=True)

    def whole(self) -> DataProtoFuture:
        """Return the future from which `chunk` made this one; itself if it is no part."""
        whole = copy.copy(self)
        whole.parts = self.parts[:-1]
        return whole

    def split(self, like: Part) -> list[Any]:
        """Wait for the results and return all parts of the split to which `like` belongs.

        A split into one part returns the value itself, which need not be a batch.
        """
        joined = self.get()
        if like.count == 1:
            return [joined]
        return [Part(i, like.count, like.uneven).of(joined) for i in range(like.count)]

    @staticmethod
    def concat(data: Sequence[PendingValue]) -> DataProtoFuture:
        """Return one future of several futures or pending results, in order, without waiting."""
        if not data:
            raise LengthError("concat: expected at least one future, got an empty list")
        return DataProtoFuture(data)

    def __deepcopy__(self, memo: dict[int, object]) -> DataProtoFuture:
        return self  # a future names a result; a copy would name the same result

    def __repr__(self) -> str:
        path = "".join(f", part {part.index} of {part.count}" for part in self.parts)
        return f"DataProtoFuture({len(self.pending)} results{path})"


def _leaves(values: Sequence[PendingValue]) -> Iterator[PendingValue]:
    """Yield the results of ranks that futures, and futures of futures, wait for."""
    for value in values:
        if isinstance(value, DataProtoFuture):
            yield from _leaves(value.pending)
        else:
            yield value


def as_completed(
    futures: Iterable[DataProtoFuture], timeout: float | None = None
) -> Iterator[DataProtoFuture]:
    """Yield futures in the order in which they end, failed ones included.

    Raises `CallTimeoutError` if some have not ended `timeout` seconds after the first iteration.
    """
    expires = None if timeout is None else time.monotonic() + timeout
    waiting = list(futures)
    while waiting:
        left = None if expires is None else max(0.0, expires - time.monotonic())
        if not wait_until(partial(_any_done, waiting), left):
            raise CallTimeoutError(f"{len(waiting)} futures have no result after {timeout:g} s")
        ended = [future.done() for future in waiting]
        yield from [future for future, end in zip(waiting, ended, strict=True) if end]
        waiting = [future for future, end in zip(waiting, ended, strict=True) if not end]


def _any_done(futures: Sequence[DataProtoFuture]) -> bool:
    return any(future.done() for future in futures)


def _by_kind(pendings: Iterable[PendingValue]) -> dict[type[PendingValue], list[PendingValue]]:
    """Return class → its pending values."""
    kinds: dict[type[PendingValue], list[PendingValue]] = {}
    for pending in pendings:
        kinds.setdefault(type(pending), []).append(pending)
    return kinds


def _join(results: list[Any]) -> Any:
    """Concatenate batches along their rows."""
    if not all(isinstance(result, DataProto | TensorDictBase) for result in results):
        kinds = ", ".join(sorted({type(result).__name__ for result in results}))
        raise FieldError(f"a future joins results of type DataProto or TensorDict, got {kinds}")
    joined = DataProto.concat([_as_dataproto(result) for result in results])
    batches = all(isinstance(result, DataProto) for result in results)
    return joined if batches else joined.to_tensordict()


def _as_dataproto(value: DataProto | TensorDictBase) -> DataProto:
    return value if isinstance(value, DataProto) else DataProto.from_tensordict(value)
