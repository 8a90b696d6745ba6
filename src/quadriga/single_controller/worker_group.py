"""`WorkerGroup`: many ranks that are called as one object, and `BoundMethod`: a method of it.

BoundMethod.__call__          test for broken groups
  _start                      split the arguments by the dispatch mode
    build_calls               pack each distinct argument once, one Call per part
    RankSet.backend.submit    send
  _call                       gather, unpack and join the results

A factory of bound methods can call a function before and after each call (`with_hooks`).
"""

from __future__ import annotations

import copy
import inspect
import time
import types
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from quadriga.errors import (
    DispatchError,
    LengthError,
    MeshError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerMethodError,
    nearest_name,
)
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller.backend import (
    Mesh,
    RankSet,
    Watch,
    broken_groups,
    check_timeouts,
    forget,
    raise_if_broken,
)
from quadriga.single_controller.dispatch import (
    Arguments,
    Call,
    Collect,
    Collector,
    GroupView,
    KeywordArguments,
    Pending,
    Split,
    StreamStep,
    boundary_for,
    check_mesh,
    unpack_results,
)
from quadriga.single_controller.keepers import Keeper
from quadriga.single_controller.modes import Dispatch, DispatchMode, Execute
from quadriga.single_controller.rank_layout import GroupLayout
from quadriga.single_controller.streams import joined_items
from quadriga.single_controller.worker import (
    ClassWithInitArgs,
    MethodRecord,
    registered_methods,
    reraise_in_property,
    roles_of,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Part = tuple[Arguments, KeywordArguments]
"""The arguments of one rank."""


class BoundMethod(Generic[P, R]):
    """A method of a role, called on all ranks: split, send, run, gather, join.

    `method(batch)` waits for the result unless it is registered with `blocking=False`.
    `method.submit(batch)` returns a future. `method.options(timeout=60)(batch)` has a deadline.

    Args:
        group: The group that has the role, possibly together with other roles.
        role: The role that runs the method.
        record: What `@register` recorded.
    """

    def __init__(self, group: WorkerGroup, role: str, record: MethodRecord) -> None:
        self.group = group
        self.role = role
        self.record = record
        self.timeout: float | None = None
        self.label = f"{role}.{record.name}"
        self.__name__ = record.name
        self.__qualname__ = self.label
        function = getattr(group.class_of(role), record.name)
        self.__doc__ = function.__doc__
        self.is_generator = _is_generator(function)
        # A decorator may make a list of the items, so only the rank knows what it returns.
        self._streams = self.is_generator or _is_generator(inspect.unwrap(function))
        # A function whose code has the method's name: profiles then show a frame of that name.
        code = _call.__code__.replace(co_name=record.name, co_qualname=record.name)
        self._run = types.FunctionType(code, globals())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, self._run(self, args, kwargs))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> DataProtoFuture:
        """Start the call and return a future of the joined result."""
        return _future(*self._start(args, kwargs))

    def _start(
        self, args: Arguments, kwargs: KeywordArguments
    ) -> tuple[Sequence[Pending], Collect]:
        """Split the arguments as the dispatch mode says and send them to the ranks.

        Return the results, and what joins them. Raises `DispatchError` for a generator method.
        """
        if self.is_generator:
            raise DispatchError(
                f"{self.label} is a generator, whose items are received one by one. Call "
                f"group.{self.__name__}.stream(...)."
            )
        calls, collect = _calls(self, args, kwargs)
        ranks, targets = self.group._ranks, collect.view.ranks
        return send_calls(ranks, targets, calls, self.timeout), collect

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[object]:
        """Call a generator method: return an iterator over its items, joined over the ranks.

        Item i is what the dispatch mode makes of item i of every rank. The iterator raises the
        first error of a rank, and LengthError if some ranks have ended and others have not. Nothing
        is sent before the first item. Raises `DispatchError` for a method that is not a generator.
        """
        ranks = self.group._ranks
        if not self._streams:
            raise DispatchError(
                f"{self.label} is not a generator: its method has no yield. Call it directly."
            )
        calls, collect = _calls(self, args, kwargs, StreamStep(uuid.uuid4().hex, "open"))
        send = partial(send_calls, ranks, collect.view.ranks, timeout=self.timeout)
        return joined_items(ranks.backend, send, collect.view.ranks, calls, collect)

    def options(self, timeout: float | None = None) -> Self:
        """Return this method with a deadline of `timeout` seconds. None: that of the group.

        Raises `DispatchError` for a timeout that is no positive number.
        """
        check_timeouts(f"{self.label}.options", timeout=timeout)
        twin = copy.copy(self)
        twin.timeout = timeout
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<{self.label} on {len(self.group._ranks)} ranks>"


