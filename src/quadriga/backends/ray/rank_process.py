"""The actor of one rank.

The actor class itself is light. The user's worker class, and what it imports, is loaded by
`quadriga_setup`, so that the processes of all ranks start side by side:

    controller                 rank 0                    rank 1 … n-1
    create actors ───────────► __init__                  __init__                does nothing
    quadriga_prepare ────────► sets variables,           sets variables
                               reserves a port ──┐
    quadriga_setup ──────────► builds workers ◄──┴─────► builds workers
    quadriga_invoke ─────────► one call                  one call      (Ray task "role.method")

The controller sends all of these without waiting. Ray hands rank 0's address and port, the result
of its `quadriga_prepare`, to every `quadriga_setup` as an argument.

A rank keeps freed memory: glibc returns large blocks to the system as soon as they are freed, and
every page of the next ones costs a page fault, although a training step frees and allocates the
same sizes again. Full garbage collections are rare (see `calls`).
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, TypeAlias

import ray
from ray import cloudpickle

from quadriga.backends.ray.cluster import STACK_SIGNAL, node_address
from quadriga.errors import DispatchError
from quadriga.protocol.threads import in_thread
from quadriga.single_controller.backend import RankFacts
from quadriga.single_controller.dispatch import Call, SharedArgument, Ticket, unpack_results
from quadriga.single_controller.environment import RankEnvironment, ReservedPort, visible_devices
from quadriga.single_controller.rank_host import RankHost, private
from quadriga.single_controller.worker import (
    ClassWithInitArgs,
    members_of,
    registered_methods,
    roles_of,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.calls import Splits
    from quadriga.backends.ray.cluster import Ref
    from quadriga.backends.ray.store import RayStore, ResultStore
    from quadriga.protocol.storage import Handle

Sent: TypeAlias = "bytes | tuple[bytes, list[Ref]] | SharedArgument"
"""What the controller sends for a call: its bytes, the same with the references in it, or an object
that opens to it."""


KEPT_BYTES = 256 * 2**20
"""A process keeps up to this much free memory at the end of its heap; glibc's own rule stops at
64 MiB."""
_LARGEST_BLOCK = 32 * 2**20
"""Larger blocks always come from the system: glibc allows no more."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_FULL_BY_DEFAULT = 10
FULL_EVERY = 100
"""In a rank, a full collection follows so many collections of the middle generation."""


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for the next blocks.

    Return False if the user's environment sets the limits of the heap, or without glibc.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK))


def collect_rarely(full_every: int) -> bool:
    """Start a full garbage collection after `full_every` collections of the middle generation.

    Return False if the user has chosen an interval, which then stays.
    """
    young, middle, full = gc.get_threshold()
    if full != _FULL_BY_DEFAULT or not young:
        return False
    gc.set_threshold(young, middle, full_every)
    return True


