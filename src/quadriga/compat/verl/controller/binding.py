"""How verl's groups get their methods: the functor of a method, and the base class of groups.

WorkerGroup._bind_worker_method(cls, func_generator)     for each registered method of `cls`
  func_generator(group, name, dispatch_fn, collect_fn, execute_fn, blocking)
    → functor(*args)     dispatch_fn(group, *args) → execute_fn(name, *parts) → references
                         → values if blocking → collect_fn(group, outputs)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from quadriga import single_controller
from quadriga.backends.ray.programs import values_of
from quadriga.compat.verl.controller.columns import Columns, columns_of, parts_of
from quadriga.compat.verl.controller.decorator import (
    MAGIC_ATTR,
    ExecuteName,
    get_predefined_execute_fn,
    inline_functions,
)
from quadriga.compat.verl.controller.joining import collect_later
from quadriga.compat.verl.controller.padding import PADDING, without_padding
from quadriga.errors import DispatchError
from quadriga.single_controller import GroupLayout, RankLayout
from quadriga.single_controller.backend import RankSet
from quadriga.single_controller.bound_method import BoundGroup
from quadriga.single_controller.call import CallView, GroupInfo
from quadriga.single_controller.dispatch import (
    Dispatch,
    DispatchMode,
    Execute,
    ExecuteMode,
    NotGiven,
    inline_dispatch_mode,
)

Functor: TypeAlias = Callable[..., Any]  # returns what a user's method or collect function returns
FunctorFactory: TypeAlias = Callable[..., Functor]


def func_generator(
    self: object,
    method_name: str,
    dispatch_fn: Callable[..., Columns],
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
        padding = cast(int, split_kwargs.pop(PADDING, 0))
        output = execute_fn(method_name, *split_args, **split_kwargs)
        if blocking:
            ranks: RankSet | None = getattr(self, "_ranks", None)  # not in a group of one's own
            refs = output if isinstance(output, list) else [output]
            values = values_of(refs, ranks.timeout if ranks else None, method_name)
            output = values if isinstance(output, list) else values[0]
        return without_padding(collect_fn(self, output), padding)

    functor: Functor = type(method_name, (), {"__call__": call})()
    return functor


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
    views: dict[int, CallView] = field(default_factory=dict)

    @property
    def on_one_rank(self) -> bool:
        """Whether one rank executes and receives the arguments as they are."""
        return self.execute.single or self.dispatch.ranks is not None

    def dispatch_fn(self, group: GroupInfo, *args: object, **kwargs: object) -> Columns:
        """Split the arguments of a call into the columns of its execute function."""
        if self.role is not None:
            group = cast(BoundGroup, group)._role_view(self.role)
        ranks = self.dispatch.ranks or self.execute.ranks
        every: Sequence[int] = range(group.world_size)
        view = CallView(group, every, self.label, self.on_one_rank)
        given = isinstance(ranks, NotGiven)  # then an execute function of the group knows them
        view.ranks = every if given else ranks(view)
        self.views[threading.get_ident()] = view
        mode = Dispatch.get(self.dispatch.name, self.dispatch)
        columns = columns_of(view, mode, args, kwargs)
        if given or (self.execute == Execute["ALL"] and not self.on_one_rank):
            return columns
        parts = parts_of(view, mode, columns)
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
            view = CallView(group, range(group.world_size), self.label, self.on_one_rank)
        mode = Dispatch.get(self.dispatch.name, self.dispatch)
        return collect_later(mode.collect_fn, view, output)


def mode_of(method: object, label: str) -> tuple[ModeOfMethod, bool] | None:
    """Return the mode of a registered function and whether its calls wait; None if unregistered."""
    record = getattr(method, MAGIC_ATTR, None)
    if not isinstance(record, dict):
        return None
    mode: DispatchMode | Mapping[str, Any] = record["dispatch_mode"]  # a program's own dict
    dispatch = (
        mode if isinstance(mode, DispatchMode) else inline_dispatch_mode(inline_functions(mode))
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
            functor = func_generator(
                self,
                name,
                dispatch_fn=mode.dispatch_fn,
                collect_fn=mode.collect_fn,
                execute_fn=self._execute_function(mode, name),
                blocking=blocking,
            )
            setattr(self, name, functor)
            names.append(name)
        return names

    def _mode_of(self, user_defined_cls: type, name: str) -> tuple[ModeOfMethod, bool] | None:
        """Return the mode of a method and whether its calls wait; None if it is not registered."""
        return mode_of(getattr(user_defined_cls, name, None), f"{type(self).__name__}.{name}")

    def _execute_function(self, mode: ModeOfMethod, method: str) -> Callable[..., object]:
        """Return the function of this group that runs calls of a mode."""
        execute = Execute["RANK_ZERO"] if mode.dispatch.ranks else mode.execute
        name: ExecuteName = get_predefined_execute_fn(execute)
        function: Callable[..., object] | None = getattr(self, name["execute_fn_name"], None)
        if function is None:
            raise DispatchError(
                f"{method} is registered with {execute!r}, but {type(self).__name__} has no method "
                f"{name['execute_fn_name']!r}. Define it, or give the mode its ranks with "
                "update_execute_mode."
            )
        return function
