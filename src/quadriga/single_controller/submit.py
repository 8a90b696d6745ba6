"""One call through a group: split, pack, send; then gather, unpack, join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quadriga.errors import DispatchError, LengthError, WorkerDiedError
from quadriga.single_controller.backend import RankSet
from quadriga.single_controller.call import Call, CallView, Collector, Pending
from quadriga.single_controller.tensor_modules import shipping_for
from quadriga.single_controller.watch import raise_if_broken

if TYPE_CHECKING:
    from quadriga.single_controller.bound_method import BoundMethod
    from quadriga.single_controller.worker_group import WorkerGroup

Part = tuple[tuple[Any, ...], dict[str, Any]]
Collect = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class StartedCall:
    """A call whose parts are on their way."""

    ranks: RankSet
    pendings: Sequence[Pending]
    collector: Collect

    def wait(self) -> Any:
        """Wait for every rank and join. Raises what a worker raised."""
        outputs = self.ranks.backend.gather(self.pendings)
        return self.collector(unpack(outputs))

    def future(self) -> Any:
        """A `DataProtoFuture` of the joined value."""
        from quadriga.protocol import DataProtoFuture

        return DataProtoFuture(list(self.pendings), self.collector)


def start(
    group: WorkerGroup, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StartedCall:
    """Split the arguments of a registered method as its mode says, and send them."""
    record = method.record
    dispatch, execute = record.current_dispatch, record.current_execute
    view = CallView(group, (), method.label)
    view.ranks = (dispatch.ranks or execute.ranks)(view)
    if execute.single:
        view.memo["single"] = True
    split = dispatch.dispatch_fn(view, *args, **kwargs)
    parts = parts_of_ranks(view, split)
    targets = list(view.ranks)
    ranks = group._ranks
    calls = _calls(ranks, method.role, record.name, parts, record.materialize_futures)
    timeout = method.call_options.timeout or ranks.timeout
    pendings = _submit(ranks, method.label, targets, calls, timeout)
    return StartedCall(ranks, pendings, Collector(dispatch.collect_fn, view, execute.single))


def send_by_name(
    ranks: RankSet, role: str, method: str, targets: list[int], parts: Sequence[Part]
) -> list[Pending]:
    """Send one call by name; `parts[i]` are the arguments of rank `targets[i]`."""
    calls = _calls(ranks, role, method, parts, True)
    return list(_submit(ranks, f"{role}.{method}", targets, calls, ranks.timeout))


def unpack(outputs: list[Any]) -> list[Any]:
    """What the ranks sent back, as the controller uses it."""
    shipping = shipping_for(outputs)
    if shipping is None:
        return outputs
    return [value if value is None else shipping.unpack_result(value) for value in outputs]


def _submit(
    ranks: RankSet,
    label: str,
    targets: Sequence[int],
    calls: Sequence[Call],
    timeout: float | None,
) -> Sequence[Pending]:
    raise_if_broken()
    if ranks.broken:
        raise WorkerDiedError(f"{label} cannot be called: {ranks.broken}", method=label)
    try:
        return ranks.backend.submit(ranks, targets, calls, timeout)
    except (TypeError, AttributeError) as error:
        if "pickle" not in str(error) and "serialize" not in str(error):
            raise
        raise DispatchError(
            f"{label}: an argument cannot be sent to the workers: {str(error).splitlines()[0]}. "
            "Pass data that can be pickled, or let the worker build the object itself."
        ) from error


def parts_of_ranks(view: CallView, split: Any) -> list[Part]:
    """The arguments of each executing rank, from one list per argument."""
    try:
        args, kwargs = split
        columns = [*args, *kwargs.values()]
    except (TypeError, ValueError, AttributeError):
        raise DispatchError(
            f"{view.method}: a dispatch function returns (args, kwargs), got {split!r}."
        ) from None
    n = len(view.ranks)
    if not columns:
        return [((), {})] * n
    rows = [_rows(view, column) for column in columns]
    cut = len(args)
    names = list(kwargs)
    return [
        (tuple(r[i] for r in rows[:cut]), {k: r[i] for k, r in zip(names, rows[cut:], strict=True)})
        for i in range(n)
    ]


def _rows(view: CallView, column: Any) -> Sequence[Any]:
    """One entry per executing rank, from a list for those or for all ranks of the group."""
    if not isinstance(column, list | tuple):
        raise DispatchError(
            f"{view.method}: a dispatch function returns each argument as a list with one entry "
            f"per rank, got {type(column).__name__}."
        )
    if len(column) == len(view.ranks):
        return column
    if len(column) == view.world_size:
        return [column[rank] for rank in view.ranks]
    raise LengthError(
        f"{view.method}: an argument was split into {len(column)} parts for {len(view.ranks)} "
        f"executing ranks of {view.world_size}."
    )


def _calls(
    ranks: RankSet, role: str, method: str, parts: Sequence[Part], materialize: bool
) -> list[Call]:
    """One call per part. Equal parts become one object, an argument object is packed once."""
    first_args, first_kwargs = parts[0]
    if not first_args and not first_kwargs:
        return [Call(role, method)] * len(parts)
    packer = _Packer(ranks, parts)
    calls: dict[tuple[int, ...], Call] = {}
    result = []
    for args, kwargs in parts:
        key = (*map(id, args), *map(id, kwargs.values()))
        call = calls.get(key)
        if call is None:
            call = calls[key] = Call(
                role,
                method,
                tuple(map(packer, args)),
                {name: packer(value) for name, value in kwargs.items()},
                materialize,
            )
        result.append(call)
    return result


class _Packer:
    """Packs each distinct argument object of a call once."""

    def __init__(self, ranks: RankSet, parts: Sequence[Part]) -> None:
        values = [value for args, kwargs in parts for value in (*args, *kwargs.values())]
        shipping = shipping_for(values)
        self._pack = None
        if shipping is not None:
            self._pack = partial(shipping.pack_argument, store=ranks.backend.store)
        self._share = ranks.backend.share
        self._packed: dict[int, Any] = {}
        self._uses: dict[int, int] = {}
        for value in values:
            self._uses[id(value)] = self._uses.get(id(value), 0) + 1

    def __call__(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float):
            return value
        key = id(value)
        if key not in self._packed:
            packed = value if self._pack is None else self._pack(value)
            self._packed[key] = self._share(packed, value) if self._uses[key] > 1 else packed
        return self._packed[key]
