"""`DataProtoFuture`: the result of a call that may not have returned yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.boundary import Deferred, unpack_result
from quadriga.protocol.dataproto import DataProto, DataProtoConfig
from quadriga.protocol.message import Message
from quadriga.protocol.values.rows import chunk_bounds


@runtime_checkable
class PendingValue(Protocol):
    """The result of one rank. Picklable.

    A class that may know its result without waiting has an attribute `arrived`: the packed result,
    None until it is known. A class that can wait for several results at once has a static method
    `wait_all(pendings)`, which raises the first failure of any of them.
    """

    def result(self) -> Any:
        """Wait for the result. Raises the error of the worker."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a batch; `uneven` if the process that split it allows padding."""

    index: int
    count: int
    uneven: bool

    def of(self, batch: DataProto | TensorDictBase) -> DataProto | TensorDictBase:
        """Return this part of a batch, as a value of the same type."""
        whole = _as_dataproto(batch)
        bounds = chunk_bounds(len(whole), self.count, self.uneven or whole.is_padding_enabled())
        part = whole.slice(bounds[self.index], bounds[self.index + 1])
        return part if isinstance(batch, DataProto) else part.to_tensordict()


class DataProtoFuture(Deferred):
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
        self.pending = list(pending)
        self.collect_fn = collect_fn
        self.parts = parts

    def get(self) -> Any:
        """Wait for all results at once, join them and return this part.

        Raises the first failure of any rank, also while other ranks are still running.
        """
        self.wait_all([self])
        return self._joined([pending.result() for pending in self.pending])

    result = get

    @staticmethod
    def wait_all(values: Sequence[Deferred]) -> None:
        """Wait for the results of several futures at once. Raises the first failure of any."""
        kinds: dict[type, list[PendingValue]] = {}
        for pending in _leaves(
            [future for future in values if isinstance(future, DataProtoFuture)]
        ):
            kinds.setdefault(type(pending), []).append(pending)
        for kind, pendings in kinds.items():
            wait_all = getattr(kind, "wait_all", None)
            if wait_all is not None:
                wait_all(pendings)

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

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting.

        A length that does not divide raises `LengthError` when a part is read, unless padding is
        enabled in this process or for the batch.
        """
        if chunks < 1:
            raise LengthError(f"expected at least 1 part to split a batch into, got {chunks}")
        parts = [Part(i, chunks, DataProtoConfig.auto_padding) for i in range(chunks)]
        return [
            DataProtoFuture(self.pending, self.collect_fn, (*self.parts, part)) for part in parts
        ]

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
