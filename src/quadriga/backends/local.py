"""The local backend: every rank is an object of this process, called in the calling thread.

One rank supports everything, `torch.distributed` with a world size of 1 included. Several ranks are
called one after the other, so they cannot run collectives: asking for one raises CollectiveError. A
call cannot be interrupted, because Python cannot stop a thread from outside, and a breakpoint must
be able to stop one for as long as the user likes. Therefore a second thread looks at the call:

    at the deadline            it logs a warning and records the stack of the call
    when the call returns      the call raises CallTimeoutError with that stack

A call that a debugger holds at its deadline does not exceed it.

Values in the store stay in this process. A handle holds its value, and the value is freed with the
last handle.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, cast

from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    DispatchError,
    PlacementError,
    WorkerDiedError,
    WorkerError,
)
from quadriga.protocol.storage import InProcessStore, set_process_store, use_store
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller import rank_host
from quadriga.single_controller.backend import (
    Backend,
    RankFacts,
    RankHandle,
    RankSet,
    check_timeouts,
)
from quadriga.single_controller.dispatch import Call, Pending
from quadriga.single_controller.environment import (
    LOCAL_PORT,
    RankEnvironment,
    ReservedPort,
    WorkerEnv,
    environment,
    variables_of_rank,
)
from quadriga.single_controller.rank_host import RankHost
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker import ClassWithInitArgs
from quadriga.single_controller.worker_group import (
    BindingPolicy,
    BoundMethod,
    MethodFactory,
    WorkerGroup,
    bind_all,
)

logger = logging.getLogger("quadriga.controller")

DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "pydevd_frame.py")


class _Deadline(threading.Timer):
    """Looks at a call of this thread at its deadline.

    Consumes: nothing. Waits for: the deadline. Unblocked by: the end of the call (`cancel`).
    """

    def __init__(self, label: str, rank: int, timeout: float) -> None:
        super().__init__(timeout, self._look)
        self.daemon = True
        self.stack = "  (it ended at that moment)"
        self.debugged = False
        self._called = threading.get_ident()
        self._text = f"{label} on rank {rank} exceeded its deadline of {timeout:g} s"

    def _look(self) -> None:
        frame = sys._current_frames().get(self._called)
        self.stack, self.debugged = _stack(frame), _in_debugger(frame)
        if not self.debugged:
            logger.warning(
                "%s and continues, because a local call cannot be interrupted; it is at\n%s",
                self._text,
                self.stack,
            )


@contextmanager
def _watched(host: RankHost, call: Call, timeout: float | None) -> Iterator[None]:
    """Watch a call. Raises `CallTimeoutError` at its end if it took `timeout` seconds or more."""
    if timeout is None:
        yield
        return
    began, rank = time.monotonic(), host.place.rank
    deadline = _Deadline(call.label, rank, timeout)
    deadline.start()
    try:
        yield
    finally:
        deadline.cancel()
    took = time.monotonic() - began
    if took < timeout or deadline.debugged:
        return
    raise CallTimeoutError(
        f"{call.label} exceeded its deadline of {timeout:g} s on rank(s) {rank}: it took "
        f"{took:.1f} s. A local rank runs in the thread of the caller, so it was not "
        f"interrupted.\n\nStack of rank {rank} at the deadline:\n{deadline.stack}",
        role=call.role,
        rank=rank,
        node=host.node,
        method=call.method,
        stacks={rank: deadline.stack},
    )


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stack(frame: FrameType | None) -> str:
    """Return the frames from the innermost one out to the worker's method."""
    lines = []
    while frame is not None and frame.f_code.co_filename != rank_host.__file__:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) or "  (between two calls)"


@dataclass(frozen=True)
class LocalRank:
    """One rank: its workers, and the environment variables that are set while they run."""

    host: RankHost
    variables: dict[str, str]

    def invoke(self, call: Call, timeout: float | None) -> object:
        """Run the call to its end. Raises `CallTimeoutError` if that took longer than `timeout`."""
        with environment(self.variables), _watched(self.host, call, timeout):
            return self.host.invoke(call)