def _is_generator(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _call(method: BoundMethod[P, R], args: Arguments, kwargs: KeywordArguments) -> object:
    pendings, collect = method._start(args, kwargs)
    if not method.record.blocking:
        return _future(pendings, collect)
    return collect(unpack_results(method.group._ranks.backend.gather(pendings)))


def _future(pendings: Sequence[Pending], collect: Collect) -> DataProtoFuture:
    from quadriga.protocol import DataProtoFuture

    return DataProtoFuture(list(pendings), collect)


def _calls(
    method: BoundMethod[P, R],
    args: Arguments,
    kwargs: KeywordArguments,
    step: StreamStep | None = None,
) -> tuple[list[Call], Collector]:
    """Return the call of each executing rank, and what joins the results."""
    # By name: `update_dispatch_mode` affects registered methods too.
    record = method.record
    dispatch = Dispatch.members.get(record.dispatch_mode.name, record.dispatch_mode)
    execute = Execute.members.get(record.execute_mode.name, record.execute_mode)
    # Each role of a shared process has its own meshes and rank layout, hence the view of one role.
    view = GroupView(method.group._role_view(method.role), (), method.label, execute.single)
    # Modes are functions of the view, so the view exists before it knows the executing ranks.
    view.ranks = (dispatch.ranks or execute.ranks)(view)
    if record.reads is not None:
        args, kwargs = _read_fields(record, record.reads, args, kwargs)
    parts = method.group._parts_of_call(view, dispatch, args, kwargs)
    ranks, futures = method.group._ranks, record.materialize_futures
    calls = build_calls(ranks, view.ranks, method.role, record.name, parts, futures, step)
    return calls, Collector(dispatch.collect_fn, view)


def _read_fields(
    record: MethodRecord, names: Container[str], args: Arguments, kwargs: KeywordArguments
) -> tuple[Arguments, KeywordArguments]:
    """Return the arguments with only these fields in the batches among them."""
    boundary = boundary_for((*args, *kwargs.values()))
    if boundary is None:  # there is no batch among them
        return args, kwargs
    # Without materialize_futures a method receives futures, so none may become its batch.
    keep = partial(boundary.with_fields, names=names, futures=record.materialize_futures)
    return (tuple(map(keep, args)), {key: keep(value) for key, value in kwargs.items()})


def parts_of_ranks(view: GroupView, split: Split) -> list[Part]:
    """Turn one sequence per argument into the arguments of each executing rank.

    Example: `(([a0, a1],), {"k": [k0, k1]})` for two ranks gives `[((a0,), {"k": k0}),
    ((a1,), {"k": k1})]`. Raises `DispatchError` or `LengthError` if the dispatch function returned
    something else.
    """
    try:
        args, kwargs = split
        columns = [*args, *kwargs.values()]
    except (TypeError, ValueError, AttributeError):
        raise DispatchError(
            f"{view.method}: a dispatch function returns (args, kwargs), got {split!r}."
        ) from None
    n = len(view.ranks)
    # A call without arguments has no column from which the number of ranks could be read.
    if not columns:
        return [((), {})] * n
    rows = [_entries(view, column) for column in columns]
    return transposed(rows[: len(args)], dict(zip(kwargs, rows[len(args) :], strict=True)), n)


def transposed(
    args: Sequence[Sequence[object]], kwargs: Mapping[str, Sequence[object]], n: int
) -> list[Part]:
    """Return the arguments of `n` ranks, from one sequence per argument."""
    return [(tuple([a[i] for a in args]), {k: v[i] for k, v in kwargs.items()}) for i in range(n)]


def _entries(view: GroupView, column: object) -> Sequence[object]:
    """Return one entry per executing rank, from one entry per executing rank or per rank."""
    if not isinstance(column, list | tuple):
        raise DispatchError(
            f"{view.method}: a dispatch function returns each argument as a list with one entry "
            f"per rank, got {type(column).__name__}."
        )
    if len(column) == len(view.ranks):
        return column
    if len(column) == view.world_size:
        return [column[rank] for rank in view.ranks]
    raise LengthError(
        f"{view.method}: an argument was split into {len(column)} parts for {len(view.ranks)} "
        f"executing ranks of {view.world_size}."
    )


def build_calls(
    ranks: RankSet,
    targets: Sequence[int],
    role: str,
    method: str,
    parts: Sequence[Part],
    materialize: bool = True,
    step: StreamStep | None = None,
) -> list[Call]:
    """Return one call per part, for the ranks `targets`. Parts of the same objects become one
    `Call` object.

    Example: the parts `(p0,), (p0,), (p1,), (p1,)` of 4 ranks with tp=2 give the calls c0, c0, c1,
    c1. `p0` and `p1` are packed once each, and the backend encodes c0 and c1 once each.
    """
    first_args, first_kwargs = parts[0]
    if not first_args and not first_kwargs:
        return [Call(role, method, step=step)] * len(parts)
    packed = _packed_values(ranks, targets, parts)
    # Identity instead of equality: comparing batches would fetch them. The parts keep every object
    # alive until this function returns, so no id is used twice.
    calls: dict[tuple[int, ...], Call] = {}
    result = []
    for args, kwargs in parts:
        key = (*map(id, args), *map(id, kwargs.values()))
        call = calls.get(key)
        if call is None:
            call = calls[key] = Call(
                role, method, tuple([packed.get(id(value), value) for value in args]),
                {name: packed.get(id(value), value) for name, value in kwargs.items()}, materialize,
                step,
            )  # fmt: skip
        result.append(call)
    return result


_SENT_AS_IT_IS = (bool, int, float, type(None))
"""Small integers are one object in Python; sharing them gains nothing."""


def _packed_values(
    ranks: RankSet, targets: Sequence[int], parts: Sequence[Part]
) -> dict[int, object]:
    """Pack each distinct argument object of a call once. Return id → what is sent for it."""
    uses: dict[int, int] = {}
    values: dict[int, object] = {}
    nodes: dict[int, str] = {}
    for target, (args, kwargs) in zip(targets, parts, strict=True):
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) not in _SENT_AS_IT_IS:
                key = id(value)
                values[key] = value
                uses[key] = uses.get(key, 0) + 1
                nodes.setdefault(key, ranks.handles[target].facts.node_id)
    boundary = boundary_for(values.values())
    packed: Iterable[object] = values.values()
    if boundary is not None:
        # A value of several ranks may go to several nodes, so no other value is stored with it.
        readers = ["" if uses[key] > 1 else nodes[key] for key in values]
        packed = boundary.pack_arguments(values.values(), ranks.backend.store, readers)
    share = ranks.backend.share
    return {
        key: share(sent) if uses[key] > 1 else sent
        for key, sent in zip(values, packed, strict=True)
    }


