"""`Worker`, the base class of what a rank holds, and `register`, which marks its methods.

`ClassWithInitArgs` is a worker class with its constructor arguments; several of them can share one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypedDict, TypeVar, cast

from quadriga.errors import DispatchError, MeshError, UnregisteredMethodError
from quadriga.observability.profiling import ProfiledCall, start_profile, stop_profile
from quadriga.single_controller.dispatch import ModeFunctions
from quadriga.single_controller.environment import (
    RankEnvironment,
    device_index,
    ray_noset_visible_devices,
    unify_visible_devices,
    visible_devices,
)
from quadriga.single_controller.modes import (
    Dispatch,
    DispatchMode,
    Execute,
    ExecuteMode,
    inline_dispatch_mode,
)
from quadriga.single_controller.rank_layout import RankLayout

P = ParamSpec("P")
R = TypeVar("R")
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@dataclass(frozen=True)
class MethodRecord:
    """What `@register` records about a method."""

    name: str
    dispatch_mode: DispatchMode
    execute_mode: ExecuteMode
    blocking: bool
    materialize_futures: bool
    reads: frozenset[str] | None = None
    beside: bool = False


RECORD_ATTRIBUTE = "__quadriga_method__"
_MARKED_ATTRIBUTE = "__quadriga_marked__"
"""The attribute of a registered function that is the function itself. A decorator that copies
attributes copies this one too, which shows that its function is another one."""


def register(
    dispatch_mode: DispatchMode | ModeFunctions = Dispatch["ALL_TO_ALL"],
    execute_mode: ExecuteMode = Execute["ALL"],
    blocking: bool = True,
    materialize_futures: bool = True,
    reads: Iterable[str] | None = None,
    beside: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Mark a worker method, synchronous or `async def`, so that a worker group can call it.

    Args:
        dispatch_mode: A member of `Dispatch`, or a dict `{"dispatch_fn": f, "collect_fn": g}`.
        execute_mode: A member of `Execute`.
        blocking: Whether a call waits for its results. If False, a call returns a future.
        materialize_futures: Whether the method receives the values of futures among its
            arguments. If False, it receives the futures.
        reads: The fields that the method reads from the `DataProto`s among its arguments, and
            from futures of them whose results have arrived. Other fields are not sent. A pending
            future, a `TensorDict` and batches in lists and dicts are sent whole. None: all fields
            are sent.
        beside: Whether Ray runs the method in a second thread of the rank, beside the call that the
            rank runs. Such methods of a rank run one after the other, in the order of their calls.
            They and other methods that may run meanwhile must not touch the same state. No class
            of the rank may have coroutine methods. On the local backend a call waits as any other.

    The function is returned unchanged. Raises `DispatchError` for modes of another type, and for
    `reads` that are not names.
    """
    if isinstance(dispatch_mode, Mapping):
        dispatch = inline_dispatch_mode(dispatch_mode)
    else:
        Dispatch.check(dispatch_mode)
        dispatch = dispatch_mode
    Execute.check(execute_mode)
    names = None if reads is None else _names(reads)

    def mark(function: FunctionT) -> FunctionT:
        record = MethodRecord(
            name=function.__name__, dispatch_mode=dispatch, execute_mode=execute_mode,
            blocking=blocking, materialize_futures=materialize_futures, reads=names, beside=beside,
        )  # fmt: skip
        setattr(function, RECORD_ATTRIBUTE, record)
        setattr(function, _MARKED_ATTRIBUTE, function)
        return function

    return mark


def registered_methods(cls: type) -> dict[str, MethodRecord]:
    """Return the registered methods of a class by name, inherited ones included.

    A method that is overridden or wrapped without `@register` keeps the record of the other one,
    but receives all fields: it may read others.
    """
    records: dict[str, MethodRecord] = {}
    # From the base classes to `cls`, so that the record of an overriding method replaces that of
    # the overridden one.
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            record = record_of(member)
            if record is not None:
                # The function may have another name: a lambda, or what a decorator has returned.
                reads = record.reads if _is_marked(member) else None
                same = record.name == name and reads == record.reads
                records[name] = record if same else replace(record, name=name, reads=reads)
            elif name in records:
                records[name] = replace(records[name], reads=None)
    return records