@dataclass(frozen=True)
class LocalPending(PendingValue):
    """The result of a call that has ended, or its error."""

    value_here: object = None
    error: Exception | None = None

    def result(self) -> object:
        """Return the value. Raises the error of the call."""
        if self.error is not None:
            raise self.error
        return self.value_here


@dataclass
class _Turn:
    """The right of a chain of calls to run calls of a group."""

    ranks: RankSet
    ended: bool = False


_turns: ContextVar[tuple[_Turn, ...]] = ContextVar("turns", default=())
"""The turns of the chain of calls that runs here: group A calls B, whose coroutine calls A."""


@contextmanager
def _turn(ranks: RankSet, label: str, timeout: float | None) -> Iterator[None]:
    """Wait until no other chain of calls runs a call of the group, and keep others out.

    A chain may go on in another thread, for which `ranks.lock` is taken although its holder waits.
    Tasks and threads that a call has started keep their context when it has ended, hence `ended`.
    """
    held = _turns.get()
    if any(turn.ranks is ranks and not turn.ended for turn in held):
        yield
        return
    if not ranks.lock.acquire(timeout=-1 if timeout is None else timeout):
        raise CallTimeoutError(
            f"{label} exceeded its deadline of {timeout:g} s before it started: another thread "
            "runs a call of its group. If that call waits for this one, let one thread make both.",
            method=label.rpartition(".")[2],
            stacks={},
        )
    turn = _Turn(ranks)
    token = _turns.set((*held, turn))
    try:
        yield
    finally:
        turn.ended = True
        _turns.reset(token)
        ranks.lock.release()


def rank_of(handle: RankHandle) -> LocalRank:
    """Return the rank of a handle of this backend."""
    return cast(LocalRank, handle.native)


MACHINE_OPTIONS = (
    "bin_pack", "device_name", "master_port_range", "namespace", "register_center", "start_timeout",
)  # fmt: skip
"""Options of other backends that have no effect in one process."""


class LocalWorkerGroup(WorkerGroup):
    """Build one worker per rank of the pool, in this process."""

    _ports: list[ReservedPort]

    def __init__(
        self,
        resource_pool: ResourcePool | None,
        cls_with_init: ClassWithInitArgs,
        *,
        backend: LocalBackend | None = None,
        name_prefix: str | None = None,
        role: str | None = None,
        worker_env: WorkerEnv | None = None,
        timeout: float | None = None,
        detached: bool = False,
        sharing_with: WorkerGroup | None = None,
        method_factory: MethodFactory = BoundMethod,
        binding: BindingPolicy = bind_all,
        **machine_options: object,
    ) -> None:
        """Args:
        resource_pool: one rank per bundle.
        cls_with_init: the worker class with its arguments, or several roles.
        backend: the backend that builds the group.
        name_prefix: start of the names of the ranks.
        role: the name of a class that is one role by itself, in messages.
        worker_env: environment variables that are set while the workers run: the same for all
            ranks, one mapping per rank, or a function of the rank.
        timeout: default deadline of a call in seconds.
        detached: must be False.
        sharing_with: another group, whose bundles are used instead of a pool's.
        method_factory: makes the group's methods.
        binding: which registered methods become attributes of the group.
        machine_options: `MACHINE_OPTIONS`, so that a program may run on either backend.

        Raises `PlacementError` for `detached=True` or a pool of another backend, `ConfigError` for
        an option that no backend has.
        """
        if detached:
            raise PlacementError(
                "A local group ends with its controller; detached=True needs backend=ray."
            )
        if unknown := sorted(set(machine_options) - set(MACHINE_OPTIONS)):
            raise ConfigError(
                f"A local group has no option {unknown[0]!r}. It takes name_prefix, role, "
                "worker_env, timeout, sharing_with, method_factory, binding, and without effect "
                f"{', '.join(MACHINE_OPTIONS)}.",
                key=unknown[0],
            )
        check_timeouts("LocalWorkerGroup", timeout=timeout)
        local = _local_places(resource_pool, sharing_with)
        backend = backend or LocalBackend()
        set_process_store(backend.store)
        prefix = name_prefix or "local"
        classes, roles, single = self._roles_of(cls_with_init, role, binding)
        self._ports = [ReservedPort.choose()] if len(local) == 1 else []
        port = str(self._ports[0].port) if self._ports else LOCAL_PORT
        places = [
            RankEnvironment(rank, len(local), *place, "127.0.0.1", port, prefix)
            for rank, place in enumerate(local)
        ]
        variables = [variables_of_rank(worker_env, p.rank, p.world_size) for p in places]
        handles = [
            _build(place, classes, own, prefix)
            for place, own in zip(places, variables, strict=True)
        ]
        ranks = RankSet(backend, handles, roles, prefix, timeout)
        super().__init__(ranks, single, method_factory, binding)