def send_calls(
    ranks: RankSet, targets: Sequence[int], calls: Sequence[Call], timeout: float | None = None
) -> Sequence[Pending]:
    """Send `calls[i]` to rank `targets[i]`. `timeout`: seconds; None: the default of the group.

    Raises `WorkerDiedError` if the group or a watched group is broken, `DispatchError` if an
    argument cannot be pickled.
    """
    if broken_groups:
        raise_if_broken()
    label = calls[0].label
    if ranks.broken:
        raise WorkerDiedError(f"{label} cannot be called: {ranks.broken}", method=label)
    return ranks.backend.submit(ranks, targets, calls, timeout or ranks.timeout)


BeforeCall = Callable[[str, Arguments, KeywordArguments], object]
AfterCall = Callable[[str, object], object]


class HookedMethod(BoundMethod[P, R]):
    """A bound method with a function before and a function after each call.

    After a call that was not waited for, `after` runs when its result is first read in this
    process. It does not run for a future that was sent to another process.
    """

    before: BeforeCall | None = None
    after: AfterCall | None = None

    def _start(
        self, args: Arguments, kwargs: KeywordArguments
    ) -> tuple[Sequence[Pending], Collect]:
        if self.before is not None:
            self.before(self.label, args, kwargs)
        pendings, collect = super()._start(args, kwargs)
        return pendings, _ObservedCollect(collect, self.label, self.after)