def _is_marked(member: object) -> bool:
    """Return whether `@register` marked this member. Otherwise it has the record of another one,
    which a decorator has copied."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return any(getattr(marked, _MARKED_ATTRIBUTE, None) is marked for marked in (member, function))


def record_of(member: object) -> MethodRecord | None:
    """Return the record of a member of a class, None if it is not registered."""
    if isinstance(member, classmethod | staticmethod) and not hasattr(member, RECORD_ATTRIBUTE):
        member = member.__func__  # registered before it became a class or static method
    try:
        record = getattr(member, RECORD_ATTRIBUTE, None)
    except Exception:  # any object can be an attribute of a class, and its __getattr__ may raise
        return None
    return record if isinstance(record, MethodRecord) else None


def _names(reads: Iterable[str]) -> frozenset[str]:
    names = None if isinstance(reads, str) else frozenset(reads)
    if names is None or not all(isinstance(name, str) for name in names):
        raise DispatchError(f"reads must be a collection of names of fields, got {reads!r}.")
    return names


def reraise_in_property(instance: object, name: str) -> None:
    """Evaluate a property again that has raised AttributeError, so that its own error is raised.

    For `__getattr__`, which Python calls for an attribute that does not exist, and also after a
    property has raised AttributeError. Python has dropped that error by then. Example: a property
    that reads `self.config.model` before `config` is set would be reported as missing itself.
    """
    for base in type(instance).__mro__:
        if name in vars(base):
            getattr(vars(base)[name], "__get__", lambda *args: None)(instance, type(instance))


class RegisteredMeshes(TypedDict):
    """Every mesh that a worker has registered."""

    dispatch_dp_rank: dict[str, int]
    """mesh name → data-parallel rank."""
    collect_dp_rank: dict[str, bool]
    """mesh name → whether the result is collected."""


class Worker:
    """One role in one rank of a worker group. Subclasses add methods and `@register` them.

    The rank's position (`rank`, `world_size`, …) is read from environment variables when the
    object is created, even if a subclass does not call `super().__init__()`. A worker group sets
    the variables. Without a group, torchrun or a shell script sets them.

    A worker may have other workers as attributes. The workers of other roles in the same process
    are its siblings: `self.<role>` or `self.sibling(role)`.
    """

    _environment: RankEnvironment
    _siblings: Mapping[str, Any]  # a class of the user's need not be a `Worker`
    _meshes: dict[str, tuple[int, bool]]
    _rank_layout: RankLayout | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # In `__new__`: a subclass need not call `super().__init__()`.
        self = super().__new__(cls)
        self._environment = RankEnvironment.read()
        self._siblings = {}
        self._meshes = {}
        self._rank_layout = None
        return self

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._visible_devices = cuda_visible_devices or unify_visible_devices()

    @property
    def rank(self) -> int:
        """The number of this rank in its group, 0 to world_size - 1."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the group."""
        return self._environment.world_size

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of the group on its node."""
        return self._environment.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks of the group on this node."""
        return self._environment.local_world_size

    @property
    def master_address(self) -> str:
        """The address of the node of rank 0."""
        return self._environment.master_address

    @property
    def master_port(self) -> str:
        """The port that rank 0 reserved."""
        return self._environment.master_port

    @property
    def worker_group_prefix(self) -> str:
        """The name prefix of the group."""
        return self._environment.group_prefix

    def get_cuda_visible_devices(self) -> str:
        """Return the devices that this process may use, "not set" if no variable is set."""
        found = getattr(self, "_visible_devices", None) or visible_devices()
        return found or "not set"

    @property
    def device_index(self) -> int:
        """The index, among the visible devices, of the device of this rank."""
        return device_index(self.local_rank, visible_devices(), ray_noset_visible_devices())

    # Sharing a process

    def sibling(self, role: str) -> Worker:
        """Return the worker of another role in this process.

        Raises `UnregisteredMethodError` naming the roles of the process if there is none.
        """
        try:
            return cast(Worker, self._siblings[role])
        except KeyError:
            known = sorted(self._siblings)
            text = f"{type(self).__name__} shares its process with {known}, not with {role!r}."
            raise UnregisteredMethodError(text, method=role, known=known) from None

    def __getattr__(self, name: str) -> Any:  # a sibling, whose class no type can name here
        reraise_in_property(self, name)
        # Not `self._siblings`: while a worker is unpickled that would recurse without end.
        siblings = self.__dict__.get("_siblings")
        if siblings and name in siblings:
            return siblings[name]
        other_base = getattr(super(), "__getattr__", None)
        if other_base is not None:  # a class with further bases: `class Critic(Worker, nn.Module)`
            return other_base(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Meshes and the rank layout

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Register the data-parallel rank of this rank in a mesh.

        `is_collect`: whether the result of this rank is collected. Raises `MeshError` if the mesh
        is registered already.
        """
        if mesh_name in self._meshes:
            raise MeshError(
                f"Mesh {mesh_name!r} is registered already by {type(self).__name__} rank "
                f"{self.rank}: dp_rank={self._meshes[mesh_name][0]}.",
                mesh_name=mesh_name,
            )
        if dp_rank < 0:
            raise MeshError(
                f"Mesh {mesh_name!r}: dp_rank must be 0 or more, got {dp_rank}.",
                mesh_name=mesh_name,
            )
        self._meshes[mesh_name] = (dp_rank, bool(is_collect))

    def _register_rank_layout(self, layout: RankLayout) -> None:
        """Register the coordinates of this rank in a tp × cp × dp × pp layout (MEGATRON modes).

        Raises `MeshError` if another layout is registered already.
        """
        if self._rank_layout not in (None, layout):
            raise MeshError(
                f"{type(self).__name__} rank {self.rank} has registered the rank layout "
                f"{self._rank_layout} already.",
                mesh_name="layout",
            )
        self._rank_layout = layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """Return the data-parallel rank in a mesh. Raises `MeshError` if it is not registered."""
        return self._mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Return whether the result is collected. Raises `MeshError` if it is not registered."""
        return self._mesh(mesh_name)[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """Return (data-parallel rank, is collected) in a mesh."""
        return self._mesh(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_rank_layout(self) -> RankLayout:
        """Return the rank layout. Raises `MeshError` if it is not registered."""
        if self._rank_layout is None:
            raise MeshError(
                f"{type(self).__name__} has no rank layout. Call "
                "self._register_rank_layout(RankLayout.of_rank(self.rank, tp, cp, dp, pp)) in the "
                "worker before a MEGATRON dispatch mode is used.",
                mesh_name="layout",
            )
        return self._rank_layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_dispatch_collect(self) -> RegisteredMeshes:
        """Return every registered mesh."""
        return {
            "dispatch_dp_rank": {mesh: dp for mesh, (dp, _) in self._meshes.items()},
            "collect_dp_rank": {mesh: collects for mesh, (_, collects) in self._meshes.items()},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Register one mesh from the two dicts that `get_dispatch_collect` of a worker returns.

        A worker that has registered one mesh gives its place under any `mesh_name`. Raises
        `MeshError` if it has registered several and none of them has this name.
        """
        source = mesh_name
        if mesh_name not in dispatch_dp_rank and len(dispatch_dp_rank) == 1:
            source = next(iter(dispatch_dp_rank))
        if source not in dispatch_dp_rank or source not in collect_dp_rank:
            raise MeshError(
                f"Mesh {mesh_name!r} is not among the registered meshes "
                f"{sorted(dispatch_dp_rank)}. Pass the dicts of one mesh, or a name of theirs.",
                mesh_name=mesh_name,
            )
        self._register_dispatch_collect_info(
            mesh_name, dispatch_dp_rank[source], collect_dp_rank[source]
        )

    def _mesh(self, mesh_name: str) -> tuple[int, bool]:
        try:
            return self._meshes[mesh_name]
        except KeyError:
            raise MeshError(
                f"{type(self).__name__} has not registered the mesh {mesh_name!r}; registered: "
                f"{sorted(self._meshes) or 'none'}. Call self._register_dispatch_collect_info("
                f"{mesh_name!r}, dp_rank, is_collect) in the worker first.",
                mesh_name=mesh_name,
            ) from None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, tool: str, path: str) -> None:
        """Profile the process of this rank (`observability.profiling`) until `stop_profile`. The
        trace is written to `path`, with the rank in its name."""
        start_profile(tool, Path(f"{path}_rank{self.rank}.json"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> list[ProfiledCall]:
        """End the profile of this process, write its trace, and return the calls in it."""
        return stop_profile()

    # Functions of the controller that run in the worker

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[Concatenate[Self, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return `func(worker, *args, **kwargs)`, with the rows of this rank of each batch."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `func(*args, **kwargs)`, run on rank 0."""
        return func(*args, **kwargs)


class ClassWithInitArgs:
    """`cls(*args, **kwargs)` to be built later, in another process. Call the object to build it.

    `cls` is a class, or the result of `ray.remote(cls)`.
    """

    def __init__(self, cls: object, *args: object, **kwargs: object) -> None:
        self.cls = plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles of one process, in the order in which they are built.

        A single class is one role, named like the class.
        """
        return {self.cls.__name__: self}

    @property
    def shares_process(self) -> bool:
        """Whether this stands for several roles in one process."""
        return False

    def build(self) -> Any:  # an instance of the user's class, which need not be a `Worker`
        """Build the worker in this process."""
        return self.cls(*self.args, **self.kwargs)

    def __call__(self) -> Any:
        return self.build()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


def plain_class(cls: object) -> type:
    """Return a class as it is, and the user's class for the result of `ray.remote`.

    Raises `DispatchError` if `cls` is neither.
    """
    metadata = getattr(cls, "__ray_metadata__", None)
    inner = getattr(metadata, "modified_class", cls)
    if metadata is not None:
        # ray.remote builds a subclass of the user's class and gives it the same name.
        inner = getattr(inner, "__ray_actor_class__", inner)
    if not isinstance(inner, type):
        raise DispatchError(f"A worker class was expected, got {cls!r}.")
    return inner


class ColocatedClass(ClassWithInitArgs):
    """Several roles in one process, each with its class and arguments."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise DispatchError("At least one role is needed to share a process, got none.")
        for role, member in class_dict.items():
            if not isinstance(member, ClassWithInitArgs):
                raise DispatchError(
                    f"Role {role!r} must be a class with its arguments (ClassWithInitArgs), got "
                    f"{type(member).__name__}."
                )
        self.class_dict = dict(class_dict)
        self.cls = type("_".join(class_dict), (), {"__module__": __name__})
        self.args = ()
        self.kwargs = {}

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        return self.class_dict

    @property
    def shares_process(self) -> bool:
        return True

    def build(self) -> dict[str, Any]:
        """Build the worker of each role in this process."""
        return {role: member.build() for role, member in self.class_dict.items()}


class FusedWorker(Worker):
    """A worker that builds one worker per role and has it as an attribute named like the role.

    The role table of its process contains these roles too.
    """

    role_classes: ClassVar[dict[str, ClassWithInitArgs]] = {}

    fused_roles: dict[str, Worker]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.fused_roles = ColocatedClass(self.role_classes).build()
        self._siblings = {type(self).__name__: self, **self.fused_roles}
        for role, worker in self.fused_roles.items():
            setattr(self, role, worker)
            if isinstance(worker, Worker):
                worker._siblings = self._siblings


def create_colocated_worker_raw_cls(
    class_dict: dict[str, ClassWithInitArgs], base: type[FusedWorker] = FusedWorker
) -> type[FusedWorker]:
    """Return a class with one attribute per role, for subclasses that use several roles."""
    members = {"role_classes": ColocatedClass(class_dict).class_dict, "__module__": __name__}
    return type("Fused_" + "_".join(class_dict), (base,), members)


def members_of(cls: type) -> dict[str, object]:
    """Return the attributes of a class by name, without those that raise when they are read."""
    members: dict[str, object] = {}
    for name in dir(cls):
        with suppress(Exception):  # a descriptor of the user's may raise anything
            members[name] = getattr(cls, name)
    return members


def roles_of(classes: dict[str, type]) -> dict[str, type]:
    """Return every role of a process with its class: the given and the fused classes' roles.

    Raises `DispatchError` for two roles of one name.
    """
    roles: dict[str, type] = {}
    for role, cls in classes.items():
        inner = cls.role_classes if issubclass(cls, FusedWorker) else {}
        for name, kind in ((role, cls), *((name, member.cls) for name, member in inner.items())):
            if name in roles:
                raise DispatchError(
                    f"Two roles of one process are called {name!r}: {roles[name].__name__} and "
                    f"{kind.__name__}. Give one of them another name."
                )
            roles[name] = kind
    return roles
