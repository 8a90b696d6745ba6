"""Sending calls to the actors of ranks, and waiting for their results.

A call is encoded once for all ranks that receive the same arguments, and every call of a submission
is encoded before the first is sent: an argument that cannot be pickled is an error before any rank
runs. How a call is sent depends on what it holds:

    numbers, short strings, batches of small fields    bytes: a pickle of tuples
    batches with fields in the store                   the same, and a list of their references
    anything else                                      `PickledCall`: bytes, buffers, references
    more than `BIG` in batches, or for a rank with     a reference to the call in the store
    coroutine methods
    an argument above `BIG` that several ranks get     a reference to the argument in the store

**Futures of which many ranks receive a part** are split by one of them. A rank that receives part i
of a future waits for all n results and takes its rows. For n receivers these are n² references in
the calls, and n² requests to the controller, which owns the results. From `MANY` on, the first
receiver gets another task before its call: it waits for the results once and returns each part as
an object of its own. With the results r0 … r3 and 4 receivers:

    each for itself    call 0 (part 0 of r0 r1 r2 r3)  …  call 3 (part 3 of r0 r1 r2 r3)     16
    one for all        rank 0: split (r0 r1 r2 r3) → p0 p1 p2 p3
                       call 0 (p0)  …  call 3 (p3)                                            8

The other receivers wait for rank 0. The first failure of any result is the failure of every part.

**The first failure of any rank ends a wait.** A `RayBatch` is the results of one submission. A wait
first asks Ray for everything at once, which is all that a short call needs. After `FIRST_WAIT_S` it
goes on in slices:

1. `ray.wait`: which results are here? Small ones and errors are here as soon as they exist. Large
   ones are pulled from their nodes; Ray goes on with such a pull between two slices, while
   `ray.get(timeout=…)` would cancel it at every slice.
2. Read those that are here.
3. Look at deadlines, at watched groups and, after `PROBE_S`, at the nodes.

Example: ranks 0, 1 and 2 return after 0.3, 0.7 and 1.2 s of the wait. The result of rank 1 is large
and on another node; its pull takes 0.6 s. Time is in seconds from the start of the slices:

    0.0 ─ 0.5   slice 1   rank 0 has returned, its value is read
    0.5 ─ 1.0   slice 2   rank 1 has returned, its value is remote: the pull starts at 1.0
    1.0 ─ 1.6   slice 3   rank 2 returns at 1.2; then only the pull is waited for, which ends at 1.6

**Garbage.** A full collection of Python's garbage visits every container object of the process.
torch, Ray and other libraries have half a million of them, which takes some tenths of a second, and
with a thousand ranks the objects of every second call are enough to start one. So the controller
starts them less often (`FULL_EVERY`), and runs one while it waits for ranks anyway. `gc.freeze()`
would hide the objects of libraries from the collector, but also every object of the user that
exists by then: a cycle of those would never be freed, and a dropped worker group is such a cycle.
"""

from __future__ import annotations

import gc
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from quadriga.backends.ray import health, store
from quadriga.backends.ray.pickling import BIG, RayShared, pickled_call, send_code_of_loaded_files
from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError
from quadriga.protocol.storage import PLAIN_TYPES, Handle, LocalHandle
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller.backend import RankHandle, RankSet, broken_groups, raise_if_broken
from quadriga.single_controller.dispatch import Call

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref, RemoteMethod
    from quadriga.protocol.boundary import DataProtoFuture, Part

logger = logging.getLogger("quadriga.controller")

FIRST_WAIT_S = 0.2
"""How long a wait asks Ray for everything at once, before it goes on in slices."""
SLICE_S = 0.5
"""Length of a slice: how long a failure of one rank may go unnoticed while others run."""
MIN_SLICE_S = 0.01
PROBE_S = 2.0
"""How often a wait asks the nodes."""
LOG_S = 60.0
"""How often a long wait logs which ranks it waits for."""

FULL_EVERY = 1000
"""In the controller, a full garbage collection follows so many collections of the middle
generation."""
IDLE_AFTER_S = 1.0
"""How long a wait must have lasted before a full collection is run in it."""
IDLE_EVERY_S = 30.0