class _ObservedCollect:
    """Joins as `inner` does and calls the hook once. Pickled, it is `inner` alone."""

    def __init__(self, inner: Collect, label: str, after: AfterCall | None) -> None:
        self.inner, self.label, self.after = inner, label, after

    def __call__(self, outputs: list[object]) -> object:
        value = self.inner(outputs)
        after, self.after = self.after, None
        if after is not None:
            after(self.label, value)
        return value

    def __reduce__(self) -> tuple[Callable[[Collect], Collect], tuple[Collect]]:
        return copy.copy, (self.inner,)


def with_hooks(
    before: BeforeCall | None = None, after: AfterCall | None = None
) -> Callable[[WorkerGroup, str, MethodRecord], HookedMethod[..., object]]:
    """Return a `method_factory` for groups.

    `before(label, args, kwargs)` runs before each call and `after(label, value)` after it, with
    `label` "role.method". The caller receives what a hook raises.
    """

    def make(group: WorkerGroup, role: str, record: MethodRecord) -> HookedMethod[..., object]:
        method: HookedMethod[..., object] = HookedMethod(group, role, record)
        method.before, method.after = before, after
        return method

    return make


MethodFactory = Callable[["WorkerGroup", str, MethodRecord], Callable[..., object]]
BindingPolicy = Callable[[type, MethodRecord], bool]
"""`policy(worker_class, record)`: whether a registered method becomes an attribute of the group."""


def bind_all(worker_class: type, record: MethodRecord) -> bool:
    """Bind every registered method."""
    return True


