"""verl's worker groups and resource pools: names are bound verl's way, calls return references.

WorkerGroup._bind_worker_method(cls, func_generator)     for each registered method of `cls`
  func_generator(group, name, dispatch_fn, collect_fn, execute_fn, blocking)
    → functor(*args)     dispatch_fn(group, *args) → execute_fn(name, *parts) → references
                         → values if blocking → collect_fn(group, outputs)
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from quadriga import single_controller
from quadriga.backends.ray import (
    Nsight,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup as QuadrigaGroup,
)
from quadriga.backends.ray.cluster import ensure_ray
from quadriga.backends.ray.pool import alive_nodes, sort_by_node_address
from quadriga.backends.ray.start import RayColocatedClass, classes_of
from quadriga.compat.verl.controller import decorator
from quadriga.compat.verl.controller.references import (
    actor_method,
    stored,
    submit_values,
    values_of,
)
from quadriga.errors import DispatchError, PlacementError, WorkerDiedError
from quadriga.protocol import DataProto
from quadriga.single_controller import ClassWithInitArgs, GroupLayout, RankLayout
from quadriga.single_controller.backend import RankSet
from quadriga.single_controller.dispatch import Arguments, GroupInfo, GroupView, KeywordArguments
from quadriga.single_controller.modes import (
    Dispatch,
    DispatchMode,
    Execute,
    ExecuteMode,
    NotGiven,
    inline_dispatch_mode,
)
from quadriga.single_controller.resource_pool import check_feasible
from quadriga.single_controller.worker import registered_methods
from quadriga.single_controller.worker_group import Part, bind_all, build_calls, transposed

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref

Functor: TypeAlias = Callable[..., Any]  # returns what a user's method or collect function returns
FunctorFactory: TypeAlias = Callable[..., Functor]


def func_generator(
    self: object,
    method_name: str,
    dispatch_fn: Callable[..., decorator.Columns],
    collect_fn: Callable[..., object],
    execute_fn: Callable[..., Any],  # references of Ray, or what a group of the user's returns
    blocking: bool,
) -> Functor:
    """Return the functor of one method. Its class has the name of the method, for traces.

    Args:
        self: the group.
        method_name: what `execute_fn` calls.
        dispatch_fn: `dispatch_fn(group, *args, **kwargs)` splits the arguments.
        collect_fn: `collect_fn(group, outputs)` joins the results.
        execute_fn: `execute_fn(method_name, *args, **kwargs)` returns Ray's references.
        blocking: whether to wait for the references before `collect_fn`. The wait ends with
            `CallTimeoutError` at the deadline that the group was given.
    """

    def call(functor: object, *args: object, **kwargs: object) -> object:
        split_args, split_kwargs = dispatch_fn(self, *args, **kwargs)
        padding = cast(int, split_kwargs.pop(decorator.PADDING, 0))
        output = execute_fn(method_name, *split_args, **split_kwargs)
        if blocking:
            ranks: RankSet | None = getattr(self, "_ranks", None)  # not in a group of one's own
            refs = output if isinstance(output, list) else [output]
            values = values_of(refs, ranks.timeout if ranks else None, method_name)
            output = values if isinstance(output, list) else values[0]
        return decorator.without_padding(collect_fn(self, output), padding)

    return cast(Functor, type(method_name, (), {"__call__": call})())


_LIBRARY = func_generator


@dataclass
class ModeOfMethod:
    """The two functions of a method's mode, for a functor that calls them with the group.

    Attributes:
        label: "role.method", for error messages.
        dispatch: the dispatch mode.
        execute: the execute mode.
        role: the role of the method, in a group of several roles, which have their own meshes.
        views: thread → the view of its call. `collect_fn` needs what `dispatch_fn` has noted in
            it, such as the number of padding rows.
    """

    label: str
    dispatch: DispatchMode
    execute: ExecuteMode
    role: str | None = None
    views: dict[int, GroupView] = field(default_factory=dict)

    @property
    def on_one_rank(self) -> bool:
        """Whether one rank executes and receives the arguments as they are."""
        return self.execute.single or self.dispatch.ranks is not None

    def dispatch_fn(self, group: GroupInfo, *args: object, **kwargs: object) -> decorator.Columns:
        """Split the arguments of a call into the columns of its execute function."""
        if self.role is not None:
            group = cast(single_controller.WorkerGroup, group)._role_view(self.role)
        ranks = self.dispatch.ranks or self.execute.ranks
        every: Sequence[int] = range(group.world_size)
        view = GroupView(group, every, self.label, self.on_one_rank)
        given = isinstance(ranks, NotGiven)  # then an execute function of the group knows them
        view.ranks = every if given else ranks(view)
        self.views[threading.get_ident()] = view
        mode = Dispatch.members.get(self.dispatch.name, self.dispatch)
        columns = decorator.columns_of(view, mode, args, kwargs)
        if given or (self.execute == Execute["ALL"] and not self.on_one_rank):
            return columns
        parts = decorator.parts_of(view, mode, columns)
        if self.on_one_rank:
            return parts[0]
        split_args, split_kwargs = columns
        return (
            tuple([part[0][i] for part in parts] for i in range(len(split_args))),
            {name: [part[1][name] for part in parts] for name in split_kwargs},
        )

    def collect_fn(self, group: GroupInfo, output: object) -> object:
        """Join the results, or make a future of references to batches."""
        view = self.views.pop(threading.get_ident(), None)
        if view is None:
            view = GroupView(group, range(group.world_size), self.label, self.on_one_rank)
        mode = Dispatch.members.get(self.dispatch.name, self.dispatch)
        return decorator.collect_later(mode.collect_fn, view, output)


def mode_of(method: object, label: str) -> tuple[ModeOfMethod, bool] | None:
    """Return the mode of a registered function and whether its calls wait; None if unregistered."""
    record = decorator.attributes_of(method)
    if record is None:
        return None
    mode: DispatchMode | Mapping[str, Any] = record["dispatch_mode"]  # a program's own dict
    dispatch = (
        mode
        if isinstance(mode, DispatchMode)
        else inline_dispatch_mode(decorator.inline_functions(mode))
    )
    return ModeOfMethod(label, dispatch, record["execute_mode"]), bool(record["blocking"])


class _IsGroup(type):
    """`isinstance(group, WorkerGroup)` is true for Quadriga's groups too."""

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return cls is WorkerGroup and isinstance(instance, single_controller.WorkerGroup)