@dataclass(eq=False)
class RayBatch(health.SentCall):
    """The results of one submission, one per rank.

    Consumes: the references of the tasks. Waits for: every rank, the first failure, the deadline,
    or a watched group that breaks. Unblocked by: any of these.
    """

    timeout: float | None = None
    """Seconds from the start to CallTimeoutError."""
    values: list[object] | None = None
    dropped: set[int] = field(default_factory=set)
    """Positions of results that were cancelled here, while their ranks run the call."""

    def __post_init__(self) -> None:
        self.started = self._logged = self._probed = time.monotonic()
        self.expires = None if self.timeout is None else self.started + self.timeout

    def gather(self) -> list[object]:
        """Return all values in order; wait for them once.

        Raises `WorkerMethodError` if a method raised, `WorkerDiedError` if a process has ended,
        `CallTimeoutError` if the deadline is exceeded.
        """
        if self.values is None:
            wait_for([self])
        assert self.values is not None
        self.raise_if_dropped()
        return self.values

    def raise_if_dropped(self) -> None:
        """Raise `WorkerMethodError` if one of the results was cancelled."""
        if self.dropped:
            raise health.cancelled(
                self.label, self.handles[min(self.dropped)] if self.handles else None
            )

    def waits_for(self, handle: RankHandle) -> bool:
        """Return whether the result of that rank is missing: it runs, or its process has ended."""
        for ref, mine in zip(self.refs, self.handles, strict=True):
            if mine is handle and self.values is None:
                return not health.is_returned(ref)
        return False

    def keep(self, values: Iterable[object]) -> None:
        """Open what the tasks returned, and note how many objects the fields of results fill."""
        self.values = []
        for i, returned in enumerate(values):
            method = self.handles[i].methods.get(self.label) if self.handles else None
            if method is not None:
                method.received(returned)
            fields = self.fields[i] if self.fields else ()
            self.values.append(store.opened(returned, self.refs[i], fields))

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the failure that came first, of all that are known after a short grace.

        `index`: the result for which Ray has `error`.
        """
        if not self.handles:
            if isinstance(error, RayTaskError) and isinstance(error.cause, QuadrigaError):
                raise error.cause from None
            if isinstance(error, health.DEAD):
                raise WorkerDiedError(
                    f"An argument is the result of {self.label}, whose process has ended."
                ) from error
            raise error
        first = self.first_failure(index, error)
        raise first from getattr(first, "cause", None)

    def look(self, now: float) -> None:
        """Check deadline and nodes, and log what is waited for. Called once a slice."""
        if self.expires is not None and now >= self.expires and (stuck := self._unfinished()):
            if self.handles:
                raise health.late(self.label, self.timeout, [self.handles[i] for i in stuck])
            raise CallTimeoutError(
                f"An argument is the result of {self.label}, which exceeded its deadline."
            )
        self.raise_if_dropped()
        if self.handles and now - self._probed >= PROBE_S:
            self._probed = now
            if health.cluster_lost():
                raise health.died(self.handles[0], self.label, "")
            lost = health.lost_nodes({handle.facts.node_id for handle in self.handles})
            for i in self._unfinished() if lost else ():
                if self.handles[i].facts.node_id in lost:
                    raise health.died(self.handles[i], self.label, "its node does not respond")
        if self.handles and now - self._logged >= LOG_S:
            self._logged = now
            waited, running = now - self.started, [self.handles[i] for i in self._unfinished()]
            logger.warning(
                "waiting for %s on rank(s) %s for %.0f s",
                self.label,
                health.places(running),
                waited,
            )

    def _unfinished(self) -> list[int]:
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        finished = set(done)
        return [i for i, ref in enumerate(self.refs) if ref not in finished]


def pending_of(
    ref: Ref,
    label: str,
    fields: Sequence[Ref] = (),
    left: float | None = None,
    dropped: bool = False,
) -> RayPending:
    """Return a result whose rank is not known in this process.

    `label`: whose it is, for messages. `left`: seconds until the deadline of the call. `dropped`:
    it was cancelled.
    """
    batch = RayBatch([ref], label=label, fields=[fields], timeout=left)
    if dropped:
        batch.dropped.add(0)
    return RayPending(batch, 0)


class RayPending(PendingValue):
    """One rank's result: number `index` of a batch.

    A failure of any peer in the batch ends the wait. Pickled, it carries the reference, the name of
    its source and what is left of the deadline.
    """

    __slots__ = ("_returned", "batch", "index")

    def __init__(self, batch: RayBatch, index: int) -> None:
        self.batch = batch
        self.index = index
        self._returned = False
        """Whether the task is known to have returned and not raised."""

    @property
    def ref(self) -> Ref:
        """The first return of the task."""
        return self.batch.refs[self.index]

    @property
    def value_here(self) -> object:
        """The value if it was waited for before, else None."""
        return None if self.batch.values is None else self.batch.values[self.index]

    def result(self) -> object:
        """Wait for the value. Raises what the worker raised."""
        return self.batch.gather()[self.index]

    def done(self) -> bool:
        """Return whether the value, or the error instead of it, exists."""
        if self.batch.values is not None or self.index in self.batch.dropped:
            return True
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    @staticmethod
    def all_done(pendings: Sequence[RayPending]) -> bool:
        """Return whether `wait_all` returns or raises without waiting for a rank.

        It raises when one rank has failed, at the deadline of a call, and while a watched group is
        broken.
        """
        missing = {p.ref: p for p in pendings if p.batch.values is None}
        if not missing or broken_groups or any(p.index in p.batch.dropped for p in pendings):
            return True
        deadlines = {p.batch.expires for p in missing.values()}
        if any(at is not None and time.monotonic() >= at for at in deadlines):
            return True
        refs = list(missing)
        ended, running = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return not running or any(missing[ref]._has_failed() for ref in ended)

    def _has_failed(self) -> bool:
        """Return whether the task, which has ended, has raised. Reads its result at most once."""
        if not self._returned:
            try:
                store.fetch([self.ref], timeout=0)
            except GetTimeoutError:
                pass  # a large result on another node: an error would be here
            except RayError:
                return True
            self._returned = True
        return False

    def cancel(self) -> bool:
        """Drop the result. Return False if it exists.

        A rank with coroutine methods ends the call. Another rank runs it when its turn comes.
        """
        if self.done():
            return False
        handles = self.batch.handles
        if handles and handles[self.index].facts.interleaves:
            ray.cancel(self.ref)
        else:
            # Ray is not asked: a call that it cancels before it is sent leaves a gap in the numbers
            # of the calls of that rank, which then waits 30 s for it and refuses the next call.
            self.batch.dropped.add(self.index)
        return True

    @staticmethod
    def wait_all(pendings: Sequence[RayPending], timeout: float | None = None) -> None:
        """Wait until every value is known. The first failure of any of them is raised.

        Raises `CallTimeoutError` after `timeout` seconds; the calls go on.
        """
        wait_for(list({id(p.batch): p.batch for p in pendings}.values()), timeout)

    def __reduce__(self) -> tuple[object, ...]:
        batch, label = self.batch, self.batch.label
        if batch.handles:
            facts = batch.handles[self.index].facts
            label = f"{label}, rank {facts.rank} on {facts.node}"
        # The time that is left is sent, because `time.monotonic()` differs between nodes:
        #   here     expires 5010.0, now 5003.0    sends 7.0
        #   there    now 120.0                     expires 127.0
        left = None if batch.expires is None else max(0.0, batch.expires - time.monotonic())
        fields = batch.fields[self.index] if batch.fields else ()
        return pending_of, (self.ref, label, fields, left, self.index in batch.dropped)


def wait_for(batches: Sequence[RayBatch], timeout: float | None = None) -> None:
    """Wait until all results are known. Raises the first failure of any of them, `CallTimeoutError`
    at the earliest deadline and after `timeout` seconds, and the error of a watched group that
    breaks."""
    limit = None if timeout is None else time.monotonic() + timeout
    for batch in batches:
        batch.raise_if_dropped()
    missing = [batch for batch in batches if batch.values is None]
    refs = [ref for batch in missing for ref in batch.refs]
    values, failed = None, False
    try:
        values = ray.get(refs, timeout=_until(missing, FIRST_WAIT_S, limit)) if refs else []
    except RayError as error:
        failed = not isinstance(error, GetTimeoutError)
        error.__traceback__ = None  # see `store.fetch`
    # Outside of `except`, so that a failure is not shown with Ray's time-out as its context.
    if values is None:
        try:
            found = _in_slices(missing, limit, failed)
        except QuadrigaError as error:
            # Ray's error, which refers to this one as its cause, is in variables of the frames
            # below and may be the context. The cycle would keep the batches of every calling frame.
            if isinstance(error.__context__, RayError):
                error.__context__ = error.__context__.__context__
            error.__traceback__ = None
            raise
        values = [found[ref] for ref in refs]
    # `values` is in the order of `refs`. A batch of 3 ranks, then one result by itself: the first
    # keeps values[0:3], the second values[3:4].
    rest = iter(values)
    for batch in missing:
        batch.keep(islice(rest, len(batch.refs)))


def _until(batches: Sequence[RayBatch], seconds: float, limit: float | None) -> float:
    """Return `seconds`, or less if a deadline or the limit (`time.monotonic()`) comes first."""
    expires = [at for at in [limit, *(batch.expires for batch in batches)] if at is not None]
    return max(0.0, min(seconds, min(expires) - time.monotonic())) if expires else seconds


def _in_slices(batches: Sequence[RayBatch], limit: float | None, failed: bool) -> dict[Ref, object]:
    """Wait in slices. Return the value of every reference.

    Consumes: references. Waits for: all of them. Unblocked by: the last value, the first failure, a
    deadline, a lost node, a watched group that breaks. `limit`: when the wait ends without a
    result, None: never. `failed`: one of the results is an error.
    """
    # Each reference once: `ray.wait` refuses a list that contains one twice.
    home = {ref: (batch, i) for batch in batches for i, ref in enumerate(batch.refs)}
    values: dict[Ref, object] = {}
    running, began = list(home), time.monotonic()
    pause = 0.0 if failed else _until(batches, SLICE_S, limit)
    while True:
        here, running = ray.wait(running, num_returns=len(running), timeout=pause)
        running += _read(here, home, values)
        if not running:
            return values
        raise_if_broken()
        now = time.monotonic()
        _collect_in_wait(now - began)
        if limit is not None and now >= limit:
            missing = {home[ref][0].label for ref in running}
            raise CallTimeoutError(
                f"The future of {', '.join(sorted(missing))} has no result in time. The call goes "
                "on."
            )
        for batch in batches:
            batch.look(now)
        # A result that exists is received even if its pull ends after the deadline.
        pause = max(MIN_SLICE_S, _until(batches, SLICE_S, limit))


def _read(
    refs: list[Ref], home: Mapping[Ref, tuple[RayBatch, int]], values: dict[Ref, object]
) -> list[Ref]:
    """Read what can be read now into `values`; return the references of the rest.

    `home`: where each reference belongs. Raises the failure of a reference.
    """
    try:
        values.update(zip(refs, store.fetch(refs, timeout=0), strict=True))
        return []
    except GetTimeoutError:
        if len(refs) == 1:
            return refs
    except RayError as error:
        if len(refs) == 1:
            batch, index = home[refs[0]]
            batch.raise_failure(index, error)
    # Some of several failed or are not here any more: find out which, one at a time.
    return [rest for ref in refs for rest in _read([ref], home, values)]


_next_collection = 0.0


def _collect_in_wait(waited: float) -> None:
    """Run a full collection in a wait that has lasted `waited` seconds, and seldom enough.

    Only where `collect_rarely` has raised the interval of full collections to that of a controller.
    """
    global _next_collection
    now = time.monotonic()
    if waited < IDLE_AFTER_S or now < _next_collection:
        return
    if gc.isenabled() and gc.get_threshold()[2] == FULL_EVERY:
        _next_collection = now + IDLE_EVERY_S  # first, so that another wait does not run one too
        gc.collect()


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
        value
        for call in calls
        for value in (*call.args, *call.kwargs.values())
        if store.is_future(value)
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
        if store.is_future(value) and _key(value) in parts:
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


_HANDLES = frozenset((store.RayHandle, LocalHandle))
"""Handles that `_encoded_data` can write."""
_SHORT = 1000
"""Length of a string that Python's pickler copies as fast as Ray's does."""


def send_to_ranks(
    ranks: RankSet, handles: Sequence[RankHandle], calls: Sequence[Call], send: Callable[..., Ref]
) -> list[Ref]:
    """Send `calls[i]` to `handles[i]`. Return the references that `send` returns.

    `send(handle, what is sent, ticket if the rank has coroutine methods)` sends one. Raises
    `DispatchError` if an argument cannot be pickled: no call was sent then. Raises `WorkerError` if
    a call cannot be sent.
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
        received = health.SentCall(refs, handles[: len(refs)], calls[0].label, ranks)
        try:
            raise received.not_sent(*failure) from failure[1]
        finally:
            del failure  # it refers to this frame, and so to the arguments
    return refs


