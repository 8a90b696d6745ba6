"""The actor of one rank.

It is light: the user's worker class, and what it imports, is loaded by `quadriga_setup`, so that
all ranks' processes start side by side. Steps, each sent without waiting for the one before:

    __init__           nothing
    quadriga_prepare   environment variables of the user; rank 0 chooses address and port
    quadriga_setup     waits for rank 0's choice; builds the workers
    quadriga_invoke    one call, under the Ray task name "role.method"
    quadriga_invoke_apart   the same with two returns (see `replies.py`)
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle

from quadriga.backends.ray.process.heap import freeze_heap, keep_freed_memory
from quadriga.single_controller.backend import RankFacts
from quadriga.single_controller.call import Call, SharedArgument, unpack_results
from quadriga.single_controller.placement.devices import visible_devices
from quadriga.single_controller.ranks.call_order import Ticket
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, roles_of
from quadriga.single_controller.ranks.environment import RankEnvironment, ReservedPort
from quadriga.single_controller.ranks.rank_host import RankHost

STACK_SIGNAL = signal.SIGUSR2


class RankProcess:
    """Hosts the workers of one rank; see the module's docstring."""

    _host: RankHost
    _facts: RankFacts

    def quadriga_prepare(
        self,
        variables: Mapping[str, str],
        search_path: Sequence[str],
        preload: Sequence[str],
        choose: bool,
        port_range: Sequence[int] | None = None,
    ) -> tuple[str, str]:
        """Set the user's environment variables and make importable what the controller can
        import; rank 0 also chooses (address, port), within `port_range` (first, last + 1)."""
        os.environ.update(variables)
        keep_freed_memory()
        sys.path.extend(path for path in search_path if path not in sys.path)
        for module in preload:
            importlib.import_module(module)
        self._stack_file = open_stack_file()
        if not choose:
            return "", ""
        self._port = ReservedPort.choose(port_range)
        return ray.util.get_node_ip_address(), str(self._port.port)

    def quadriga_setup(
        self,
        place: RankEnvironment,
        rendezvous: tuple[str, str],
        prepared: tuple[str, str],
        payload: tuple[Any, Mapping[str, ClassWithInitArgs]],
    ) -> RankFacts:
        """Build the workers. `rendezvous`: what rank 0's `quadriga_prepare` returned, `prepared`:
        what this rank's did. `payload`: the modes a user has added, then the roles."""
        address, port = rendezvous
        place = replace(place, master_address=address, master_port=port)
        os.environ.update(place.variables())
        context = ray.get_runtime_context()
        self._facts = RankFacts(
            rank=place.rank,
            world_size=place.world_size,
            node=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            master_address=address,
            master_port=port,
            group_prefix=place.group_prefix,
            log_path=_log_path(),
            node_id=context.get_node_id(),
            stack_path=self._stack_file.name,
            name=context.get_actor_name() or "",
            devices=visible_devices(),
            interleaves=isinstance(self, AsyncRankProcess),
        )
        self._use_store()
        freeze_heap(collect=False)  # modules only: no worker has been built
        self._host = RankHost(place, self._facts.node, _survives_pickling)
        self._host.build(payload[1])
        return self._facts

    def quadriga_facts(self) -> RankFacts:
        """Where this rank lives."""
        return self._facts

    def quadriga_roles(self) -> dict[str, type]:
        """The roles that this process hosts, with their classes."""
        return {role: type(worker) for role, worker in self._host.workers.items()}

    def quadriga_invoke(self, call: Call | bytes) -> Any:
        """Run one call, pickled or not."""
        return self._invoke(_unpickled(call), apart=False)[0]

    def quadriga_invoke_apart(self, call: Call | bytes) -> Any:
        """The same; large fields of the reply are a return of their own."""
        return self._invoke(_unpickled(call), apart=True)

    def _invoke(self, call: Call, apart: bool) -> tuple[Any, Any]:
        store = self._reply_store()
        return store.reply(self._host.invoke(call, store), apart)

    def _use_store(self) -> None:
        from quadriga.backends.ray.calls.results import ReplyStore
        from quadriga.backends.ray.calls.store import RayStore
        from quadriga.protocol.values.storage import use_store

        use_store(RayStore())
        self._reply_store = ReplyStore


