"""Sending calls to the actors of ranks: `RayCallBackend`.

A call is encoded once for all ranks that receive the same arguments, and every call of a submission
is encoded before the first is sent: an argument that cannot be pickled is an error before any rank
runs. How a call is sent depends on what it holds:

    numbers, short strings, batches of small fields    bytes: a pickle of tuples
    batches with fields in the store                   the same, and a list of their references
    anything else                                      `PickledCall`: bytes, buffers, references
    more than `BIG` in batches, or for a rank with     a reference to the call in the store
    coroutine methods
    an argument above `BIG` that several ranks get     a reference to the argument in the store

Calls that are more than plain data are pickled by cloudpickle. Code of the user's files that
workers cannot import by name is sent with what uses it.

Futures of which many ranks receive a part: one of them splits the batch for all.

A rank that receives part i of a future waits for all n results and takes its rows. For n receivers
these are n² references in the calls, and n² requests to the controller, which owns the results.
From `MANY` on, the first receiver gets another task before its call: it waits for the results once
and returns each part as an object of its own. With the results r0 … r3 and 4 receivers:

    each for itself    call 0 (part 0 of r0 r1 r2 r3)  …  call 3 (part 3 of r0 r1 r2 r3)     16
    one for all        rank 0: split (r0 r1 r2 r3) → p0 p1 p2 p3
                       call 0 (p0)  …  call 3 (p3)                                            8

Consumes: the calls of one submission. Produces: the same calls, with the futures of p0 … p3. The
other receivers wait for rank 0. The first failure of any result is the failure of every part.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import pickle
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import ray
from ray import cloudpickle

from quadriga.backends.ray.health import FailedCall, dead_ranks, died, rank_alive
from quadriga.backends.ray.row_store import RowHandleOnRay, StoreName, make_store
from quadriga.backends.ray.store import (
    RayHandle,
    RayStore,
    Result,
    is_future,
    is_plain_batch,
    packed_batch,
)
from quadriga.backends.ray.waiting import RayBatch, RayPending, RayPendings, pending_of
from quadriga.errors import DispatchError, WorkerError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.protocol.storage import Handle, LocalHandle, Transport, transports
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending, SharedArgument, private

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from quadriga.backends.ray.cluster import Ref

    Counted: TypeAlias = Ref | ActorHandle[object]
    from quadriga.backends.ray.cluster import RankActor, Ref, RemoteMethod
    from quadriga.protocol.boundary import DataProtoFuture, Part

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "")
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_seen: weakref.WeakSet[ModuleType] = weakref.WeakSet()
_latest: tuple[int, ModuleType | None] = (0, None)
"""At the last look: how many modules there were, and which had been loaded last."""


def send_code_of_loaded_files() -> None:
    """Have functions and classes of modules that were loaded by path pickled by value from now on.

    If the name of a module leads the importers to another file, or to none, the module exists in
    this process only, and a worker could not look up its functions and classes. The function looks
    again whenever modules have been loaded since, and at no module twice.
    """
    global _latest
    modules = sys.modules
    newest = len(modules), modules[next(reversed(modules))]
    if _latest == newest:
        return
    _latest = newest
    for name, module in list(modules.items()):
        if not isinstance(module, ModuleType) or module in _seen:
            continue
        _seen.add(module)
        file = module.__dict__.get("__file__")
        if file and _is_users(name, file) and getattr(_spec(name), "origin", None) != file:
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # untyped


def _is_users(name: str, file: str) -> bool:
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "quadriga":
        return False  # cloudpickle pickles what `__main__` defines by value without our help
    return os.path.isabs(file) and file.endswith(".py") and not file.startswith(_INSTALLED)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return what the importers find for a name, as if it had not been imported yet."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
        if spec is not None:
            return spec
    return None


@dataclass(slots=True)
class RayShared(SharedArgument):
    """A value in Ray's store. `label`: (role, method) if the value is a call."""

    ref: Ref
    label: tuple[str, str] = ("", "")

    def open(self) -> object:
        """Return the value. Arrays of the user's object are read-only: a method gets copies."""
        value: object = ray.get(self.ref)
        return value if isinstance(value, SharedArgument) else private(value)