class RayMethod:
    """How one method of one rank is called. Kept by the handle: making one takes 20 µs."""

    __slots__ = ("_actor", "_invoke", "_options", "objects")

    def __init__(self, actor: RankActor, label: str, group: str | None = None) -> None:
        self._actor, self._options = actor, {"name": label, "concurrency_group": group}
        self._invoke: tuple[int, RemoteMethod] | None = None
        """How many returns of fields the next task has, and the method with as many."""
        self.objects: int | None = None
        """How many returns the fields of a result have filled (see `store`), None before the first
        result. A return that is not filled costs time, so a method without fields has none."""

    def send(self, *arguments: object) -> tuple[Ref, Sequence[Ref]]:
        """Submit the task; return the references to its result and to its returns of fields."""
        count = 1 if self.objects is None else self.objects
        if self._invoke is None or self._invoke[0] != count:
            invoke = self._actor.quadriga_invoke.options(**self._options, num_returns=1 + count)
            self._invoke = count, invoke
        if not count:  # and no argument for it: Ray takes 10 µs more for every argument
            return self._invoke[1].remote(*arguments), ()
        refs = cast("list[Ref]", self._invoke[1].remote(*arguments, count))
        return refs[0], refs[1:]

    def received(self, returned: object) -> None:
        """Note how many returns the fields of a result fill: the most of all results so far."""
        objects = returned.objects if isinstance(returned, store.Result) else 0
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
    fetched = with_ticket or any(store.packed_batch(value) is not None for value in values)
    if fetched and pickled.nbytes > BIG:
        return RayShared(ray.put(pickled), pickled.label)
    return pickled