class AsyncRankProcess(RankProcess):
    """For classes with coroutine methods: those interleave on the actor's event loop."""

    def __init__(self) -> None:
        # Arguments are waited for in a thread, which Ray takes for a wait inside the loop.
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")

    async def quadriga_invoke(
        self, call: Call | bytes | SharedArgument, ticket: Ticket | None = None
    ) -> Any:
        """Run one call; other calls go on while a coroutine method waits."""
        return (await self._invoke_async(call, ticket, apart=False))[0]

    async def quadriga_invoke_apart(
        self, call: Call | bytes | SharedArgument, ticket: Ticket | None = None
    ) -> Any:
        """The same; large fields of the reply are a return of their own."""
        return await self._invoke_async(call, ticket, apart=True)

    async def _invoke_async(
        self, call: Call | bytes | SharedArgument, ticket: Ticket | None, apart: bool
    ) -> tuple[Any, Any]:
        def opened() -> Call:
            return _unpickled(call.open() if isinstance(call, SharedArgument) else call)

        store = self._reply_store()
        return store.reply(await self._host.invoke_async(opened, ticket, store), apart)

    async def quadriga_coroutines(self) -> str:
        """Where the coroutine methods of this rank wait, innermost frame first."""
        return "\n\n".join(filter(None, map(_waiting_at, self._host.awaited)))


def _unpickled(call: Call | bytes) -> Call:
    if isinstance(call, Call):
        return call
    loaded: Call = pickle.loads(call)
    return loaded


def _waiting_at(awaitable: Any) -> str:
    """The frames of a coroutine from where it waits out to the worker's method."""
    frames = []
    waiter: Any = awaitable.get_coro() if isinstance(awaitable, asyncio.Task) else awaitable
    while (frame := getattr(waiter, "cr_frame", None)) is not None:
        code = frame.f_code
        frames.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        waiter = waiter.cr_await
    return "\n".join(reversed(frames))


def rank_process_class(name: str, classes: Mapping[str, type]) -> type:
    """The actor class of a group: named like the user's class, with its public methods.

    The methods are for those who hold an actor handle and call it directly. With several roles
    they are named `<role>_<method>`.
    """
    members: dict[str, Any] = {"__module__": "quadriga.ranks", "__doc__": f"A rank of {name}."}
    methods = [
        (role, method, function)
        for role, cls in classes.items()
        for method, function in inspect.getmembers(cls, inspect.isfunction)
        if not method.startswith("__")
    ]
    is_async = any(map(_has_coroutines, roles_of(dict(classes)).values()))
    forwarder = _async_forwarder if is_async else _forwarder
    for role, method, _ in methods:
        prefix = f"{role}_" if len(classes) > 1 else ""
        members.setdefault(prefix + method, forwarder(role, method))
    return type(name, (AsyncRankProcess if is_async else RankProcess,), members)


def _has_coroutines(cls: type) -> bool:
    return bool(inspect.getmembers(cls, inspect.iscoroutinefunction))


def _forwarder(role: str, method: str) -> Any:
    def forward(self: RankProcess, *args: Any, **kwargs: Any) -> Any:
        return unpack_results([self._host.invoke(Call(role, method, args, kwargs))])[0]

    forward.__name__ = forward.__qualname__ = method
    return forward


def _async_forwarder(role: str, method: str) -> Any:
    async def forward(self: AsyncRankProcess, *args: Any, **kwargs: Any) -> Any:
        call = Call(role, method, args, kwargs)
        return unpack_results([await self._host.invoke_async(lambda: call)])[0]

    forward.__name__ = forward.__qualname__ = method
    return forward


def open_stack_file() -> Any:
    """On STACK_SIGNAL this process writes the stacks of its threads there, whatever it is doing,
    even inside C code that holds the interpreter."""
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - open for the life of the process
        "w", prefix=f"quadriga-stack-{os.getpid()}-", suffix=".txt"
    )
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file


def _log_path() -> str | None:
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def _survives_pickling(error: Exception) -> bool:
    try:
        return isinstance(cloudpickle.loads(cloudpickle.dumps(error)), Exception)
    except Exception:  # whatever a user's exception does when it is pickled
        return False
