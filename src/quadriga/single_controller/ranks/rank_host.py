"""What a rank's process does, whatever engine started it: hold workers by role and run calls."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quadriga.errors import (
    CollectiveError,
    UnregisteredMethodError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.single_controller.call import Call, SharedArgument
from quadriga.single_controller.ranks.call_order import CallOrder, Ticket
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs
from quadriga.single_controller.ranks.environment import LOCAL_PORT, RankEnvironment
from quadriga.single_controller.ranks.worker import Worker
from quadriga.single_controller.tensor_modules import private_copy, shipping_for


class RankHost:
    """The workers of one rank, by role, and the way calls reach them."""

    def __init__(
        self,
        place: RankEnvironment,
        node: str,
        survives: Callable[[Exception], bool] = lambda error: True,
    ) -> None:
        """`survives(error)`: whether a user's exception can travel to the controller."""
        self.place = place
        self.node = node
        self._survives = survives
        self.workers: dict[str, Any] = {}
        self.in_flight: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = CallOrder()
        self.awaited: set[Awaitable[Any]] = set()
        """What coroutine methods have begun and not ended."""

    def build(self, classes: Mapping[str, ClassWithInitArgs]) -> None:
        """Build the worker of each role. Raises WorkerInitError carrying the traceback."""
        for role, class_with_args in classes.items():
            try:
                worker = class_with_args.build()
            except Exception as error:
                raise self._init_failure(role, error) from error
            self.workers[role] = worker
            # A fused worker has built roles of its own; they are roles of this process too.
            for inner, sub_worker in getattr(worker, "fused_roles", {}).items():
                self.workers[inner] = sub_worker
        for worker in self.workers.values():
            if isinstance(worker, Worker):
                worker._siblings = self.workers

    def invoke(self, call: Call, store: Any = None) -> Any:
        """Run one call to its end. `store`: where large fields of the result go; this process's
        when None. Raises WorkerMethodError if the method raised."""
        self.in_flight = f"{call.role}.{call.method}"
        try:
            method = self._method(call)
            args, kwargs = self._arguments(call)
            value = method(*args, **kwargs)
            if inspect.isawaitable(value):
                value = self._run(value)
            return self._result(call, value, store)
        except Exception as error:
            raise self.failure(call, error) from error
        finally:
            self.in_flight = None

    async def invoke_async(
        self, opened: Callable[[], Call], ticket: Ticket | None = None, store: Any = None
    ) -> Any:
        """As `invoke`, inside a running event loop; coroutine methods interleave.

        `opened()` gives the call; it may have to wait. Methods start in the order of their
        tickets, which need not be that of arrival. Arguments are waited for outside the loop: they
        may be results of this very process, whose reply the loop has yet to send.
        """
        async with self._turns.turn(ticket):
            call, args, kwargs = await asyncio.to_thread(self._prepare, opened)
            self.in_flight = f"{call.role}.{call.method}"
            try:
                value = self._method(call)(*args, **kwargs)
            except Exception as error:
                raise self.failure(call, error) from error
        try:
            if inspect.isawaitable(value):
                value = await self._await(value)
            return self._result(call, value, store)
        except Exception as error:
            raise self.failure(call, error) from error
        finally:
            self.in_flight = None

    def _prepare(self, opened: Callable[[], Call]) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        call = opened()
        try:
            return call, *self._arguments(call)
        except Exception as error:
            raise self.failure(call, error) from error

    async def _await(self, awaitable: Awaitable[Any]) -> Any:
        self.awaited.add(awaitable)
        try:
            return await awaitable
        finally:
            self.awaited.discard(awaitable)

    def failure(self, call: Call, error: Exception) -> WorkerMethodError | CollectiveError:
        """The error the controller sees for `error`, raised by a method."""
        kind: type[WorkerMethodError | CollectiveError] = WorkerMethodError
        title = f"{type(error).__name__} in {call.role}.{call.method}"
        text = str(error)
        if LOCAL_PORT in text:
            kind = CollectiveError
            title = f"torch.distributed was asked for in {call.role}.{call.method}"
            text = (
                f"a local group of {self.place.world_size} ranks lives in one process and holds no "
                "collectives. Use one local rank, or backend=ray."
            )
        remote = _traceback_text(error)
        return kind(
            f"{title}, {self._where()}: {text}\n\nTraceback of the worker:\n{remote}",
            **self._details(call.role, call.method, error, remote),
        )

    def _init_failure(self, role: str, error: Exception) -> WorkerInitError | CollectiveError:
        failed = self.failure(Call(role, "__init__"), error)
        if isinstance(failed, CollectiveError):
            return failed
        return WorkerInitError(
            str(failed), **self._details(role, "__init__", error, _traceback_text(error))
        )

    def _where(self) -> str:
        return f"rank {self.place.rank} of {self.place.world_size} on {self.node}"

    def _details(self, role: str, method: str, error: Exception, remote: str) -> dict[str, Any]:
        return {
            "role": role,
            "rank": self.place.rank,
            "node": self.node,
            "method": method,
            "remote_traceback": remote,
            "cause": error if self._survives(error) else None,
            "raised_at": time.time(),
        }

    def _method(self, call: Call) -> Callable[..., Any]:
        try:
            worker = self.workers[call.role]
        except KeyError:
            raise UnregisteredMethodError(
                f"This process holds {sorted(self.workers)}, no role {call.role!r}.",
                method=call.method,
                known=sorted(self.workers),
            ) from None
        try:
            method: Callable[..., Any] = getattr(worker, call.method)
        except AttributeError:
            known = sorted(name for name in dir(type(worker)) if not name.startswith("_"))
            raise UnregisteredMethodError(
                f"{type(worker).__name__} has no method {call.method!r}. It has {known}.",
                method=call.method,
                known=known,
            ) from None
        return method

    def _arguments(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not (call.args or call.kwargs):
            return call.args, call.kwargs
        args = tuple(map(_opened, call.args))
        kwargs = {name: _opened(value) for name, value in call.kwargs.items()}
        shipping = shipping_for((*args, *kwargs.values()))
        if shipping is None:
            return tuple(map(private_copy, args)), private_copy(kwargs)
        unpack = shipping.unpack_argument
        if not call.materialize:
            future = shipping.DataProtoFuture

            def unpack(value: Any, _open: Any = shipping.unpack_argument) -> Any:
                return value if isinstance(value, future) else _open(value)

        return (
            tuple(unpack(value) for value in args),
            {name: unpack(value) for name, value in kwargs.items()},
        )

    def _result(self, call: Call, value: Any, store: Any) -> Any:
        if value is None:
            return value
        shipping = shipping_for((value,))
        if shipping is None:
            return value
        origin = shipping.Origin(
            role=call.role, rank=self.place.rank, method=call.method, node=self.node
        )
        return shipping.pack_result(value, origin, store)

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        """Drive a coroutine of a worker from a thread that may itself be inside a loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return loop.run_until_complete(awaitable)
        return _in_thread(lambda: loop.run_until_complete(awaitable))


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, SharedArgument) else value


def _in_thread(run: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(run())
        except BaseException as error:  # handed to the caller's thread below
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return outcome[0]


def _traceback_text(error: BaseException) -> str:
    """The worker's traceback without the frames that led from the controller to the method."""
    summary = traceback.TracebackException.from_exception(error)
    while len(summary.stack) > 1 and summary.stack[0].filename == __file__:
        del summary.stack[0]
    return "".join(summary.format()).rstrip()
