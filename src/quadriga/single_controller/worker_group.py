"""`WorkerGroup`: many ranks that are called as one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from quadriga.errors import (
    DispatchError,
    MeshError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    nearest_name,
)
from quadriga.single_controller.backend import Mesh, RankSet, Watch, forget
from quadriga.single_controller.batch_modes import check_mesh
from quadriga.single_controller.bound_method import BoundMethod, Part, parts_of_ranks
from quadriga.single_controller.call import Arguments, CallView, KeywordArguments
from quadriga.single_controller.dispatch import DispatchMode, MethodRecord, registered_methods
from quadriga.single_controller.rank_layout import GroupLayout
from quadriga.single_controller.verl_names import VerlNames
from quadriga.single_controller.worker import reraise_in_property

MethodFactory = Callable[["WorkerGroup", str, MethodRecord], Callable[..., object]]
BindingPolicy = Callable[[type, MethodRecord], bool]
"""`policy(worker_class, record)`: whether a registered method becomes an attribute of the group."""


def bind_all(worker_class: type, record: MethodRecord) -> bool:
    """Bind every registered method."""
    return True


class WorkerGroup(VerlNames):
    """The ranks of one role, or of several roles that share their processes.

    Every registered method of the worker class is an attribute of the group. A group of several
    roles offers `<role>_<method>`. `spawn` returns one view per role on the same processes, with
    plain method names.

    Args:
        ranks: The processes.
        role: The role whose methods get plain names. None: all roles, each as a prefix.
        method_factory: `method_factory(group, role, record)` returns the attribute for a method,
            in place of a `BoundMethod`; for example with code before and after each call.
        binding: `binding(worker_class, record)` says whether a method becomes an attribute. A
            method that does not can still be called by its name (`call_all`).
    """

    _method_factory: MethodFactory
    _binding: BindingPolicy
    _views: dict[str, WorkerGroup]

    def __init__(
        self,
        ranks: RankSet,
        role: str | None = None,
        method_factory: MethodFactory = BoundMethod,
        binding: BindingPolicy = bind_all,
    ) -> None:
        self._ranks = ranks
        self._role = role
        self._method_factory = method_factory
        self._binding = binding
        self._views = {}
        self._bind()

    def _bind(self) -> None:
        """Make each registered method an attribute."""
        self._offered = self._bound_names(self._ranks.roles, self._role, self._binding)
        for offered, (role, name) in self._offered.items():
            record = registered_methods(self._ranks.roles[role])[name]
            self.__dict__[offered] = self._method_factory(self, role, record)

    @classmethod
    def _bound_names(
        cls,
        roles: Mapping[str, type],
        role: str | None = None,
        binding: BindingPolicy = bind_all,
    ) -> dict[str, tuple[str, str]]:
        """Return the names that a group of these worker classes offers, as name → (role, method).

        `role` and `binding` as in `__init__`. Backends call this before they start a process.
        Raises `DispatchError` for a method with the name of an attribute of the group.
        """
        names: dict[str, tuple[str, str]] = {}
        own = _declared_attributes(cls)
        for each in roles if role is None else (role,):
            prefix = f"{each}_" if role is None else ""
            for name, record in registered_methods(roles[each]).items():
                if not binding(roles[each], record):
                    continue
                for offered in (prefix + name, name):  # `name` in the view of the role
                    if hasattr(cls, offered) or offered in own:
                        raise DispatchError(
                            f"{roles[each].__name__}.{name} cannot be bound: a worker group has "
                            f"{offered!r} itself. Rename the method."
                        )
                names[prefix + name] = each, name
        return names

    def __getattr__(self, name: str) -> Any:  # a registered method, which no type can name here
        # Before `__init__` has run (copy, pickle) there are no methods to name.
        if name.startswith("__") or "_offered" not in self.__dict__:
            raise AttributeError(name)
        reraise_in_property(self, name)
        if self._left_out(name):
            raise UnregisteredMethodError(
                f"{self} has no attribute {name!r}: its binding policy leaves this registered "
                f"method out. Call it by name, call_all({name!r}, …), or change the policy.",
                method=name,
                known=sorted(self._offered),
            )
        known = sorted(n for n in self._offered if not n.startswith("_"))
        near = nearest_name(name, known)
        hint = f" Did you mean {near}?" if near else ""
        raise UnregisteredMethodError(
            f"{self} has no registered method {name!r}.{hint} Registered: {', '.join(known)}. "
            "Mark a worker's method with @register to call it through a group.",
            method=name,
            known=known,
        )

    def _left_out(self, name: str) -> bool:
        """Return whether the binding policy left a registered method of this name out."""
        for role in self.roles if self._role is None else (self._role,):
            prefix = f"{role}_" if self._role is None else ""
            methods = registered_methods(self.class_of(role))
            if name.startswith(prefix) and name.removeprefix(prefix) in methods:
                return True
        return False

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a group names processes, and a copy would name the same ones

    def __repr__(self) -> str:
        title = self._role or "+".join(self._ranks.roles)
        return f"<{type(self).__name__} {title}, {self.world_size} ranks>"

    # Ranks

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return len(self._ranks.handles)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in each process of the group."""
        return tuple(self._ranks.roles)

    @property
    def workers(self) -> list[Any]:  # the type depends on the backend
        """The backend's own handle of each rank."""
        return [handle.native for handle in self._ranks.handles]

    @property
    def worker_names(self) -> list[str]:
        """The name of each rank."""
        return [handle.name for handle in self._ranks.handles]

    @property
    def name_prefix(self) -> str:
        """The prefix of the names of the ranks."""
        return self._ranks.name_prefix

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0."""
        return self._ranks.handles[0].facts.master_address

    @property
    def master_port(self) -> str:
        """The port that rank 0 reserved."""
        return self._ranks.handles[0].facts.master_port

    def class_of(self, role: str) -> type:
        """Return the worker class of a role."""
        return self._ranks.roles[role]

    def _parts_of_call(
        self, view: CallView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
    ) -> list[Part]:
        """Return the arguments of each executing rank, as the dispatch mode splits them."""
        return parts_of_ranks(view, mode.dispatch_fn(view, *args, **kwargs))

    # Views of one role

    def _role_view(self, role: str) -> WorkerGroup:
        """Return the group of one role on the same processes, with plain method names.

        Raises `UnregisteredMethodError` if the processes do not have the role.
        """
        if role == self._role:
            return self
        if role not in self._ranks.roles:
            raise UnregisteredMethodError(
                f"{self} hosts the roles {list(self._ranks.roles)}, not {role!r}.",
                method=role,
                known=list(self._ranks.roles),
            )
        if role not in self._views:
            view = WorkerGroup.__new__(type(self))
            # Attributes of a subclass (its pool, its ports) belong to the view too.
            own = {k: v for k, v in self.__dict__.items() if k not in self._offered}
            view.__dict__.update(own)
            WorkerGroup.__init__(view, self._ranks, role, self._method_factory, self._binding)
            self._views[role] = view
        return self._views[role]

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return one view per role."""
        return {role: self._role_view(role) for role in prefix_set}

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the view of each role an attribute: `group.actor.update(...)`."""
        for role, view in self.spawn(prefix_set).items():
            setattr(self, role, view)

    # Meshes

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh. The workers are asked once."""
        return self._mesh(mesh_name)[0]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected. The workers are asked once."""
        return self._mesh(mesh_name)[1]

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout that the workers registered. They are asked once."""
        role = self._role or next(iter(self._ranks.roles))
        if role not in self._ranks.rank_layouts:
            layouts = self._ask(role, "_query_rank_layout")
            self._ranks.rank_layouts[role] = GroupLayout.of(layouts)
        return self._ranks.rank_layouts[role]

    def _mesh(self, mesh_name: str) -> Mesh:
        role = self._role or next(iter(self._ranks.roles))
        known = self._ranks.meshes
        if (role, mesh_name) not in known:
            registered = self._ask(role, "_query_mesh", mesh_name)
            dp_ranks = [dp for dp, _ in registered]
            collects = [is_collect for _, is_collect in registered]
            check_mesh(mesh_name, dp_ranks, collects)
            known[role, mesh_name] = dp_ranks, collects
        return known[role, mesh_name]

    def _ask(self, role: str, method: str, *args: object) -> list[Any]:  # results of any method
        """Call a method on every rank. Raises the `MeshError` of a worker unchanged."""
        n = self.world_size
        try:
            return self._results(self._send(role, method, range(n), [(args, {})] * n))
        except WorkerMethodError as error:
            # An unregistered mesh is a mistake in the program, not a failure of the worker.
            cause = error.__cause__
            if isinstance(cause, MeshError):
                raise MeshError(str(cause), **vars(cause)) from error
            raise

    # Alive or not

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank exists."""
        return self._ranks.backend.is_alive(self._ranks.handles[rank])

    def wait_until_alive(self, timeout: float = 300.0) -> None:
        """Wait until every rank is alive. Raises `WorkerDiedError` after `timeout` seconds."""
        self._wait_until(True, timeout)

    def wait_until_ended(self, timeout: float = 60.0) -> None:
        """Wait until every rank has ended. Raises `WorkerDiedError` after `timeout` seconds."""
        self._wait_until(False, timeout)

    def _wait_until(self, alive: bool, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        waiting = list(self._ranks.handles)
        while True:
            dead = {id(handle) for handle in self._ranks.backend.dead(waiting)}
            waiting = [handle for handle in waiting if (id(handle) in dead) == alive]
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
        """Check in a thread whether all ranks are alive, every `every_n_seconds` seconds.

        The death of a rank ends every wait of this controller, on any group, with WorkerDiedError.
        """
        self.stop_worker_aliveness_check()
        self._ranks.watch = Watch(self._ranks, find_death, every_n_seconds)

    def stop_worker_aliveness_check(self) -> None:
        """Stop the thread of `start_worker_aliveness_check`."""
        if self._ranks.watch is not None:
            self._ranks.watch.stop()
            self._ranks.watch = None
        forget(self._ranks)

    def shutdown(self) -> None:
        """End the processes of the group, all of them before an error of one is raised."""
        self.stop_worker_aliveness_check()
        with ExitStack() as stack:  # which calls the last callback first
            for handle in reversed(self._ranks.handles):
                stack.callback(self._ranks.backend.kill, handle)


def find_death(ranks: RankSet) -> WorkerError | None:
    """Return the error for the first rank that has ended, None if all are alive."""
    for handle in ranks.backend.dead(ranks.handles):
        return ranks.backend.death(ranks, handle)
    return None


def _declared_attributes(cls: type[WorkerGroup]) -> set[str]:
    """Return the attributes that the groups of this package declare. A subclass of a user, or that
    of `compat`, may declare the types of the methods that are bound."""
    groups = ("quadriga.single_controller.", "quadriga.backends.")
    bases = [base for base in cls.__mro__ if base.__module__.startswith(groups)]
    return {name for base in bases for name in vars(base).get("__annotations__", {})}