class WorkerGroup(metaclass=_IsGroup):
    """verl's base class of groups, for groups of one's own.

    A subclass sets `_workers` and calls `_bind_worker_method`. Its `execute_all` and
    `execute_rank_zero` return references of Ray.
    """

    fused_worker_execute_fn_name = "_fuw_execute"
    # Bound like every registered method, from the class `Worker`.
    _query_dispatch_info: Callable[[str], list[int]]
    _query_collect_info: Callable[[str], list[bool]]
    _query_rank_layout: Callable[[], list[RankLayout]]

    def __init__(self, resource_pool: Any = None, **kwargs: object) -> None:  # any callable pool
        self._is_init_with_detached_workers = resource_pool is None
        self._process_dispatch_config = None if resource_pool is None else resource_pool.store
        self._workers: list[Any] = []  # handles of any kind
        self._worker_names: list[str] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self.fused_worker_used = False

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return len(self._workers)

    @property
    def workers(self) -> list[Any]:
        """The handles of the workers."""
        return self._workers

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh. The workers are asked once."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = self._query_dispatch_info(mesh_name)
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected in a mesh. The same as above."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = self._query_collect_info(mesh_name)
        return self._collect_info[mesh_name]

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout that the workers registered."""
        return GroupLayout.of(self._query_rank_layout())

    def _is_worker_alive(self, worker: object) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define _is_worker_alive(worker).")

    def _block_until_all_workers_alive(self, timeout: float = 300.0) -> None:
        """Wait until every worker is alive. Raises `TimeoutError` after `timeout` seconds."""
        expires = time.monotonic() + timeout
        while not all(map(self._is_worker_alive, self._workers)):
            if time.monotonic() > expires:
                raise TimeoutError(f"{type(self).__name__}: not all workers live after {timeout} s")
            time.sleep(0.2)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Any) -> list[str]:
        """Make each registered method of a class an attribute of the group. Return their names.

        `func_generator` makes the attribute, as the function of this module does. Raises
        `DispatchError` if the group does not have the execute function of a method.
        """
        names = []
        for name in dir(user_defined_cls):
            found = self._mode_of(user_defined_cls, name)
            if found is None:
                continue
            mode, blocking = found
            functions = {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}
            functions["execute_fn"] = self._execute_function(mode, name)
            setattr(self, name, func_generator(self, name, **functions, blocking=blocking))
            names.append(name)
        return names

    def _mode_of(self, user_defined_cls: type, name: str) -> tuple[ModeOfMethod, bool] | None:
        """Return the mode of a method and whether its calls wait; None if it is not registered."""
        return mode_of(getattr(user_defined_cls, name, None), f"{type(self).__name__}.{name}")

    def _execute_function(self, mode: ModeOfMethod, method: str) -> Callable[..., object]:
        """Return the function of this group that runs calls of a mode."""
        execute = Execute["RANK_ZERO"] if mode.dispatch.ranks else mode.execute
        name = decorator.get_predefined_execute_fn(execute)["execute_fn_name"]
        function: Callable[..., object] | None = getattr(self, name, None)
        if function is None:
            raise DispatchError(
                f"{method} is registered with {execute!r}, but {type(self).__name__} has no method "
                f"{name!r}. Define it, or give the mode its ranks with update_execute_mode."
            )
        return function


class GroupOfReferences(QuadrigaGroup):
    """A worker group whose calls by name return references where Quadriga returns `Pending`s."""

    def _replaces(self, *names: str) -> bool:
        """Return whether a subclass has replaced one of these methods."""
        return any(getattr(type(self), f) is not getattr(GroupOfReferences, f) for f in names)

    def _call_ranks(
        self, targets: Sequence[int], method_name: str, parts: Sequence[Part]
    ) -> list[object]:
        """Call any method of some ranks with the arguments of each, all packed before one is sent.

        A class that replaces `_execute_remote_single_worker` is asked once for each rank.
        """
        name = "_execute_remote_single_worker"
        if self._replaces(name):
            return [
                self._execute_remote_single_worker(self.workers[rank], method_name, *args, **kwargs)
                for rank, (args, kwargs) in zip(targets, parts, strict=True)
            ]
        return list(self._submit(targets, method_name, parts))

    def _execute_remote_single_worker(
        self, worker: object, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call any method of one worker. Return a Ray object reference to its value."""
        rank = next((r for r, known in enumerate(self.workers) if known is worker), None)
        if rank is None:
            self._role_and_method(method_name)  # raises for a method that no role has
            return actor_method(worker, method_name)(*args, **kwargs)
        return self._submit([rank], method_name, [(args, kwargs)])[0]

    def _submit(
        self, targets: Sequence[int], method_name: str, parts: Sequence[Part]
    ) -> Sequence[object]:
        role, name = self._role_and_method(method_name)
        ranks = self._ranks
        if ranks.broken:
            label = f"{role}.{name}"
            raise WorkerDiedError(f"{label} cannot be called: {ranks.broken}", method=label)
        record = registered_methods(ranks.roles[role]).get(name)
        materialize = record is None or record.materialize_futures
        calls = build_calls(ranks, targets, role, name, parts, materialize)
        return submit_values(ranks, targets, calls)

    def execute_all_async(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> list[object]:
        """Call any method by name on every rank. Return one Ray object reference per rank.

        If every argument is a list of world_size length, rank i receives entry i of each.
        """
        n = self.world_size
        given = (*args, *kwargs.values())
        if all(isinstance(value, list) and len(value) == n for value in given):
            parts = transposed(cast(Any, args), cast(Any, kwargs), n)
        else:
            # A batch is stored once, whatever the number of ranks that receive it.
            once = {id(v): stored(v) for v in given if isinstance(v, DataProto) and n > 1}
            same_args = tuple(once.get(id(value), value) for value in args)
            parts = [(same_args, {k: once.get(id(v), v) for k, v in kwargs.items()})] * n
        return self._call_ranks(range(n), method_name, parts)

    def execute_rank_zero_async(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call any method by name on rank 0. Return a Ray object reference."""
        return self._execute_remote_single_worker(self.workers[0], method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[object]:
        """Call any method by name on every rank, through `execute_all_async`. Return its values."""
        if self._replaces("execute_all_async", "_execute_remote_single_worker"):
            refs = cast("list[Ref]", self.execute_all_async(method_name, *args, **kwargs))
            return values_of(refs, self._ranks.timeout, method_name)
        return super().execute_all_sync(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call any method by name on rank 0, through `execute_rank_zero_async`."""
        if self._replaces("execute_rank_zero_async", "_execute_remote_single_worker"):
            ref = cast("Ref", self.execute_rank_zero_async(method_name, *args, **kwargs))
            return values_of([ref], self._ranks.timeout, method_name)[0]
        return super().execute_rank_zero_sync(method_name, *args, **kwargs)

    def execute_all(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> list[object]:
        """Call `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)


WorkerT = TypeVar("WorkerT")

_EXECUTE_FUNCTIONS = (
    *("execute_all", "execute_all_async", "execute_rank_zero", "execute_rank_zero_async"),
    "_execute_remote_single_worker",
)


class RayWorkerGroup(GroupOfReferences, WorkerGroup):
    """A Ray worker group that accepts verl's keywords and returns Ray's object references.

    A method that waits runs as in Quadriga, unless a subclass replaces `_bind_worker_method` or an
    execute function. A method with `blocking=False` returns what its collect function makes of the
    references: a list of them, or a `DataProtoFuture` for modes that join batches.

    `master_port` asks rank 0 to use that port. `use_gpu` must agree with the pool. With
    `profile_steps`, ranks with a GPU run under `nsys` with the flags `worker_nsight_options`.
    `master_addr` and `ray_wait_register_center_timeout` are accepted and ignored.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankActor] | None = None,
        ray_wait_register_center_timeout: int = 300,
        **kwargs: Any,  # options of the group, typed there
    ) -> None:
        kwargs.pop("master_addr", None)
        ensure_ray()  # as Ray's own functions do, if the program has not called ray.init
        self.use_gpu = bool(kwargs.pop("use_gpu", resource_pool and resource_pool.use_gpu))
        if self.use_gpu and resource_pool is not None and not resource_pool.use_gpu:
            raise DispatchError(
                f"use_gpu=True, but {resource_pool!r} was made with use_gpu=False. Make both equal."
            )
        steps = kwargs.pop("profile_steps", None)
        nsight_options = kwargs.pop("worker_nsight_options", None)
        if steps and nsight_options and self.use_gpu:
            kwargs["profiler"] = nsight_of(nsight_options, len(steps))
        # Rank 0 chooses a port of a range; a range of one port fixes it.
        port = kwargs.pop("master_port", None)
        if port is not None:
            kwargs["master_port_range"] = (int(port), int(port) + 1)
        existing = worker_names is not None or worker_handles is not None
        if existing:  # verl ignores what only a start reads
            detached = False
            for option in ("worker_env", "master_port_range"):
                kwargs.pop(option, None)
        if ray_cls_with_init is None and existing:
            ray_cls_with_init = class_of_ranks(worker_names, worker_handles, kwargs)
        self.ray_cls_with_init = ray_cls_with_init
        self.device_name = kwargs.get("device_name", "cuda")
        self.customized_worker_env = kwargs.get("worker_env") or {}
        self.profile_steps, self.worker_nsight_options = steps, nsight_options
        self._process_dispatch_config = None if resource_pool is None else resource_pool.store
        self.wg_dict: Mapping[str, object] | None = None
        self.method_names: list[str] = []
        self._is_init_with_detached_workers = existing
        given = (resource_pool, ray_cls_with_init, bin_pack, name_prefix, detached)
        super().__init__(*given, worker_names, worker_handles, **kwargs)

    # What verl's programs read

    @property
    def _workers(self) -> list[Any]:  # type: ignore[override]  # another group of one's own sets it
        return self.workers

    @property
    def _worker_names(self) -> list[str]:  # type: ignore[override]  # see above
        return self.worker_names

    _world_size = property(attrgetter("world_size"))
    _master_addr = property(attrgetter("master_address"))
    _master_port = property(attrgetter("master_port"))

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh, from `_dispatch_info`."""
        if mesh_name not in self._dispatch_info:
            self._dispatch_info[mesh_name] = super().dispatch_info(mesh_name)
        return self._dispatch_info[mesh_name]

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected in a mesh, from `_collect_info`."""
        if mesh_name not in self._collect_info:
            self._collect_info[mesh_name] = super().collect_info(mesh_name)
        return self._collect_info[mesh_name]

    @property
    def fused_worker_used(self) -> bool:  # type: ignore[override]  # see above
        """Whether the group was made by `create_colocated_worker_cls_fused`."""
        cls = self.ray_cls_with_init
        return cls is not None and issubclass(cls.cls, single_controller.FusedWorker)

    @property
    def sub_cls_name(self) -> str:
        """The role of a view of one role of several, "" for other groups."""
        return self._role or "" if len(self._ranks.roles) > 1 else ""

    # Binding

    def _bind(self) -> None:
        """Make each registered method an attribute, through `_bind_worker_method`."""
        self._offered = self._bound_names(self._ranks.roles, self._role, self._binding)
        # Each role has its own meshes. A program's dispatch function may write into the dicts.
        self._dispatch_info, self._collect_info = {}, {}
        bound = self._bind_worker_method(self._class_to_bind(), func_generator)
        if type(self)._bind_worker_method is RayWorkerGroup._bind_worker_method:
            # A method that is overridden without @register keeps the record of the overridden one.
            for name in set(self._offered) - set(bound):
                setattr(self, name, self._native(name))

    @property
    def _names_of_roles(self) -> dict[str, tuple[str, str]]:
        """`<role>_<method>` → (role, method), in a group of several roles and in their views.

        A fused class routes calls by role itself, so the views of its roles have no such names.
        """
        if self.fused_worker_used or len(self._ranks.roles) < 2:
            return {}
        return self._bound_names(self._ranks.roles, None, self._binding)

    def _role_and_method(self, method_name: str) -> tuple[str, str]:
        found = self._names_of_roles.get(method_name)
        return found or super()._role_and_method(method_name)

    def __getattr__(self, name: str) -> Any:  # a registered method, which no type can name here
        # A view of one role also has the methods of the group that it was taken from.
        if not name.startswith("__") and "_offered" in self.__dict__ and self._role is not None:
            role, method = self._names_of_roles.get(name, ("", ""))
            if role:
                return getattr(self._role_view(role), method)
        return super().__getattr__(name)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the view of each role an attribute and an entry of `wg_dict`.

        Also note the group's own methods in `method_names`, which is empty before, as in verl.
        """
        self.wg_dict = self.spawn(prefix_set)
        super().fuse(self.wg_dict)
        self.method_names = list(self._offered)

    def _class_to_bind(self) -> type:
        """Return the class of the role, or a class with the methods that the group offers.

        That is a class with the methods `<role>_<method>` of several roles, or with the methods
        that a binding policy chose.
        """
        if self._role is not None and self._binding is bind_all:
            return self.class_of(self._role)
        members = {
            offered: getattr(self.class_of(role), name)
            for offered, (role, name) in self._offered.items()
        }
        return type("_".join(self._ranks.roles), (), members)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Any) -> list[str]:
        """Make each registered method of a class an attribute of the group. Return their names.

        With the `func_generator` of this library, a method that waits becomes a method of
        Quadriga's groups, which has deadlines and reports the first failure of any rank.
        """
        names = super()._bind_worker_method(user_defined_cls, func_generator)
        if func_generator is _LIBRARY:
            for name in names:
                found = mode_of(getattr(user_defined_cls, name), name)
                if found is not None and found[1] and self._runs_natively(name, found[0]):
                    setattr(self, name, self._native(name))
        return names

    def _mode_of(self, user_defined_cls: type, name: str) -> tuple[ModeOfMethod, bool] | None:
        found = super()._mode_of(user_defined_cls, name)
        if found is not None and self._role is None and name in self._offered:
            found[0].role = self._offered[name][0]
        return found

    def _runs_natively(self, name: str, mode: ModeOfMethod) -> bool:
        if name not in self._offered or isinstance(mode.execute.ranks, NotGiven):
            return False
        return not self._replaces(*_EXECUTE_FUNCTIONS)

    def _native(self, name: str) -> Callable[..., object]:
        """Return the attribute that Quadriga's group has for a method."""
        role, method = self._offered[name]
        record = registered_methods(self.class_of(role))[method]
        return self._method_factory(self, role, record)

    def _parts_of_call(
        self, view: GroupView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
    ) -> list[Part]:
        """Return the arguments of each executing rank, as verl's execute functions send them."""
        return decorator.parts_of(view, mode, decorator.columns_of(view, mode, args, kwargs))

    def _execute_function(self, mode: ModeOfMethod, method: str) -> Callable[..., object]:
        name = decorator.get_predefined_execute_fn(mode.execute)["execute_fn_name"]
        known = isinstance(mode.execute.ranks, NotGiven) or hasattr(type(self), name)
        if known or mode.dispatch.ranks:
            return super()._execute_function(mode, method)
        return functools.partial(self._execute_on_ranks, mode)

    def _execute_on_ranks(
        self, mode: ModeOfMethod, method_name: str, *args: list[object], **kwargs: list[object]
    ) -> list[object]:
        """Call the ranks of an execute mode, with one entry of each argument per rank."""
        view = mode.views[threading.get_ident()]
        parts = transposed(args, kwargs, len(view.ranks))
        return self._call_ranks(view.ranks, method_name, parts)


def check_workers_alive(
    workers: Sequence[WorkerT], is_alive: Callable[[WorkerT], bool], gap_time: float = 1.0
) -> None:
    """Check every `gap_time` seconds. Interrupt the main thread once a worker is not alive."""
    import _thread

    # verl calls this in a thread. Only the main thread can be interrupted from another one.
    while all(map(is_alive, workers)):
        time.sleep(gap_time)
    if threading.main_thread().is_alive():
        _thread.interrupt_main()


def class_of_ranks(
    names: Sequence[str] | None, actors: Sequence[RankActor] | None, options: dict[str, Any]
) -> ClassWithInitArgs:
    """Return the class, or the roles, of ranks that exist."""
    classes = classes_of(names, actors, options.get("namespace"))
    if len(classes) > 1:
        return RayColocatedClass({role: RayClassWithInitArgs(cls) for role, cls in classes.items()})
    role, cls = next(iter(classes.items()))
    options.setdefault("role", role)
    return RayClassWithInitArgs(cls)


def nsight_of(options: Mapping[str, object], steps: int) -> Nsight:
    """Return verl's `worker_nsight_options` for a run that profiles `steps` steps.

    The capture ends with its sixth range of a step, verl's number of profiled methods, unless
    `capture-range-end` is given.
    """
    flags = {name: str(value) for name, value in options.items() if value is not None}
    if "capture-range" in flags:
        flags.setdefault("capture-range-end", f"repeat-shutdown:{6 * steps}")
    return Nsight(flags)


RoleT = TypeVar("RoleT")

sort_placement_group_by_node_ip = sort_by_node_address


class PlacementGroup(Protocol):
    """The attribute of Ray's placement groups that is used here."""

    @property
    def bundle_count(self) -> int: ...


@dataclass
class ResourcePoolManager(Generic[RoleT]):
    """Create resource pools by name, and find the pool of a role.

    `resource_pool_spec`: pool name → ranks per node. `mapping`: role → pool name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[RoleT, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create every pool.

        Raises `PlacementError` unless all fit on the nodes at the same time.
        """
        ensure_ray()  # as Ray's own functions do, if the program has not called ray.init
        self._check_resource_available()
        self.resource_pool_dict.update(self._pools())

    def _pools(self) -> dict[str, RayResourcePool]:
        count = self.max_colocate_count
        return {
            name: RayResourcePool(ranks, use_gpu=True, name_prefix=name, max_colocate_count=count)
            for name, ranks in self.resource_pool_spec.items()
        }

    def _check_resource_available(self) -> None:
        """Raise `PlacementError` unless the nodes have what all pools need at the same time."""
        check_feasible([pool.needs() for pool in self._pools().values()], alive_nodes())

    def get_resource_pool(self, role: RoleT) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of ranks in all pools."""
        return sum(map(sum, self.resource_pool_spec.values()))


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool],
    src_role_names: Sequence[str],
    resource_pool: RayResourcePool,
) -> list[PlacementGroup]:
    """Choose placement groups of existing pools, one for each node of `resource_pool`.

    Only pools of `src_role_names` are considered. Raises `PlacementError` if their placement groups
    do not have enough bundles.
    """
    # Largest first: resource_pool.store [1, 3] with groups of 4 and 2 bundles gives node 1
    # (3 ranks) the group of 4, then node 0 (1 rank) the group of 2; returned in node order.
    found = [
        group
        for name, pool in resource_pools.items()
        if name in src_role_names
        for group in pool.get_placement_groups()
    ]
    found.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda pair: pair[1], reverse=True)
    chosen: dict[int, PlacementGroup] = {}
    for (index, count), group in zip(wanted, found, strict=False):
        if count <= group.bundle_count:
            chosen[index] = group
    if len(chosen) < len(wanted):
        raise PlacementError(
            f"{resource_pool!r} needs placement groups with {resource_pool.store} bundles; those "
            f"of {list(src_role_names)} have {[g.bundle_count for g in found]}. Use larger pools.",
            wanted=resource_pool.store,
        )
    return [chosen[index] for index in range(len(wanted))]