def _encoded_data(call: Call) -> bytes | tuple[bytes, list[Ref]] | None:
    """Return what is sent for a call of plain data, in a tenth of cloudpickle's time.

        Call("actor", "update", (Message … Location(ref 7f…) … Location(ref a2…),))
          →  (b"… 0 … 1 …",  [ref 7f…, ref a2…])

    Nothing but tuples, lists, texts, numbers and bytes is pickled: no class is looked up by name.
    Ray's own pickler, which calls Python for every object, sees the references only. The pair is
    one argument of the task: Ray takes 10 µs more for two. None for a call with objects, code or
    long texts of the user, or with much data in its messages.
    """
    refs: list[Ref] = []
    numbers: dict[int, int] = {}
    size = 0

    def flat_handle(handle: Handle) -> tuple[object, ...]:
        assert isinstance(handle, store.RayHandle)  # see `data_bytes`
        at = numbers.get(id(handle.location))
        if at is None:
            at = numbers[id(handle.location)] = len(refs)
            refs.append(handle.ref)
        return at, handle.location.node, handle.nbytes, handle.index

    values: list[object] = []
    for value in (*call.args, *call.kwargs.values()) if call.kwargs else call.args:
        batch = store.packed_batch(value)
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
    return store.is_plain_batch(value)