class WorkerGroup:
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

    _ranks: RankSet
    _role: str | None
    _offered: dict[str, tuple[str, str]]
    """Bound method name → (role, method)."""
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
    def _roles_of(
        cls, held: ClassWithInitArgs, role: str | None, binding: BindingPolicy
    ) -> tuple[dict[str, ClassWithInitArgs], dict[str, type], str | None]:
        """Return the classes that each process builds, every role of it, and its one role or None.

        `role`: the name of a class that is one role by itself. Raises as `_bound_names`.
        """
        built = held.roles if role is None or held.shares_process else {role: held}
        roles = roles_of({name: member.cls for name, member in built.items()})
        single = None if held.shares_process else next(iter(built))
        cls._bound_names(roles, single, binding)
        return built, roles, single

    @classmethod
    def _bound_names(
        cls, roles: Mapping[str, type], role: str | None = None, binding: BindingPolicy = bind_all
    ) -> dict[str, tuple[str, str]]:
        """Return the names that a group of these worker classes offers, as name → (role, method).

        `role` and `binding` as in `__init__`. Backends call this before they start a process.
        Raises `DispatchError` for a method with the name of an attribute of the group, or with the
        name of a method of another role.
        """
        names: dict[str, tuple[str, str]] = {}
        # A subclass of a user's, or that of `compat`, may declare the types of bound methods.
        ours = ("quadriga.single_controller.", "quadriga.backends.")
        bases = [base for base in cls.__mro__ if base.__module__.startswith(ours)]
        own = {name for base in bases for name in vars(base).get("__annotations__", {})}
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
                taken = names.setdefault(prefix + name, (each, name))
                if taken != (each, name):
                    raise DispatchError(
                        f"{prefix + name} would be {taken[1]} of the role {taken[0]!r} and {name} "
                        f"of the role {each!r}. Give one of the roles another name."
                    )
        return names

    def __getattr__(self, name: str) -> Any:  # a registered method, which no type can name here
        # Before `__init__` has run (copy, pickle) there are no methods to name.
        if name.startswith("__") or "_offered" not in self.__dict__:
            raise AttributeError(name)
        reraise_in_property(self, name)
        known = sorted(n for n in self._offered if not n.startswith("_"))
        near = nearest_name(name, known)
        hint = f" Did you mean {near}?" if near else ""
        raise UnregisteredMethodError(
            f"{self} has no registered method {name!r}.{hint} Registered: {', '.join(known)}. "
            "Mark a worker's method with @register to call it through a group; a method that the "
            f"group's binding policy leaves out is called by name, call_all({name!r}, …).",
            method=name,
            known=known,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a group names processes, and a copy would name the same ones

    def __repr__(self) -> str:
        title = self._role or "+".join(self._ranks.roles)
        return f"<{type(self).__name__} {title}, {self.world_size} ranks>"

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
        self, view: GroupView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
    ) -> list[Part]:
        """Return the arguments of each executing rank, as the dispatch mode splits them."""
        return parts_of_ranks(view, mode.dispatch_fn(view, *args, **kwargs))

    def _role_view(self, role: str) -> WorkerGroup:
        """Return the group of one role on the same processes, with plain method names.

        Raises `UnregisteredMethodError` if the processes do not have the role.
        """
        if role == self._role:
            return self
        if role not in self._ranks.roles:
            known = list(self._ranks.roles)
            text = f"{self} hosts the roles {known}, not {role!r}."
            raise UnregisteredMethodError(text, method=role, known=known)
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

    spawn_fused = spawn

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make the view of each role an attribute: `group.actor.update(...)`."""
        for role, view in self.spawn(prefix_set).items():
            setattr(self, role, view)

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

    def call_all_async(self, method_name: str, *args: object, **kwargs: object) -> list[Pending]:
        """Call a method on every rank. Return one `Pending` per rank.

        If every argument is a list of world_size length, rank i receives entry i of each;
        otherwise every rank receives the arguments as they are. No other call splits a list unless
        a dispatch mode says so.
        """
        role, name = self._role_and_method(method_name)
        n = self.world_size
        given = (*args, *kwargs.values())
        parts: list[Part] = [(args, kwargs)] * n
        if given and all(isinstance(value, list) and len(value) == n for value in given):
            parts = transposed(cast(Any, args), cast(Any, kwargs), n)
        return self._send(role, name, range(n), parts)

    def call_all(self, method_name: str, *args: object, **kwargs: object) -> list[object]:
        """Call a method on every rank, as `call_all_async`. Return one result per rank."""
        return self._results(self.call_all_async(method_name, *args, **kwargs))

    def call_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> Pending:
        """Call a method on rank 0. Return its `Pending`."""
        role, name = self._role_and_method(method_name)
        return self._send(role, name, [0], [(args, kwargs)])[0]

    def call_rank_zero(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call a method on rank 0 and wait for its result."""
        return self._results([self.call_rank_zero_async(method_name, *args, **kwargs)])[0]

    execute_all = execute_all_async = call_all_async
    execute_all_sync = call_all
    execute_rank_zero = execute_rank_zero_async = call_rank_zero_async
    execute_rank_zero_sync = call_rank_zero

    def _send(
        self, role: str, method: str, targets: Sequence[int], parts: Sequence[Part]
    ) -> list[Pending]:
        calls = build_calls(self._ranks, targets, role, method, parts)
        return list(send_calls(self._ranks, targets, calls))

    def _results(self, pendings: Sequence[Pending]) -> list[object]:
        return unpack_results(self._ranks.backend.gather(pendings))

    def _role_and_method(self, method_name: str) -> tuple[str, str]:
        """Return the role and the method that a bound name of this group stands for."""
        if method_name in self._offered:
            return self._offered[method_name]
        if self._role is None:
            raise UnregisteredMethodError(
                f"{self} offers {sorted(self._offered)}, not {method_name!r}. Take the view of "
                "one role with spawn() to call any of its methods by name.",
                method=method_name,
                known=sorted(self._offered),
            )
        return self._role, method_name

    def keepers(self) -> list[Keeper]:
        """Return what keeps values of each rank in the memory of another process."""
        return self._ranks.backend.keepers(self._ranks.handles)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank exists."""
        return not self._ranks.backend.dead([self._ranks.handles[rank]])

    def wait_until_alive(self, timeout: float = 300.0) -> None:
        """Wait until every rank is alive. Raises `WorkerDiedError` after `timeout` seconds."""
        self._wait_until(True, timeout)

    _block_until_all_workers_alive = wait_until_alive

    def _is_worker_alive(self, worker: object) -> bool:
        """Return whether the process of a rank exists. `worker`: an entry of `workers`."""
        return any(w is worker and self.is_alive(rank) for rank, w in enumerate(self.workers))

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
        self._ranks.watch = Watch(self._ranks, every_n_seconds)

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