@dataclass(slots=True)
class PickledCall(SharedArgument):
    """A call, or one argument, that was pickled here. The rank unpickles it, and not Ray.

    `buffers` are the large arrays of the call, which Ray sends without copying them. `refs` are the
    references and actor handles in it, which are not in the bytes. Ray must see them: it keeps an
    object or actor while a call needs it. One that it does not see being sent exists until this
    process ends.
    """

    label: tuple[str, str]
    """(role, method), for the error if the call cannot be unpickled."""
    data: bytes
    buffers: Sequence[pickle.PickleBuffer]
    refs: Sequence[Counted]

    @property
    def nbytes(self) -> int:
        """The size of the bytes and buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def open(self) -> object:
        """Return the call."""
        _unpickling.refs = self.refs
        # Buffers that Ray has received are read-only, and the method may write into its arrays.
        buffers = [b.raw() if isinstance(b, pickle.PickleBuffer) else b for b in self.buffers]
        try:
            return pickle.loads(self.data, buffers=map(bytearray, buffers))
        finally:
            _unpickling.refs = ()


class _Unpickling(threading.local):
    """The references and actor handles of the call that this thread unpickles."""

    refs: Sequence[Counted] = ()


class _Pickling(threading.local):
    """Whether this thread pickles a call."""

    active = False


_unpickling, _pickling = _Unpickling(), _Pickling()
# A batch inside an object of the user is sent as its references, and not as its bytes.
transports.append(Transport((), lambda: _pickling.active))


def _reference(index: int) -> Counted:
    return _unpickling.refs[index]


class _CallPickler(cloudpickle.Pickler):
    """Pickle a call. Its references and actor handles are collected in `refs` and replaced by their
    numbers."""

    def __init__(
        self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], None]
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # cloudpickle has no types
            file, protocol=5, buffer_callback=buffer_callback
        )
        self.refs: list[Counted] = []

    def reducer_override(self, value: object) -> Any:  # as cloudpickle returns it
        """Return how `value` is pickled. Called for every object that is not of a builtin type."""
        if isinstance(value, ray.ObjectRef | ray.actor.ActorHandle):
            self.refs.append(value)
            return _reference, (len(self.refs) - 1,)
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return value.copy().__reduce_ex__(5)  # the rank may write into it
        return super().reducer_override(value)  # type: ignore[no-untyped-call]  # cloudpickle


def pickled_call(call: Call) -> PickledCall:
    """Return a call that holds objects or code of the user, or much data.

    Raises `DispatchError` if an argument cannot be pickled.
    """
    send_code_of_loaded_files()
    call = replace(
        call,
        args=tuple(map(_top_level, call.args)),
        kwargs={name: _top_level(value) for name, value in call.kwargs.items()},
    )
    try:
        return _pickled(call, (call.role, call.method))
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DispatchError(
            f"{call.label}: an argument cannot be sent to the workers: {first_line}. Pass data "
            "that can be pickled, or let the worker build the object itself."
        ) from error


def _pickled(value: object, label: tuple[str, str]) -> PickledCall:
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _CallPickler(file, buffers.append)
    _pickling.active = True
    try:
        pickler.dump(value)  # type: ignore[no-untyped-call]  # cloudpickle has no types
    finally:
        _pickling.active = False
    return PickledCall(label, file.getvalue(), buffers, pickler.refs)


def shared_value(value: object) -> object:
    """Return a reference to an argument in the store, the argument if it cannot be pickled.

    `pickled_call` then raises the error, which names the call.
    """
    send_code_of_loaded_files()
    try:
        return RayShared(ray.put(_pickled(value, ("", ""))))
    except ray.exceptions.RayError:  # of the store
        raise
    except Exception:  # anything that the user's objects may raise when they are pickled
        return value


def _top_level(value: object) -> object:
    """Return an argument for a reference among the arguments that is opened by the rank.

    As in Ray itself, a method receives the object of a reference that is an argument, and the
    reference of one inside another argument.
    """
    return RayShared(value) if isinstance(value, ray.ObjectRef) else value


MANY = 256
"""Receivers × results of a future from which on one rank splits it. Below, the task that is saved
is worth more than the references."""

Splits: TypeAlias = "list[tuple[DataProtoFuture, Part]]"
"""Futures, and how each is split: any part of it."""
_Key: TypeAlias = tuple[int, Hashable]  # equal for the parts of one future


def split_futures(handles: Sequence[RankHandle], calls: Sequence[Call]) -> Sequence[Call]:
    """Return the calls with the futures that one rank splits replaced by their parts.

    Calls that receive futures themselves (`materialize=False`) are returned as they are, and so are
    futures inside lists and dicts.
    """
    if not calls[0].materialize:
        return calls
    futures = [
        value for call in calls for value in (*call.args, *call.kwargs.values()) if is_future(value)
    ]
    receivers = Counter(map(_key, futures))
    many = {
        _key(future): (future.whole(), future.part)
        for future in futures
        if receivers[_key(future)] * len(future.pending) >= MANY
    }
    if not many:
        return calls
    parts = dict(zip(many, _split(handles[0], calls[0].label, list(many.values())), strict=True))
    # Loaded, because there are futures.
    from quadriga.protocol.boundary import DataProtoFuture

    def part(value: object) -> object:
        if is_future(value) and _key(value) in parts:
            return DataProtoFuture([parts[_key(value)][value.part.index]], the_value)
        return value

    # By identity: ranks that receive the same call still do, so that it is encoded once.
    replaced = {
        id(call): replace(
            call,
            args=tuple(map(part, call.args)),
            kwargs={name: part(value) for name, value in call.kwargs.items()},
        )
        for call in calls
    }
    return [replaced[id(call)] for call in calls]


def _split(handle: RankHandle, label: str, splits: Splits) -> list[list[RayPending]]:
    """Have a rank split futures, all in one task: it must not wait for one while another fails.

    Return the parts of each.
    """
    send_code_of_loaded_files()
    counts = [part.count for _, part in splits]
    method = handle.native.quadriga_split.options(name=f"{label}: split", num_returns=sum(counts))
    sent = method.remote(splits)
    refs = iter([sent] if sum(counts) == 1 else sent)
    source = f"the split of a future for {label}, rank {handle.facts.rank} on {handle.facts.node}"
    return [[pending_of(ref, source) for ref in islice(refs, n)] for n in counts]


def the_value(values: Sequence[object]) -> object:
    """Return the value of a future with one result, as it is: not every value is a batch."""
    (value,) = values
    return value


def _key(future: DataProtoFuture) -> _Key:
    split = (*future.parts[:-1], future.part.count, future.part.uneven)
    return id(future.pending), (id(future.collect_fn), *split)


BIG = 100 * 1024
"""Bytes. Ray sends a smaller argument inside the call and stores a larger one once per call."""
SAMPLED_ITEMS = 64
"""How many items of a container are measured."""
_HANDLES = frozenset((RayHandle, RowHandleOnRay, LocalHandle))
"""Handles that `_encoded_data` can write."""
_SHORT = 1000
"""Length of a string that Python's pickler copies as fast as Ray's does."""


class RayCallBackend:
    """Implement `quadriga.single_controller.backend.CallBackend` on Ray actors."""

    def __init__(self, store: StoreName | RayStore = "auto") -> None:
        """`store`: how fields of another node are read, see `row_store.make_store`."""
        self.store = make_store(store)

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Submit one actor task per rank, named "role.method"."""
        label = calls[0].label
        handles = [ranks.handles[target] for target in targets]
        if any(map(is_future, (*calls[0].args, *calls[0].kwargs.values()))):
            calls = split_futures(handles, calls)
        fields: list[Sequence[Ref]] = []

        def send(handle: RankHandle, *arguments: object) -> Ref:
            method = handle.methods.get(label)
            if method is None:
                method = handle.methods[label] = RayMethod(handle.native, label)
            ref, apart = method.send(*arguments)
            fields.append(apart)
            return ref

        refs = send_to_ranks(ranks, handles, calls, send)
        batch = RayBatch(refs, handles, label, timeout, ranks, fields)
        ranks.in_flight.add(batch)
        return RayPendings(batch)

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return all results. The first failure of any of them is raised as soon as it is known."""
        if isinstance(pendings, RayPendings):
            return list(pendings.batch.gather())
        RayPending.wait_all([p for p in pendings if isinstance(p, RayPending)])
        return [pending.result() for pending in pendings]

    def share(self, packed: object, value: object) -> object:
        """Return `packed`, or a reference to it in the store if several ranks should not each get
        a copy. Batches are small here: their fields are in the store already."""
        return shared_value(packed) if estimate(value) > BIG else packed

    def is_alive(self, handle: RankHandle) -> bool:
        """Return whether the rank's process exists: Ray's record of the actor decides."""
        return rank_alive(handle)

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return those of many ranks whose process has ended, with one probe per node."""
        return dead_ranks(handles)

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """Return the error for a rank whose process has ended, with its last lines of output."""
        if not ray.is_initialized():
            return None
        labels = [batch.label for batch in list(ranks.in_flight) if batch.waits_for(handle)]
        idle = f"{'+'.join(ranks.roles)}."
        reason = ranks.broken or "its process has ended"
        return died(handle, labels[0] if labels else idle, reason)

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process at once."""
        ray.kill(handle.native)


def send_to_ranks(
    ranks: RankSet,
    handles: Sequence[RankHandle],
    calls: Sequence[Call],
    send: Callable[..., Ref],
) -> list[Ref]:
    """Send `calls[i]` to `handles[i]`. Return the references that `send` returns.

    Raises `DispatchError` if an argument cannot be pickled: no call was sent then. Raises
    `WorkerError` if a call cannot be sent.

    Args:
        send: `send(handle, what is sent, ticket if the rank has coroutine methods)`.
    """
    encoded: dict[tuple[int, bool], object] = {}
    sending: list[object] = []
    for handle, call in zip(handles, calls, strict=True):
        key = id(call), handle.facts.interleaves
        if key not in encoded:
            encoded[key] = encode(call, handle.facts.interleaves)
        sending.append(encoded[key])
    refs: list[Ref] = []
    failure: tuple[RankHandle, Exception] | None = None
    # Under the lock, every rank receives the calls of two threads in the same order. Else:
    #   rank 0 receives a, b;  rank 1 receives b, a
    # If both calls contain a collective, rank 0 waits in that of a and rank 1 in that of b.
    with ranks.lock:
        for handle, sent in zip(handles, sending, strict=True):
            ticket = (handle.next_ticket(),) if handle.facts.interleaves else ()
            try:
                refs.append(send(handle, sent, *ticket))
            except Exception as error:  # of Ray, or of an object that it pickles
                handle.take_ticket_back()
                failure = handle, error
                break
    if failure is not None:
        # Not under the lock: this waits for the ranks that have received the call.
        received = FailedCall(refs, handles[: len(refs)], (), calls[0].label)
        try:
            raise received.not_sent(failure[0], failure[1], ranks) from failure[1]
        finally:
            del failure  # it refers to this frame, and so to the arguments
    return refs


class RayMethod:
    """How one method of one rank is called. Kept by the handle: making one takes 20 µs."""

    __slots__ = ("_actor", "_apart", "_invoke", "_label", "objects")

    def __init__(self, actor: RankActor, label: str) -> None:
        self._actor, self._label = actor, label
        self._invoke = actor.quadriga_invoke.options(name=label)
        self._apart: tuple[int, RemoteMethod] | None = None
        self.objects: int | None = None
        """How many returns the fields of a result have filled (see `store`), None before the first
        result. A return that is not filled costs time, so a method without fields has none."""

    def send(self, *arguments: object) -> tuple[Ref, Sequence[Ref]]:
        """Submit the task; return the references to its result and to its returns of fields."""
        count = 1 if self.objects is None else self.objects
        if not count:
            return self._invoke.remote(*arguments), ()
        if self._apart is None or self._apart[0] != count:
            apart = self._actor.quadriga_invoke_apart
            self._apart = count, apart.options(name=self._label, num_returns=1 + count)
        refs = cast("list[Ref]", self._apart[1].remote(count, *arguments))
        return refs[0], refs[1:]

    def received(self, returned: object) -> None:
        """Note how many returns the fields of a result fill: the most of all results so far."""
        objects = returned.objects if isinstance(returned, Result) else 0
        if self.objects is None or objects > self.objects:
            self.objects = objects


def encode(call: Call, with_ticket: bool) -> object:
    """Return what is sent for a call.

    Raises `DispatchError` if an argument cannot be pickled. A call with a ticket must arrive soon
    after it was sent, because the calls after it wait for it (`rank_host.CallOrder`). Ray delivers
    a task when its large arguments have arrived, so they go to the store, and the rank fetches
    them. So do batches with much data in their messages, such as rows of objects: for an argument
    that Ray stores itself, it has more work than for one that was put into the store here.
    """
    sent = _encoded_data(call)
    if sent is not None:
        return sent
    pickled = pickled_call(call)
    values = (*call.args, *call.kwargs.values())
    fetched = with_ticket or any(packed_batch(value) is not None for value in values)
    if fetched and pickled.nbytes > BIG:
        return RayShared(ray.put(pickled), pickled.label)
    return pickled


def _encoded_data(call: Call) -> bytes | tuple[bytes, list[Ref]] | None:
    """Return what is sent for a call of plain data, in a tenth of cloudpickle's time.

        Call("actor", "update", (Message … Location(ref 7f…) … Location(ref a2…),))
          →  (b"… 0 … 1 …",  [ref 7f…, ref a2…])

    Nothing but tuples, texts, numbers and bytes is pickled, so no class is looked up by its name.
    Ray's own pickler, which calls Python for every object, sees the references only. The pair is
    one argument of the task: Ray takes 10 µs more for two. None for a call with objects, code or
    long texts of the user, or with much data in its messages.
    """
    refs: list[Ref] = []
    numbers: dict[int, int] = {}
    size = 0

    def flat_handle(handle: Handle) -> tuple[object, ...]:
        if not isinstance(handle, RayHandle):
            # A process that sends no batch does not load this module, and torch with it.
            from quadriga.protocol.message import flat_of_handle

            return flat_of_handle(handle)
        at = numbers.get(id(handle.location))
        if at is None:
            at = numbers[id(handle.location)] = len(refs)
            refs.append(handle.ref)
        return type(handle) is RowHandleOnRay, at, handle.location.node, handle.nbytes, handle.index

    values: list[object] = []
    for value in (*call.args, *call.kwargs.values()) if call.kwargs else call.args:
        batch = packed_batch(value)
        if batch is None:
            if not is_plain(value):
                return None
            values.append(value)
            continue
        nbytes = batch.data_bytes(_HANDLES)
        if nbytes is None or (size := size + nbytes) > BIG:
            return None
        values.append(batch.flat(flat_handle))
    names = tuple(call.kwargs)
    whole = call.role, call.method, values, names, call.materialize, call.step
    data = pickle.dumps(whole, protocol=5)
    if len(data) > BIG:
        return None
    return (data, refs) if refs else data


def is_plain(value: object) -> bool:
    """Return whether Python's own pickler can pickle a value as well as Ray's, in half the time.

    True for numbers, short strings and batches of small fields: they hold no reference, and no code
    that must be sent.
    """
    if type(value) in PLAIN_TYPES:
        return not isinstance(value, str | bytes) or len(value) < _SHORT
    return is_plain_batch(value)


def estimate(value: object, depth: int = 3) -> int:
    """Return the bytes of a value, roughly: strings, arrays, and containers of them."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if depth == 0 or not isinstance(value, list | tuple | dict | set):
        return sys.getsizeof(value, 0)
    items = list(value.values()) if isinstance(value, dict) else list(value)
    if not items:
        return 0
    # 1000 arrays of 1024 bytes: 64 of them have 65 536 bytes, so 65 536 · 1000 // 64 = 1 024 000.
    sample = items[:SAMPLED_ITEMS]
    return sum(estimate(item, depth - 1) for item in sample) * len(items) // len(sample)
