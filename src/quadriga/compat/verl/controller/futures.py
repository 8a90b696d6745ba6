"""verl's `DataProtoFuture`: a batch made of Ray's object references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

from quadriga import protocol
from quadriga.backends.ray.submission import pending_values
from quadriga.errors import LengthError
from quadriga.protocol.boundary import PendingValue

CollectFn: TypeAlias = Callable[[list[Any]], Any]  # batches of a user's own classes
DispatchFn: TypeAlias = Callable[[Any], Any]  # likewise


class DataProtoFuture(protocol.DataProtoFuture):
    """A batch that ranks may still be computing, with the arguments of verl.

    Args:
        collect_fn: joins the objects of the references to one batch. `DataProto.concat` also joins
            TensorDicts.
        futures: Ray's references to batches, in order.
        dispatch_fn: makes the value of `get()` from the joined batch; None: the batch itself.
        others: references of other ranks of the call. They are not joined, but waited for: a rank
            that fails ends the wait for the ranks that it has a collective with.
    """

    def __init__(
        self,
        collect_fn: CollectFn,
        futures: Sequence[Any],  # references of Ray
        dispatch_fn: DispatchFn | None = None,
        others: Sequence[Any] = (),
    ) -> None:
        super().__init__(list(pending_values([*futures, *others])), collect_fn)
        self.futures = list(futures)
        self.dispatch_fn = dispatch_fn

    @staticmethod
    def concat(data: Sequence[Any]) -> protocol.DataProtoFuture:
        """Return one future of several references, or of several futures, without waiting."""
        if not data:
            raise LengthError("concat: expected at least one reference, got an empty list")
        if any(isinstance(value, PendingValue) for value in data):
            return protocol.DataProtoFuture.concat(data)
        return DataProtoFuture(protocol.DataProto.concat, data)

    def chunk(self, chunks: int, uneven: bool = False) -> list[protocol.DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting."""
        return [self._with_parts(part.parts) for part in super().chunk(chunks, uneven)]

    def _with_parts(self, parts: tuple[Any, ...]) -> Self:
        twin = type(self)(self.collect_fn or protocol.DataProto.concat, self.futures)
        twin.pending, twin.parts, twin.dispatch_fn = self.pending, parts, self.dispatch_fn
        return twin

    def _joined(self, packed: Sequence[object]) -> Any:
        given, self_parts = self.collect_fn, self.parts
        joined = protocol.DataProtoFuture(
            [], None if given is protocol.DataProto.concat else given
        )._joined(packed[: len(self.futures)])
        if self.dispatch_fn is not None:
            joined = self.dispatch_fn(joined)
        for part in self_parts:
            joined = part.of(joined)
        return joined