def _local_places(
    pool: ResourcePool | None, sharing_with: WorkerGroup | None
) -> list[tuple[int, int]]:
    """Return (local rank, local world size) of each rank."""
    if sharing_with is not None:
        places = [rank_of(handle).host.place for handle in sharing_with._ranks.handles]
        return [(place.local_rank, place.local_world_size) for place in places]
    if pool is None:
        raise DispatchError("A local group needs a resource_pool, or a group to share with.")
    return list(zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True))


def _build(
    place: RankEnvironment,
    classes: Mapping[str, ClassWithInitArgs],
    worker_env: dict[str, str],
    prefix: str,
) -> RankHandle:
    node = socket.gethostname()
    host = RankHost(place, node)
    variables = {**worker_env, **place.variables()}
    with environment(variables):
        host.build(classes)
    address = place.master_address, place.master_port
    facts = RankFacts(place.rank, place.world_size, node, os.getpid(), *address, prefix)
    name = f"{prefix}{'_'.join(classes)}:{place.rank}"
    return RankHandle(LocalRank(host, variables), name, facts)


class LocalBackend(Backend):
    """Implement `quadriga.single_controller.backend.Backend` in one process."""

    name = "local"

    @cached_property
    def store(self) -> InProcessStore:
        """Where remote fields are stored."""
        return InProcessStore()

    def submit(
        self, ranks: RankSet, targets: Sequence[int], calls: Sequence[Call], timeout: float | None
    ) -> Sequence[Pending]:
        """Run each call to its end, rank after rank. A deadline applies to each rank by itself.

        As on Ray, a rank runs one call at a time: the call of another thread waits. If it
        waits for `timeout` seconds, its results are a `CallTimeoutError`.
        """
        try:
            with _turn(ranks, calls[0].label, timeout):
                return [
                    self._run(ranks, ranks.handles[target], call, timeout)
                    for target, call in zip(targets, calls, strict=True)
                ]
        except CallTimeoutError as late:  # raised where the caller waits
            return [LocalPending(error=late)] * len(targets)

    def _run(
        self, ranks: RankSet, handle: RankHandle, call: Call, timeout: float | None
    ) -> LocalPending:
        try:
            if self.dead([handle]):
                raise self.death(ranks, handle)
            with use_store(self.store):
                return LocalPending(rank_of(handle).invoke(call, timeout))
        except Exception as error:  # raised where the caller waits, as on the Ray backend
            return LocalPending(error=error)

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return the results in order. The first rank's error is raised."""
        return [pending.result() for pending in pendings]

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return the ranks that were killed: they have no workers."""
        return [handle for handle in handles if not rank_of(handle).host.workers]

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError:
        """Return the error for a rank that was killed."""
        role, rank = "+".join(ranks.roles), handle.facts.rank
        return WorkerDiedError(f"{role} rank {rank} was ended.", role=role, rank=rank, method="")

    def kill(self, handle: RankHandle) -> None:
        """Drop the rank's workers."""
        rank_of(handle).host.workers.clear()

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> ResourcePool:
        """Return a pool. Options of machines (`use_gpu`, …) have no effect."""
        return ResourcePool(process_on_nodes, options.get("max_colocate_count", 1))

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: Any
    ) -> LocalWorkerGroup:
        """Build the ranks of a `LocalWorkerGroup`."""
        return LocalWorkerGroup(pool, cls, backend=self, **options)
