"""`WorkerGroup`: many ranks that are called as one object."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quadriga.errors import (
    DispatchError,
    MeshError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
)
from quadriga.single_controller import submit as sending
from quadriga.single_controller.backend import RankSet
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.call import CallView
from quadriga.single_controller.dispatch.mesh_modes import check_mesh
from quadriga.single_controller.dispatch.register import MethodRecord, registered_methods
from quadriga.single_controller.placement.rank_layout import GroupLayout
from quadriga.single_controller.ranks.fused import roles_within
from quadriga.single_controller.watch import Watch, forget

MethodFactory = Callable[["WorkerGroup", str, MethodRecord], Callable[..., Any]]


class WorkerGroup:
    """Ranks of one role, or of several roles that share their processes.

    Every method that the worker class registered is an attribute of the group. A group over
    several roles offers `<role>_<method>`; `spawn` gives one view per role, with plain names, on
    the same processes. `method_factory(group, role, record)` may return something else than a
    `BoundMethod` for a method, to run code before and after each call.
    """

    def __init__(
        self, ranks: RankSet, role: str | None = None, method_factory: MethodFactory = BoundMethod
    ) -> None:
        """`role`: the one whose methods get plain names; None: all, with the role in front."""
        self._ranks = ranks
        self._role = role
        self._method_factory = method_factory
        self._methods: dict[str, Callable[..., Any]] = {}
        self._offered: dict[str, tuple[str, str]] = {}
        self._views: dict[str, WorkerGroup] = {}
        self._bind()

    def _bind(self) -> None:
        roles = self._ranks.roles
        for role in roles if self._role is None else (self._role,):
            prefix = f"{role}_" if self._role is None else ""
            for name, record in registered_methods(roles[role]).items():
                offered = prefix + name
                if hasattr(type(self), offered):
                    raise DispatchError(
                        f"{roles[role].__name__}.{name} cannot be bound: a worker group has "
                        f"{offered!r} itself. Rename the method."
                    )
                self._methods[offered] = self._method_factory(self, role, record)
                self._offered[offered] = role, name
        self.__dict__.update(self._methods)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_methods" not in self.__dict__:
            raise AttributeError(name)
        known = sorted(n for n in self._methods if not n.startswith("_"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UnregisteredMethodError(
            f"{self} has no registered method {name!r}.{hint} Registered: {', '.join(known)}. "
            "Mark a worker's method with @register to call it through a group.",
            method=name,
            known=known,
        )

    def __repr__(self) -> str:
        title = self._role or "+".join(self._ranks.roles)
        return f"<{type(self).__name__} {title}, {self.world_size} ranks>"

    # Who is in the group

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self._ranks.handles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that this group's processes host."""
        return tuple(self._ranks.roles)

    @property
    def workers(self) -> list[Any]:
        """The engine's own handle of each rank."""
        return [handle.native for handle in self._ranks.handles]

    @property
    def worker_names(self) -> list[str]:
        """The name of each rank."""
        return [handle.name for handle in self._ranks.handles]

    @property
    def name_prefix(self) -> str:
        """What the names of this group's ranks begin with."""
        return self._ranks.name_prefix

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        return self._ranks.handles[0].facts.master_address

    @property
    def master_port(self) -> str:
        """Port that rank 0 chose."""
        return self._ranks.handles[0].facts.master_port

    def class_of(self, role: str) -> type:
        """The worker class of a role."""
        return self._ranks.roles[role]

    # Calls

    def start_call(
        self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> sending.StartedCall:
        """Split the arguments and send them; the result waits for `wait()` or `future()`."""
        return sending.start(self._view(method.role), method, args, kwargs)

    def _view(self, role: str) -> WorkerGroup:
        """The group of one role: whose meshes and layout a call of that role goes by."""
        if role == self._role:
            return self
        if role not in self._views:
            view = WorkerGroup.__new__(type(self))
            own = {k: v for k, v in self.__dict__.items() if k not in self._methods}
            view.__dict__.update(own)
            WorkerGroup.__init__(view, self._ranks, role, self._method_factory)
            self._views[role] = view
        return self._views[role]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call any method by name on every rank without waiting; one engine future per rank.

        If every argument is a list of world_size length, each rank gets one entry of each;
        otherwise every rank gets the arguments as they are.
        """
        role, name = self._resolve(method_name)
        values = [*args, *kwargs.values()]
        apart = bool(values) and all(
            isinstance(v, list) and len(v) == self.world_size for v in values
        )
        n = range(self.world_size)
        if apart:
            parts = [(tuple(a[i] for a in args), {k: v[i] for k, v in kwargs.items()}) for i in n]
        else:
            parts = [(args, kwargs)] * self.world_size
        return sending.send_by_name(self._ranks, role, name, list(n), parts)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`, and wait: a list with one result per rank."""
        return self._wait(self.execute_all_async(method_name, *args, **kwargs))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call any method by name on rank 0 without waiting; one engine future."""
        role, name = self._resolve(method_name)
        return sending.send_by_name(self._ranks, role, name, [0], [(args, kwargs)])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As `execute_rank_zero_async`, and wait."""
        return self._wait([self.execute_rank_zero_async(method_name, *args, **kwargs)])[0]

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def _wait(self, natives: Sequence[Any]) -> list[Any]:
        return sending.unpack(self._ranks.backend.gather(natives))

    def _resolve(self, method_name: str) -> tuple[str, str]:
        """Role and method of a name that this group offers."""
        if method_name in self._offered:
            return self._offered[method_name]
        if self._role is None:
            raise UnregisteredMethodError(
                f"{self} offers {sorted(self._methods)}, not {method_name!r}. Take the view of "
                "one role with spawn() to call any of its methods by name.",
                method=method_name,
                known=sorted(self._methods),
            )
        return self._role, method_name

    # Meshes

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """For each rank its data-parallel rank in a mesh; asked of the workers once."""
        return self._mesh(mesh_name)[0]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """For each rank whether its result is collected; asked of the workers once."""
        return self._mesh(mesh_name)[1]

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout that the workers registered; asked once."""
        role = self._role or next(iter(self._ranks.roles))
        if role not in self._ranks.layouts:
            layouts = self._ask(role, "_query_rank_layout")
            self._ranks.layouts[role] = GroupLayout.of(layouts)
        return self._ranks.layouts[role]

    def _mesh(self, mesh_name: str) -> tuple[list[int], list[bool]]:
        role = self._role or next(iter(self._ranks.roles))
        known = self._ranks.meshes
        if (role, mesh_name) not in known:
            answers = self._ask(role, "_query_mesh", mesh_name)
            dp_ranks, collects = [dp for dp, _ in answers], [c for _, c in answers]
            check_mesh(mesh_name, dp_ranks, collects)
            known[role, mesh_name] = dp_ranks, collects
        return known[role, mesh_name]

    def _ask(self, role: str, method: str, *args: Any) -> list[Any]:
        n = self.world_size
        natives = sending.send_by_name(self._ranks, role, method, list(range(n)), [(args, {})] * n)
        try:
            return self._wait(natives)
        except WorkerMethodError as error:
            cause = error.__cause__
            if isinstance(cause, MeshError):
                raise MeshError(str(cause), **vars(cause)) from error
            raise

    # Views

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """One view per role, on the same processes, with plain method names."""
        return {role: self._view(self._known_role(role)) for role in prefix_set}

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """The same as `spawn`, for groups of a fused class."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make each role's view an attribute: `group.actor.update(...)`."""
        for role, view in self.spawn(prefix_set).items():
            setattr(self, role, view)

    def _known_role(self, role: str) -> str:
        if role not in self._ranks.roles:
            raise UnregisteredMethodError(
                f"{self} hosts the roles {list(self._ranks.roles)}, not {role!r}.",
                method=role,
                known=list(self._ranks.roles),
            )
        return role

    # Watching

    def _is_worker_alive(self, worker: Any) -> bool:
        """Whether one rank's process exists; `worker` is one of `workers`."""
        for handle in self._ranks.handles:
            if handle.native is worker:
                return self._ranks.backend.is_alive(handle)
        return False

    def _block_until_all_workers_alive(self, timeout: float = 300.0) -> None:
        """Wait until every rank is alive. Raises WorkerDiedError after `timeout` seconds."""
        self._block_until(True, timeout)

    def _block_until_no_worker_alive(self, timeout: float = 60.0) -> None:
        """Wait until every rank is gone. Raises WorkerDiedError after `timeout` seconds."""
        self._block_until(False, timeout)

    def _block_until(self, alive: bool, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        waiting = list(self._ranks.handles)
        while True:
            waiting = [h for h in waiting if self._ranks.backend.is_alive(h) != alive]
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise WorkerDiedError(
                    f"{self}: rank(s) {[h.facts.rank for h in waiting]} are "
                    f"{'not' if alive else 'still'} alive after {timeout:.0f} s.",
                    rank=waiting[0].facts.rank,
                )
            time.sleep(0.05)

    def start_worker_aliveness_check(self, every_n_seconds: float = 1.0) -> None:
        """Look every `every_n_seconds` whether all ranks live, in a thread. A death ends every
        wait of this controller, on any group, with WorkerDiedError."""
        self.stop_worker_aliveness_check()
        self._ranks.watch = Watch(self._ranks, find_death, every_n_seconds)

    def stop_worker_aliveness_check(self) -> None:
        """End what `start_worker_aliveness_check` began."""
        if self._ranks.watch is not None:
            self._ranks.watch.stop()
            self._ranks.watch = None
        forget(self._ranks)

    def shutdown(self) -> None:
        """End the group's processes."""
        self.stop_worker_aliveness_check()
        for handle in self._ranks.handles:
            self._ranks.backend.kill(handle)


def roles_of(classes: dict[str, type]) -> dict[str, type]:
    """Every role of a process: the given ones and those inside fused classes."""
    roles: dict[str, type] = {}
    for role, cls in classes.items():
        roles[role] = cls
        roles.update(roles_within(cls))
    return roles


def find_death(ranks: RankSet) -> WorkerError | None:
    """The error for the first rank that is gone, None if all live."""
    for handle in ranks.handles:
        if not ranks.backend.is_alive(handle):
            return ranks.backend.death(ranks, handle)
    return None


__all__ = ["CallView", "MethodFactory", "WorkerGroup", "roles_of"]