class RankProcess:
    """Host the workers of one rank. See the docstring of the module."""

    _host: RankHost
    _facts: RankFacts
    _result_store: Callable[[], ResultStore]
    _beside: frozenset[str] = frozenset()
    """The methods ("role.method") that run in a second thread."""
    _max_concurrency: int | None = None
    """How many calls run at the same time, where Ray does not limit it."""

    def quadriga_prepare(
        self,
        variables: Mapping[str, str],
        search_path: Sequence[str],
        preload: Sequence[str],
        choose: bool,
        port_range: Sequence[int] | None = None,
    ) -> tuple[str, str]:
        """Set up the process, before any module of the user is loaded.

        Args:
            variables: environment variables of the user.
            search_path: where the controller finds modules.
            preload: modules to import first.
            choose: reserve a port, because this is rank 0.
            port_range: (first, last + 1), the ports that may be reserved.

        Returns:
            (address, port) of rank 0, two empty strings for other ranks.
        """
        os.environ.update(variables)
        keep_freed_memory()
        collect_rarely(FULL_EVERY)
        sys.path.extend(path for path in search_path if path not in sys.path)
        for module in preload:
            importlib.import_module(module)
        self._stack_file, self._stack_path = open_stack_file()
        if not choose:
            return "", ""
        # The port stays reserved for the life of the process: a worker may call
        # `init_process_group` at any time, and until then no other process may take the port.
        self._port = ReservedPort.choose(port_range)
        return node_address(), str(self._port.port)

    def quadriga_setup(
        self,
        place: RankEnvironment,
        rendezvous: tuple[str, str],
        prepared: tuple[str, str],
        payload: tuple[object, Mapping[str, ClassWithInitArgs], RayStore],
    ) -> RankFacts:
        """Build the workers.

        Args:
            place: rank, world size, … without rank 0's address.
            rendezvous: result of rank 0's `quadriga_prepare`.
            prepared: result of this rank's `quadriga_prepare`. It orders the two: Ray does not
                unpickle `payload`, which imports the user's modules, before this is known.
            payload: the dispatch modes that the user has added, the roles, and the store of
                large fields.
        """
        address, port = rendezvous
        place = replace(place, master_address=address, master_port=port)
        os.environ.update(place.variables())
        # Three more, which verl's groups on Ray set.
        os.environ["WG_BACKEND"] = "ray"
        os.environ["RAY_LOCAL_RANK"] = str(place.local_rank)
        os.environ["RAY_LOCAL_WORLD_SIZE"] = str(place.local_world_size)
        context = ray.get_runtime_context()
        self._facts = RankFacts(
            rank=place.rank, world_size=place.world_size, node=node_address(), pid=os.getpid(),
            master_address=address, master_port=port, group_prefix=place.group_prefix,
            log_path=_log_path(), node_id=context.get_node_id(), stack_path=self._stack_path,
            name=context.get_actor_name() or "", devices=visible_devices(),
            interleaves=isinstance(self, AsyncRankProcess), beside=self._beside,
        )  # fmt: skip
        # Imported here because these modules load numpy, whose thread pools read the environment
        # variables that `quadriga_prepare` has set by now.
        from quadriga.backends.ray.store import ResultStore
        from quadriga.protocol.storage import set_process_store

        _, roles, store = payload
        store.readers = place.local_world_size
        set_process_store(store)
        self._result_store = partial(ResultStore, store)
        self._host = RankHost(
            place, self._facts.node, _survives_pickling, self._max_concurrency, in_process=False
        )
        self._host.build(roles)
        return self._facts

    def quadriga_facts(self) -> RankFacts:
        """Return where this rank runs."""
        return self._facts

    def quadriga_roles(self) -> dict[str, type]:
        """Return the roles that this process hosts, with their classes."""
        return {role: type(worker) for role, worker in self._host.workers.items()}

    def quadriga_invoke(self, sent: Sent, count: int = 0) -> object:
        """Run one call; return its result and, as `count` further returns, its large fields."""
        store = self._result_store()
        returns = store.returns(self._host.invoke(self._call(sent), store), count)
        return returns if count else returns[0]

    def quadriga_invoke_value(self, sent: Sent) -> object:
        """Run one call; return the value itself, for a program that calls `ray.get`."""
        return unpack_results([self._host.invoke(self._call(sent))])[0]

    def _call(self, sent: object) -> Call:
        """Return a call from what was sent for it."""
        role, method = getattr(sent, "label", ("", ""))
        try:
            if isinstance(sent, bytes):
                return data_call(sent)
            if isinstance(sent, tuple):
                return data_call(*sent)
            while isinstance(sent, SharedArgument):
                sent = sent.open()
        except Exception as error:
            raise self._host.unreadable(role, method, error) from None
        assert isinstance(sent, Call)
        return sent

    def quadriga_split(self, splits: Splits) -> object:
        """Wait for futures and return their parts, for the ranks that receive one part each (see
        `calls.split_futures`)."""
        from quadriga.backends.ray.store import pickled_if_bytes
        from quadriga.protocol.boundary import pack_argument, wait_for_arguments

        wait_for_arguments([future for future, _ in splits])
        parts = [pack_argument(part) for future, like in splits for part in future.split(like)]
        parts = [pickled_if_bytes(part) for part in parts]
        return tuple(parts) if len(parts) > 1 else parts[0]


class AsyncRankProcess(RankProcess):
    """Host workers with coroutine methods, which interleave on the actor's event loop."""

    def __init__(self, max_concurrency: int | None = None) -> None:
        self._max_concurrency = max_concurrency
        # Arguments are waited for in a thread, but Ray warns as if that were inside the loop.
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")

    async def quadriga_invoke(  # type: ignore[override]  # the controller sends a ticket too
        self, sent: Sent, ticket: Ticket | None = None, count: int = 0
    ) -> object:
        """Run one call; other calls run while a coroutine method waits."""
        store = self._result_store()
        result = await self._host.invoke_async(lambda: self._call(sent), ticket, store)
        returns = store.returns(result, count)
        return returns if count else returns[0]

    async def quadriga_invoke_value(self, sent: Sent, ticket: Ticket | None = None) -> object:
        """Run one call; return the value itself, for a program that calls `ray.get`."""
        packed = await self._host.invoke_async(lambda: self._call(sent), ticket)
        return unpack_results([packed])[0]

    async def quadriga_split(self, splits: Splits) -> object:
        """Do the same in a thread, while the loop goes on."""
        return await in_thread(super().quadriga_split, splits)

    async def quadriga_coroutines(self) -> str:
        """Return where the coroutine methods of this rank wait, innermost frame first."""
        return "\n\n".join(filter(None, map(_waiting_at, self._host.awaited)))


