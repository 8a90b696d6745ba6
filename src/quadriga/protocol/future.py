"""`DataProtoFuture`: a result that is still being computed, or that lies in workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.config import DataProtoConfig
from quadriga.protocol.dataproto import DataProto, from_message
from quadriga.protocol.message import Message
from quadriga.protocol.values.nested import decode_leaf, walk
from quadriga.protocol.values.row_selection import chunk_bounds


@runtime_checkable
class PendingValue(Protocol):
    """One rank's reply. Picklable; `result()` waits for it and raises the worker's error.

    A class that may know its reply without waiting has an attribute `arrived`, None until then.
    """

    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a batch; `uneven` when the process that cut it allows padding."""

    index: int
    count: int
    uneven: bool

    def of(self, batch: Any) -> Any:
        """This part of a batch, as what the batch is."""
        whole = as_dataproto(batch)
        bounds = chunk_bounds(len(whole), self.count, self.uneven or whole.is_padding_enabled())
        part = whole.slice(bounds[self.index], bounds[self.index + 1])
        return part if isinstance(batch, DataProto) else part.to_tensordict()


class DataProtoFuture:
    """A batch that is not here yet. `get()` waits and joins; `chunk` and `concat` do not wait.

    `pending`: what to wait for, in order. `collect_fn`: joins the replies into one batch
    (`DataProto.concat` when None); it must be picklable, because a future, or a part of one, can
    be an argument of any registered method: the receiving worker gets the real batch, and only the
    rows and fields that it reads travel.
    """

    def __init__(
        self,
        pending: Sequence[PendingValue],
        collect_fn: Callable[[list[Any]], Any] | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.pending = list(pending)
        self.collect_fn = collect_fn
        self.parts = parts

    def get(self) -> Any:
        """Waits for every reply, joins them and takes this part. Raises the first error."""
        return self._joined([pending.result() for pending in self.pending])

    result = get

    def arrived(self) -> DataProto | None:
        """The batch, if all of it was made and is known here; None otherwise. Fetches nothing."""
        replies = [getattr(pending, "arrived", None) for pending in self.pending]
        if not all(isinstance(r, Message) and r.kind is not TensorDict for r in replies):
            return None
        joined = self._joined(replies)
        return joined if isinstance(joined, DataProto) else None

    def _joined(self, values: Sequence[Any]) -> Any:
        replies = [unpacked(value) for value in values]
        joined = join(replies) if self.collect_fn is None else self.collect_fn(replies)
        for part in self.parts:
            joined = part.of(joined)
        return joined

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` futures, one a part, without waiting. A length that does not divide raises
        `LengthError` when a part is read, unless padding is enabled here or on the batch."""
        if chunks < 1:
            raise LengthError(f"a batch is cut into at least 1 part; got {chunks}")
        parts = [Part(i, chunks, DataProtoConfig.auto_padding) for i in range(chunks)]
        return [
            DataProtoFuture(self.pending, self.collect_fn, (*self.parts, part)) for part in parts
        ]

    @staticmethod
    def concat(data: Sequence[PendingValue]) -> DataProtoFuture:
        """One future of many (futures or pending replies), rows in order, without waiting."""
        if not data:
            raise LengthError("concat needs at least one future; got an empty list")
        return DataProtoFuture(data)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProtoFuture:
        return self  # a name of a result; a copy of it names the same

    def __repr__(self) -> str:
        path = "".join(f", part {part.index} of {part.count}" for part in self.parts)
        return f"DataProtoFuture({len(self.pending)} replies{path})"


def join(replies: list[Any]) -> Any:
    """Batches joined along their rows; one reply that is no batch as it is."""
    if all(isinstance(r, DataProto) for r in replies):
        return DataProto.concat(replies)
    if all(isinstance(r, DataProto | TensorDictBase) for r in replies):
        joined = DataProto.concat([as_dataproto(r) for r in replies])
        return joined.to_tensordict()
    kinds = ", ".join(sorted({type(r).__name__ for r in replies}))
    raise FieldError(f"a future joins DataProto or TensorDict replies; got {kinds}")


def as_dataproto(value: Any) -> DataProto:
    """A `DataProto` as it is, a `TensorDict` turned into one."""
    return value if isinstance(value, DataProto) else DataProto.from_tensordict(value)


def unpacked(value: Any) -> Any:
    """What crossed a process border, as its receiver uses it; waits for futures inside."""
    return walk(value, _unpack_leaf)


def _unpack_leaf(value: Any) -> Any:
    if isinstance(value, Message):
        return from_message(value)
    if isinstance(value, DataProtoFuture):
        return value.get()
    return decode_leaf(value)
