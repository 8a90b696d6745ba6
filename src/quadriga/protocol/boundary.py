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
import math
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from quadriga.errors import CallTimeoutError, FieldError, LengthError, ProtocolError
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
from quadriga.protocol.dataproto import (
    PADDING_FIELD,
    DataProto,
    DataProtoConfig,
    class_and_attributes,
    from_message,
)
from quadriga.protocol.encoding import decode_leaf, encode, encode_leaf
from quadriga.protocol.message import Inline, Message, has_raw_rows, message_of
from quadriga.protocol.rows import RowMap, chunk_bounds
from quadriga.protocol.storage import (
    CONTROLLER,
    Handle,
    Origin,
    Store,
    current_store,
    snapshot,
    traffic,
)
from quadriga.protocol.threads import in_thread
from quadriga.protocol.values import FieldSpec, LocalValue, Payload

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
    found: list[DataProtoFuture] = []

    def note(value: object) -> None:
        if isinstance(value, DataProtoFuture):
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
    if isinstance(value, DataProtoFuture):
        return value.get()
    return decode_leaf(value)


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Pauses between two looks at pending values whose class cannot wait for several."""


@runtime_checkable
class PendingValue(Protocol):
    """The result of one rank. Picklable.

    A class of pending values may also have

    - `arrived`: the packed result if this process knows it without waiting, else None;
    - `done() -> bool`: whether the result, or the error instead of it, exists;
    - `all_done(pendings) -> bool`, a static method: whether `wait_all(pendings)` returns or raises
      without waiting for a rank;
    - `cancel() -> bool`: drop the call if it has not started; False if it cannot be dropped;
    - `wait_all(pendings, timeout=None)`, a static method: wait for several at once, so that the
      first failure of any of them ends the wait. Raises `CallTimeoutError` after `timeout` seconds.
    """

    def result(self) -> Any:
        """Wait for the result. Raises the error of the worker."""


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
        bounds = chunk_bounds(len(whole), self.count, self.uneven or whole.is_padding_enabled())
        part = whole.slice(bounds[self.index], bounds[self.index + 1])
        return part if isinstance(batch, DataProto) else part.to_tensordict()


class DataProtoFuture:
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
        return all(_are_done(kind, pendings) for kind, pendings in kinds.items())

    def cancel(self) -> bool:
        """Drop the results of calls that have not ended.

        On Ray, a rank with coroutine methods ends its call; another rank runs it to the end, now or
        when its turn comes. Returns whether a result was dropped: `get` then raises.
        """
        dropped = list(map(_cancel, _leaves(self.pending)))
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
            wait_all = getattr(kind, "wait_all", None)
            if wait_all is not None:
                wait_all(pendings, timeout=left)
            elif timeout is not None and expires is not None:
                _poll(pendings, expires, timeout)

    def arrived(self) -> DataProto | None:
        """Return the batch if all ranks have returned it and this process knows that, else None.

        Fetches nothing.
        """
        packed = [getattr(pending, "arrived", None) for pending in self.pending]
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
    waiting, pause = list(futures), _FIRST_PAUSE_S
    while waiting:
        late = expires is not None and time.monotonic() >= expires
        ended = [future.done() for future in waiting]
        yield from [future for future, end in zip(waiting, ended, strict=True) if end]
        waiting = [future for future, end in zip(waiting, ended, strict=True) if not end]
        if any(ended):
            pause = _FIRST_PAUSE_S
        elif late:
            raise CallTimeoutError(f"{len(waiting)} futures have no result after {timeout:g} s")
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _by_kind(pendings: Iterable[PendingValue]) -> dict[type, list[PendingValue]]:
    """Return class → its pending values."""
    kinds: dict[type, list[PendingValue]] = {}
    for pending in pendings:
        kinds.setdefault(type(pending), []).append(pending)
    return kinds


def _are_done(kind: type, pendings: Sequence[PendingValue]) -> bool:
    all_done: Callable[[Sequence[PendingValue]], bool] | None = getattr(kind, "all_done", None)
    return all(map(_is_done, pendings)) if all_done is None else all_done(pendings)


def _is_done(pending: PendingValue) -> bool:
    done: Callable[[], bool] | None = getattr(pending, "done", None)
    return True if done is None else done()


def _cancel(pending: PendingValue) -> bool:
    cancel: Callable[[], bool] | None = getattr(pending, "cancel", None)
    return False if cancel is None else cancel()


def _poll(pendings: Sequence[PendingValue], expires: float, timeout: float) -> None:
    """Wait until `expires`. `timeout`: the limit of the caller, of which a part may have passed."""
    pause = _FIRST_PAUSE_S
    while not all(map(_is_done, pendings)):
        if time.monotonic() >= expires:
            raise CallTimeoutError(
                f"The future has no result after {timeout:g} s. The call goes on."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _join(results: list[Any]) -> Any:
    """Concatenate batches along their rows."""
    if all(isinstance(result, DataProto) for result in results):
        return DataProto.concat(results)
    if all(isinstance(result, DataProto | TensorDictBase) for result in results):
        joined = DataProto.concat([_as_dataproto(result) for result in results])
        return joined.to_tensordict()
    kinds = ", ".join(sorted({type(result).__name__ for result in results}))
    raise FieldError(f"a future joins results of type DataProto or TensorDict, got {kinds}")


def _as_dataproto(value: DataProto | TensorDictBase) -> DataProto:
    return value if isinstance(value, DataProto) else DataProto.from_tensordict(value)