def data_call(data: bytes, refs: Sequence[Ref] = ()) -> Call:
    """Return a call of plain data, which `calls.encode` has made tuples.

    `refs`: the references in it.
    """
    role, method, values, names, materialize, step = pickle.loads(data)
    if tuple in set(map(type, values)):  # batches; a call without them loads no tensors
        from quadriga.backends.ray.store import Location, RayHandle
        from quadriga.protocol.message import restore

        locations: dict[int, Location] = {}

        def handle_of(flat: tuple[int, str, int, int]) -> Handle:
            at, node, nbytes, index = flat
            location = locations.setdefault(at, Location(refs[at], node))
            return RayHandle(location, nbytes, index)

        batch = partial(restore, handle_of=handle_of)
        values = [batch(*value) if type(value) is tuple else value for value in values]
    cut = len(values) - len(names)
    kwargs = dict(zip(names, values[cut:], strict=True))
    return Call(role, method, tuple(values[:cut]), kwargs, materialize, step)


def _waiting_at(awaitable: Awaitable[object]) -> str:
    """Return the frames of a coroutine, from where it waits out to the worker's method."""
    frames = []
    waiter: object = awaitable.get_coro() if isinstance(awaitable, asyncio.Task) else awaitable
    while (frame := getattr(waiter, "cr_frame", None)) is not None:
        code = frame.f_code
        frames.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        waiter = getattr(waiter, "cr_await", None)
    return "\n".join(reversed(frames))


def rank_process_class(name: str, classes: Mapping[str, type]) -> type[RankProcess]:
    """Return the actor class of a group, named like the user's class and with its public methods.

    The methods are for code that holds an actor handle and calls it directly. With several roles
    they are named `<role>_<method>`. Names that the actor class itself has are left out: a worker's
    own `_call` is not the actor's.
    """
    members: dict[str, object] = {"__module__": "quadriga.ranks", "__doc__": f"A rank of {name}."}
    methods = [
        (role, method)
        for role, cls in classes.items()
        for method, found in members_of(cls).items()
        if not method.startswith("__") and (inspect.isfunction(found) or inspect.ismethod(found))
    ]
    is_async = any(
        inspect.iscoroutinefunction(found)
        for cls in roles_of(dict(classes)).values()  # fused roles too
        for found in members_of(cls).values()
    )
    base = AsyncRankProcess if is_async else RankProcess
    members["_beside"] = beside = frozenset(
        f"{role}.{record.name}"
        for role, cls in roles_of(dict(classes)).items()
        for record in registered_methods(cls).values()
        if record.beside
    )
    if is_async and beside:
        raise DispatchError(
            f"{name}: {min(beside)} is registered with beside=True, but the rank has coroutine "
            "methods, which interleave in one thread. Write those without `async`."
        )
    for role, method in methods:
        offered = f"{role}_{method}" if len(classes) > 1 else method
        if not hasattr(base, offered):
            members.setdefault(offered, _forwarder(role, method, is_async))
    return type(name, (base,), members)


def _forwarder(role: str, method: str, is_async: bool) -> Callable[..., object]:
    """Return a method of the actor that calls the worker's. It copies Ray's read-only arrays."""

    def forward(self: RankProcess, *args: object, **kwargs: object) -> object:
        call = Call(role, method, *private((args, kwargs)))
        return unpack_results([self._host.invoke(call)])[0]

    async def forward_later(self: AsyncRankProcess, *args: object, **kwargs: object) -> object:
        call = Call(role, method, *private((args, kwargs)))
        return unpack_results([await self._host.invoke_async(lambda: call)])[0]

    chosen: Callable[..., object] = forward_later if is_async else forward
    chosen.__name__ = chosen.__qualname__ = method
    return chosen


def open_stack_file() -> tuple[IO[str], str]:
    """Return a file and its path, where this process writes its stacks on STACK_SIGNAL.

    `faulthandler` writes them whatever the process is doing, also inside C code that holds the
    interpreter. On Linux the file has no name in the file system: a process that is killed cannot
    delete one. Its path is that of the open descriptor, `/proc/<pid>/fd/<number>`.
    """
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - open for the life of the process
        "w", prefix=f"quadriga-stack-{os.getpid()}-", suffix=".txt", delete=False
    )
    path, descriptor = file.name, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    if os.path.exists(descriptor):
        os.unlink(path)
        path = descriptor
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    return file, path


def _log_path() -> str | None:
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def _survives_pickling(error: Exception) -> bool:
    try:
        data = cloudpickle.dumps(error)  # type: ignore[no-untyped-call]  # untyped in Ray
        return isinstance(cloudpickle.loads(data), Exception)
    except Exception:  # anything that a user's exception may raise when it is pickled
        return False
