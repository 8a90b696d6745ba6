"""`RankHost`: holds the workers of one rank by role and runs calls on them, for every backend.

Calls start in the order in which they were sent, although they may arrive in another order. A
generator method runs in the rank one item per call.
"""

import asyncio
import contextlib
import copy
import os
import sys
import time
import traceback
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard, TypeVar

from quadriga.containment import cut
from quadriga.errors import (
    CollectiveError,
    DispatchError,
    UnregisteredMethodError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.observability.profiling import profiled
from quadriga.protocol.threads import in_thread, started_in_thread
from quadriga.single_controller.dispatch import (
    Arguments,
    Call,
    KeywordArguments,
    SharedArgument,
    Ticket,
    boundary_for,
)
from quadriga.single_controller.environment import LOCAL_PORT, RankEnvironment
from quadriga.single_controller.worker import ClassWithInitArgs, FusedWorker, Worker

GAP_S = 2.0
"""A call that has not arrived after this time is lost: it was cancelled before it was sent."""
CHECKS = 20
"""How often an event loop must run in that time."""


@dataclass
class _Sender:
    """The calls of one sender."""

    next: int = 0
    """The lowest number whose turn has not ended."""
    present: set[int] = field(default_factory=set)
    """Numbers that wait for their turn or hold it."""
    ended: set[int] = field(default_factory=set)
    """Numbers above `next` whose turn has ended, because they were cancelled while they waited."""
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Number → the future whose result starts its turn."""
    watch: asyncio.Task[None] | None = None
    """The task that skips lost calls, while calls wait."""


class CallOrder:
    """Gives each call its turn to start. Numbers start at 0 for each sender.

    Consumes: calls with tickets. Waits for: the turn of the previous ticket of the same sender to
    end. Unblocked by: the end of that turn, whether its call succeeded, failed or was cancelled; or
    by `GAP_S` seconds in which the previous call does not arrive.

    Example: a large call 0 and small calls 1 and 2 of sender "a" arrive as 1, 2, 0.

        arrives ("a", 1)    waits, because the next number of "a" is 0
        arrives ("a", 2)    waits
        arrives ("a", 0)    starts; then 1 starts; then 2 starts

    If call 0 was cancelled before it was sent, 1 starts after `GAP_S` seconds. If 0 arrives after
    that nevertheless, it starts at once. A call without a ticket never waits.
    """

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    @contextlib.asynccontextmanager
    async def turn(self, ticket: Ticket | None) -> AsyncIterator[None]:
        """Wait for the turn of `ticket`, and hold it inside the `async with` block."""
        if ticket is None:
            yield
            return
        name, number = ticket
        sender = self._senders.setdefault(name, _Sender())
        sender.present.add(number)
        try:
            if number > sender.next:
                await _wait(sender, number)
            yield
        finally:  # also if this call is cancelled while it waits
            sender.present.discard(number)
            sender.waiting.pop(number, None)
            sender.ended.add(number)
            _advance(sender)


async def _wait(sender: _Sender, number: int) -> None:
    turn = sender.waiting[number] = asyncio.get_running_loop().create_future()
    if sender.watch is None or sender.watch.done():
        # The sender holds the task: the loop itself keeps only a weak reference to it.
        sender.watch = asyncio.create_task(_skip_lost_calls(sender))
    await turn


def _advance(sender: _Sender) -> None:
    """Move past the turns that have ended, and start the call whose turn it is."""
    while sender.next in sender.ended:
        sender.next += 1
    # What remains below `next` are calls that arrived after they had been skipped.
    sender.ended = {number for number in sender.ended if number > sender.next}
    turn = sender.waiting.get(sender.next)
    if turn is not None and not turn.done():
        turn.set_result(None)


async def _skip_lost_calls(sender: _Sender) -> None:
    """Skip a number that does not arrive while calls with higher numbers wait.

    A method that blocks the loop for a minute also keeps calls from arriving. Time is therefore
    counted in short sleeps: when the loop runs again, most of them are still to come, and the calls
    that have queued meanwhile arrive before the last of them ends.
    """
    lost, checks = -1, 0
    while sender.waiting:
        await asyncio.sleep(GAP_S / CHECKS)
        if sender.next in sender.present:
            lost = -1
        elif sender.next != lost:
            lost, checks = sender.next, 1
        elif checks < CHECKS:
            checks += 1
        elif sender.waiting:
            sender.next = min(sender.waiting)
            _advance(sender)


Item = tuple[object, ...]
"""A tuple of one item, an empty tuple at the end."""


class OpenStream:
    """A generator, plain or asynchronous, that was started and has not ended."""

    def __init__(self, generator: object) -> None:
        if not isinstance(generator, Generator | AsyncGenerator):
            raise DispatchError(
                f"A generator was expected, the method returned {type(generator).__name__}."
            )
        self._generator: Generator[object] | AsyncGenerator[object] = generator
        self._lock = asyncio.Lock()

    def step(self) -> Item | Awaitable[Item]:
        """Return the next item, or an awaitable of it for an asynchronous generator."""
        if isinstance(self._generator, AsyncGenerator):
            return self._step_later(self._generator)
        try:
            return (next(self._generator),)
        except StopIteration:
            return ()

    async def _step_later(self, generator: AsyncGenerator[object]) -> Item:
        # The controller asks for one item ahead, and a generator runs one `__anext__` at a time.
        async with self._lock:
            try:
                return (await anext(generator),)
            except StopAsyncIteration:
                return ()

    def close(self) -> Awaitable[None] | None:
        """End the generator: its `finally` blocks run."""
        if isinstance(self._generator, AsyncGenerator):
            return self._close_later(self._generator)
        self._generator.close()
        return None

    async def _close_later(self, generator: AsyncGenerator[object]) -> None:
        async with self._lock:  # not while an item is computed
            await generator.aclose()


T = TypeVar("T")
_ENDS_THE_COROUTINE = (asyncio.CancelledError, GeneratorExit)
"""What an event loop raises in a coroutine that it ends. Whatever else a method raises is the error
of its call: `SystemExit` and `KeyboardInterrupt` would end the loop or the process."""

MOST_TEXT = 20_000
"""Characters of an exception of a method, and of each half of its traceback, in an error."""


class RankHost:
    """The workers of one rank, by role.

    Args:
        place: The rank's position in its group.
        node: The address of its node, for error messages.
        survives: `survives(error)` returns whether an exception of the user can be pickled, sent to
            the controller and unpickled there.
        max_concurrency: How many calls `invoke_async` runs at the same time; None: no limit. A call
            that waits for its turn or for its arguments does not count, because the calls that it
            waits for could not run otherwise.
        in_process: Whether the rank shares the process of its controller. If not, the backend has
            decoded its arguments for this rank alone.
    """

    def __init__(
        self,
        place: RankEnvironment,
        node: str,
        survives: Callable[[Exception], bool] = lambda error: True,
        max_concurrency: int | None = None,
        in_process: bool = True,
    ) -> None:
        self.place = place
        self.node = node
        self._survives = survives
        self._in_process = in_process
        self._pid = os.getpid()
        self.workers: dict[str, Any] = {}  # a class of the user's need not be a `Worker`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._order = CallOrder()
        self._slots: AbstractAsyncContextManager[None] = nullcontext()
        if max_concurrency is not None:
            self._slots = asyncio.Semaphore(max_concurrency)
        self._streams: dict[str, OpenStream] = {}
        self.awaited: set[Awaitable[object]] = set()
        """The coroutine methods that have started and not ended."""

    def build(self, classes: Mapping[str, ClassWithInitArgs]) -> None:
        """Build the worker of each role. Raises `WorkerInitError` with the traceback."""
        for role, class_with_args in classes.items():
            try:
                worker = class_with_args.build()
            except BaseException as error:
                self._raise_interrupt(error)
                failed = self.failure(Call(role, "__init__"), error, WorkerInitError)
                raise failed from self.chained(error)
            self.workers[role] = worker
            # A fused worker has built workers of its own, which are roles of this process too.
            if isinstance(worker, FusedWorker):
                self.workers.update(worker.fused_roles)
        for worker in self.workers.values():
            if isinstance(worker, Worker):
                worker._siblings = self.workers

    def invoke(self, call: Call, store: object = None) -> object:
        """Run one call and return its packed result.

        `store`: the `protocol.Store` for large fields of the result; None: that of this process.
        Raises `WorkerMethodError` if the method raised.
        """
        try:
            args, kwargs = self._arguments(call)
            value = self._start(call, args, kwargs)
            if _is_awaitable(value):  # also a synchronous method that returns a coroutine
                value = self._run(value)
            return self._result(call, value, store)
        except BaseException as error:
            self._raise_interrupt(error)
            raise self.failure(call, error) from self.chained(error)

    async def invoke_async(
        self, opened: Callable[[], Call], ticket: Ticket | None = None, store: object = None
    ) -> object:
        """Run one call inside a running event loop, in which coroutine methods interleave.

        `opened()` returns the call and may block. Methods start in the order of their tickets,
        which may differ from the order of arrival. Arguments are unpacked in a thread: an argument
        may be a result of this process that the loop has not sent yet.
        """
        async with AsyncExitStack() as slot:
            # The turn ends when the method has started, so that coroutine methods can interleave.
            async with self._order.turn(ticket):
                call, args, kwargs = await in_thread(self._prepare, opened)
                await slot.enter_async_context(self._slots)
                try:
                    value = self._start(call, args, kwargs)
                except BaseException as error:
                    raise self.failure(call, error) from self.chained(error)
            try:
                if _is_awaitable(value):
                    value = await self._await(value)
                # The backend encodes the result after this coroutine has ended, while the loop
                # runs the next method, which may write into the same buffer.
                return self._result(call, copied(value), store)
            except _ENDS_THE_COROUTINE:
                raise
            except BaseException as error:
                raise self.failure(call, error) from self.chained(error)

    def _prepare(self, opened: Callable[[], Call]) -> tuple[Call, Arguments, KeywordArguments]:
        call = opened()
        try:
            return call, *self._arguments(call)
        except Exception as error:
            raise self.failure(call, error) from self.chained(error)

    def _start(self, call: Call, args: Arguments, kwargs: KeywordArguments) -> object:
        """Call the method, or do one step of a generator method."""
        begin = partial(self._begin, call, args, kwargs)
        return profiled(call.role, self.place.rank, call.method, begin)

    def _begin(self, call: Call, args: Arguments, kwargs: KeywordArguments) -> object:
        if call.step is None:
            return self._method(call)(*args, **kwargs)
        if call.step.action == "open":
            self._streams[call.step.stream] = OpenStream(self._method(call)(*args, **kwargs))
        stream = self._streams.get(call.step.stream)
        if stream is None:
            return ()  # it has ended, and the controller asked for one item more
        if call.step.action == "close":
            del self._streams[call.step.stream]
            return stream.close()
        return stream.step()

    async def _await(self, awaitable: Awaitable[T]) -> T:
        self.awaited.add(awaitable)
        try:
            return await awaitable
        finally:
            self.awaited.discard(awaitable)

    def _method(self, call: Call) -> Callable[..., object]:
        worker = self.workers.get(call.role)
        if worker is None and len(self.workers) == 1:
            # A group that has attached may know the class, and so the role, by another name.
            (worker,) = self.workers.values()
        if worker is None:
            known = sorted(self.workers)
            text = f"This process has the roles {known}, not {call.role!r}."
            raise UnregisteredMethodError(text, method=call.method, known=known)
        try:
            method: Callable[..., object] = getattr(worker, call.method)
        except AttributeError:
            if hasattr(type(worker), call.method):
                raise  # by a property
            known = sorted(name for name in dir(type(worker)) if not name.startswith("_"))
            text = f"{type(worker).__name__} has no method {call.method!r}. It has {known}."
            raise UnregisteredMethodError(text, method=call.method, known=known) from None
        return method

    def _arguments(self, call: Call) -> tuple[Arguments, KeywordArguments]:
        """Return the arguments as the method receives them, in memory of this rank only."""
        if not (call.args or call.kwargs):
            return call.args, call.kwargs
        args = tuple(map(_opened, call.args))
        kwargs = {name: _opened(value) for name, value in call.kwargs.items()}
        boundary = boundary_for((*args, *kwargs.values()))
        if boundary is None:
            if not self._in_process:
                return args, kwargs
            return tuple(map(copied, args)), {name: copied(v) for name, v in kwargs.items()}

        def unpack(value: object) -> object:
            if not call.materialize and isinstance(value, boundary.DataProtoFuture):
                return value
            return boundary.unpack_argument(value)  # copies if in one process

        if call.materialize:
            # All futures at once: one that fails must end the wait for one that never returns.
            boundary.wait_for_arguments((*args, *kwargs.values()))
        return tuple(map(unpack, args)), {name: unpack(value) for name, value in kwargs.items()}

    def _result(self, call: Call, value: object, store: object) -> object:
        """Return what is sent to the controller for the value that a method returned."""
        if value is None:
            return value
        if isinstance(value, Generator | AsyncGenerator):
            raise DispatchError(
                f"{call.label} returned a generator object, which cannot be sent. Return a list, "
                "or write the method itself with yield and receive its items with "
                f"group.{call.method}.stream(...)."
            )
        boundary = boundary_for((value,))
        if boundary is None:
            return copied(value) if self._in_process else value
        origin = boundary.storage.Origin(
            role=call.role, rank=self.place.rank, method=call.method, node=self.node
        )
        return boundary.pack_result(value, origin, store)

    def _run(self, awaitable: Awaitable[T]) -> T:
        """Run a coroutine method to its end on the event loop of this rank."""
        # One loop for all calls: an asyncio.Event or a client session belongs to a loop.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        # A loop that runs belongs to a coroutine method of this rank that waits for this call.
        loop = None if self._loop.is_running() else self._loop
        run: Callable[[], T] = partial(_run_on, loop, awaitable)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run()
        # The calling thread runs a loop already (a notebook), and a thread runs only one.
        return started_in_thread(run).result()

    # Failures

    def _raise_interrupt(self, error: BaseException) -> None:
        """Raise the Ctrl-C of a program whose ranks share its process, and the `sys.exit` of a
        child that a method has forked."""
        interrupts = self._in_process and isinstance(error, KeyboardInterrupt)
        if interrupts or (isinstance(error, SystemExit) and os.getpid() != self._pid):
            raise error

    def failure(
        self, call: Call, error: BaseException, kind: type[WorkerError] = WorkerMethodError
    ) -> WorkerError:
        """Return the error that the controller raises for `error`, which a method raised."""
        title, text = f"{type(error).__name__} in {call.label}", _text(error)
        # A local group of several ranks sets this text as MASTER_PORT. torch's error quotes it.
        if LOCAL_PORT in text:
            kind = CollectiveError
            title = f"{call.label} initializes torch.distributed"
            text = (
                f"the {self.place.world_size} ranks of a local group share one process, which does "
                "not support collectives. Use one local rank, or backend=ray."
            )
        place = f"rank {self.place.rank} of {self.place.world_size} on {self.node}"
        remote = _traceback_text(error)
        return self._error(
            kind, f"{title}, {place}: {text}\n\nTraceback of the worker:\n{remote}", call, error
        )

    def unreadable(self, role: str, method: str, error: Exception) -> WorkerError:
        """Return the error for a call that was received and could not be decoded."""
        text = (
            f"An argument of {role}.{method} could not be read by rank {self.place.rank} on "
            f"{self.node}: {type(error).__name__}: {_text(error)}"
        )
        return self._error(WorkerMethodError, text, Call(role, method), error)

    def chained(self, error: BaseException) -> BaseException | None:
        """Return the cause of an error, for a debugger in this process. Ray would format its text,
        which can be long, and end the process if it cannot be encoded."""
        return error if self._in_process else None

    def _is_sent(self, error: Exception) -> bool:
        return len(_text(error)) <= MOST_TEXT and self._survives(error)

    def _error(
        self, kind: type[WorkerError], text: str, call: Call, error: BaseException
    ) -> WorkerError:
        return kind(
            text, role=call.role, rank=self.place.rank, node=self.node, method=call.method,
            remote_traceback=_traceback_text(error),
            cause=error if isinstance(error, Exception) and self._is_sent(error) else None,
            raised_at=time.time(),
        )  # fmt: skip


def copied(value: object) -> object:
    """Copy everything in a value that can be written into."""
    from quadriga.protocol.storage import walk  # loads numpy

    return walk(value, _copied_leaf)


def _copied_leaf(value: object) -> object:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return private(value)


def private(value: T) -> T:
    """Return a copy, or the value itself: not every object that can be pickled can be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # anything that the user's objects may raise
        return value


def _opened(value: object) -> object:
    while isinstance(value, SharedArgument):
        value = value.open()
    return value


def _is_awaitable(value: object) -> TypeGuard[Awaitable[object]]:
    """Return whether a method returned a coroutine, or a future or task of asyncio.

    Other objects that can be awaited are results: the future of a call, a reference of Ray.
    """
    return isinstance(value, Coroutine | asyncio.Future)


def _run_on(loop: asyncio.AbstractEventLoop | None, awaitable: Awaitable[T]) -> T:
    """Run a coroutine method to its end on a loop; None: a new loop, which is then closed."""
    if loop is not None:
        return loop.run_until_complete(awaitable)
    with asyncio.Runner() as runner:
        return runner.get_loop().run_until_complete(awaitable)


def _text(error: BaseException) -> str:
    try:
        return cut(str(error), MOST_TEXT)
    except Exception as second:  # the traceback of `error` must be shown in any case
        return f"(its __str__ raised {type(second).__name__})"


def _traceback_text(error: BaseException) -> str:
    """Return the worker's traceback without the frames of this module that lead to the method."""
    summary = traceback.TracebackException.from_exception(error)
    while len(summary.stack) > 1 and summary.stack[0].filename == __file__:
        del summary.stack[0]
    text = cut("".join(summary.format()).rstrip(), sys.maxsize)
    return text if len(text) <= 2 * MOST_TEXT else f"{text[:MOST_TEXT]} … {text[-MOST_TEXT:]}"
