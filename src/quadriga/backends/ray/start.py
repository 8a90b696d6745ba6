"""Starting the processes of a group, and the classes with arguments that they are built from.

Processes start all at once and build their workers side by side. `RayClassWithInitArgs` is a worker
class with its arguments and the options of its actor.

The register center is an actor that knows where the ranks of a group are, for processes that know
only its name. The ranks learn rank 0's address from the group, so a group starts this actor on
request only: `ray.get_actor(f"{prefix}_register_center").get_rank_zero_info.remote()`. Workers that
were started without a group use it to find rank 0 (`join_register_center`).
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from quadriga.backends.ray.calls import FULL_EVERY, RayBatch
from quadriga.backends.ray.cluster import BESIDE, kill_actor, node_address, this_node
from quadriga.backends.ray.pickling import send_code_of_loaded_files
from quadriga.backends.ray.rank_process import AsyncRankProcess, collect_rarely, rank_process_class
from quadriga.backends.ray.store import make_store
from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    DispatchError,
    PlacementError,
    WorkerDiedError,
)
from quadriga.single_controller.backend import RankFacts, RankHandle
from quadriga.single_controller.environment import RankEnvironment, ReservedPort, preloaded
from quadriga.single_controller.modes import Dispatch, DispatchMode, Execute, ExecuteMode
from quadriga.single_controller.worker import (
    ClassWithInitArgs,
    ColocatedClass,
    FusedWorker,
    create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import ActorFactory, RankActor, Ref
    from quadriga.backends.ray.store import RayStore

SINGLE_START_TIMEOUT_S = 1800.0
UNLIMITED = 2**20
"""`max_concurrency` of Ray for ranks that count their running calls themselves."""
ATTACH_TIMEOUT_S = 60.0
"""How long an existing rank may be busy when it is asked where it runs."""


@dataclass(frozen=True)
class RankPlan:
    """One rank to be started."""

    name: str
    """The name of the actor; "" if it has none, or the one among its options."""
    place: RankEnvironment
    options: dict[str, object]
    """Options of the Ray actor."""
    variables: dict[str, str]
    """Environment variables of the process."""


@dataclass(frozen=True)
class Nsight:
    """Start ranks under `nsys profile`, through Ray's `runtime_env`. The nodes need `nsys`.

    `options`: flags of `nsys profile` without their dashes (`{"t": "cuda,nvtx"}`); None: Ray's
    default flags. `ranks`: which ranks; None: all. Reports are in the folder `nsight` of the logs
    of the Ray session.
    """

    options: Mapping[str, str] | None = None
    ranks: Collection[int] | None = None

    def __post_init__(self) -> None:
        for name, value in (self.options or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(
                    f"Nsight: options are flags of nsys and their values, both strings, got "
                    f"{name!r}: {value!r}.",
                    key="profiler",
                )

    def options_of_rank(self, rank: int, options: dict[str, object]) -> dict[str, object]:
        """Return the actor options of one rank, with Ray's setting if the rank is profiled."""
        if self.ranks is not None and rank not in self.ranks:
            return options
        given = cast("Mapping[str, object]", options.get("runtime_env") or {})
        nsight = "default" if self.options is None else dict(self.options)
        return {**options, "runtime_env": {**given, "nsight": nsight}}


def check_profiler(profiler: object, world_size: int) -> None:
    """Raise `ConfigError` for a profiler that fits no rank of a group."""
    if profiler is None:
        return
    if not isinstance(profiler, Nsight):
        raise ConfigError(f"profiler: expected Nsight(...), got {profiler!r}.", key="profiler")
    if wrong := sorted(rank for rank in profiler.ranks or () if not 0 <= rank < world_size):
        raise ConfigError(
            f"profiler: rank(s) {wrong} do not exist in a group of {world_size} ranks.",
            key="profiler",
        )


class UserModes:
    """The dispatch and execute modes that the user has added.

    They register themselves when they are unpickled. In a rank's payload they come before the
    worker classes, whose decorators name them.
    """

    def __init__(self, dispatch: Sequence[DispatchMode], execute: Sequence[ExecuteMode]) -> None:
        Dispatch.adopt(dispatch)
        Execute.adopt(execute)
        self.dispatch, self.execute = tuple(dispatch), tuple(execute)

    def __reduce__(self) -> tuple[object, ...]:
        return UserModes, (self.dispatch, self.execute)


def start_ranks(
    plans: Sequence[RankPlan],
    roles: Mapping[str, ClassWithInitArgs],
    class_name: str,
    timeout: float,
    store: RayStore,
    port_range: Sequence[int] | None = None,
) -> list[RankHandle]:
    """Start one process per plan and build its workers.

    Args:
        plans: one per rank, in order.
        roles: the classes that every process builds, by role.
        class_name: what Ray calls the actor class.
        timeout: seconds for all `__init__`s.
        store: where the ranks put large fields.
        port_range: (first, last + 1), where rank 0 may reserve its port.

    Raises `WorkerInitError` for the first `__init__` that raised, `ConfigError` for a name that is
    taken, `CallTimeoutError` after `timeout` seconds. No process is left after a failure.
    """
    collect_rarely(FULL_EVERY)
    classes = {role: member.cls for role, member in roles.items()}
    rank_class = rank_process_class(class_name, classes)
    groups = {BESIDE: 1} if rank_class._beside else {}
    factory = cast("ActorFactory", cast(Any, ray.remote)(concurrency_groups=groups)(rank_class))
    send_code_of_loaded_files()
    payload = ray.put((UserModes(Dispatch.added(), Execute.added()), dict(roles), store))
    search_path = [path for path in sys.path if os.path.isdir(path)]
    actors: list[RankActor] = []
    try:
        for plan in plans:
            options = {"name": plan.name or None, **plan.options}
            arguments: tuple[object, ...] = ()
            if issubclass(rank_class, AsyncRankProcess):
                # Ray would count a call that waits for the call before it as a running one. With
                # `max_concurrency=1`, a small call that overtakes a large one would keep it from
                # running for ever. So the rank counts its running calls itself.
                arguments = (options.get("max_concurrency"),)
                options["max_concurrency"] = UNLIMITED
            actors.append(factory.options(**options).remote(*arguments))
        prepared = [
            actor.quadriga_prepare.remote(
                plan.variables, search_path, preloaded(), plan.place.rank == 0, port_range
            )
            for actor, plan in zip(actors, plans, strict=True)
        ]
        ready = [
            actor.quadriga_setup.remote(plan.place, prepared[0], mine, payload)
            for actor, plan, mine in zip(actors, plans, prepared, strict=True)
        ]
        # The handles do not know their processes yet.
        unknown = [
            RankHandle(actor, p.name, RankFacts(p.place.rank, len(plans), "?", 0, "", ""))
            for actor, p in zip(actors, plans, strict=True)
        ]
        label = f"{next(iter(roles))}.__init__"
        facts = cast(list[RankFacts], RayBatch(ready, unknown, label, timeout=timeout).gather())
    except BaseException as error:
        for actor in actors:
            kill_actor(actor)
        if isinstance(error, ValueError) and "name" in str(error) and "taken" in str(error):
            raise ConfigError(
                f"An actor named {plans[len(actors)].name!r} exists already in this Ray "
                "namespace. Choose another name_prefix."
            ) from error
        raise
    return [
        RankHandle(actor, plan.name, fact)
        for actor, plan, fact in zip(actors, plans, facts, strict=True)
    ]


def existing_actors(
    names: Sequence[str] | None, actors: Sequence[RankActor] | None, namespace: str | None
) -> list[RankActor]:
    """Return the actors of some ranks. Raises `WorkerDiedError` for a name that no actor has."""
    found = list(actors or [])
    for name in (names or []) if actors is None else []:
        try:
            found.append(cast("RankActor", ray.get_actor(name, namespace=namespace)))
        except ValueError as error:
            raise WorkerDiedError(
                f"The Ray namespace {namespace or ray.get_runtime_context().namespace!r} has no "
                f"worker named {name!r}.",
                rank=len(found),
            ) from error
    return found


def _ask(actors: Sequence[RankActor], method: str) -> list[Any]:  # what the method returns
    """Ask existing ranks for what they are.

    Raises `CallTimeoutError` if one of them runs a call for longer than a minute, `WorkerDiedError`
    if one of them has ended, `DispatchError` if an actor is no rank of a worker group.
    """
    if others := [actor for actor in actors if not hasattr(actor, method)]:
        raise DispatchError(
            f"A group can attach to ranks that a worker group has started, got {others[0]!r}. Call "
            "other actors with Ray's own calls."
        )
    refs: list[Ref] = [getattr(actor, method).remote() for actor in actors]
    try:
        return list(ray.get(refs, timeout=ATTACH_TIMEOUT_S))
    except GetTimeoutError:
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        busy = [actor for actor, ref in zip(actors, refs, strict=True) if ref not in ready]
        raise CallTimeoutError(
            f"{len(busy)} of {len(actors)} existing ranks did not say within "
            f"{ATTACH_TIMEOUT_S:g} s what they are, because each of them runs a call: {busy}. "
            "Attach to them when their calls have ended.",
            method=method,
            stacks={},
        ) from None
    except RayActorError as error:
        raise WorkerDiedError(
            f"One of {len(actors)} existing ranks has ended: {error}", method=method
        ) from error


def facts_of(actors: Sequence[RankActor]) -> list[RankFacts]:
    """Ask ranks where they run. Raises as `_ask`."""
    return _ask(actors, "quadriga_facts")


def classes_of(
    names: Sequence[str] | None, actors: Sequence[RankActor] | None, namespace: str | None = None
) -> dict[str, type]:
    """Ask the first of some ranks for its roles and their worker classes. Raises as `_ask`.

    A fused class stands for its roles.
    """
    first = existing_actors(names, actors, namespace)[:1]
    classes: dict[str, type] = _ask(first, "quadriga_roles")[0]
    fused = {role: cls for role, cls in classes.items() if issubclass(cls, FusedWorker)}
    return fused or classes


def devices_of(facts: RankFacts) -> dict[str, str]:
    """Return the variable that shows a process the devices of an existing rank."""
    return {} if facts.devices is None else {"CUDA_VISIBLE_DEVICES": facts.devices}


JOIN_TIMEOUT_S = 300.0
"""How long a rank waits for the register center that rank 0 starts."""


class WorkerGroupRegisterCenter:
    """What rank 0 tells the other ranks of a group, and the node of each rank."""

    def __init__(self, rank_zero_info: object, nodes: Mapping[int, str] | None = None) -> None:
        self._rank_zero_info = rank_zero_info
        self._nodes = dict(nodes or {})

    def get_rank_zero_info(self) -> object:
        """Return what the center was made with: `{"MASTER_ADDR", "MASTER_PORT"}` of a group."""
        return self._rank_zero_info

    def set_worker_info(self, rank: int, node_id: str) -> None:
        """Keep the id of a rank's node."""
        self._nodes[rank] = node_id

    def get_worker_info(self) -> dict[int, str]:
        """Return the id of each rank's node, by rank."""
        return self._nodes


def start_register_center(
    prefix: str, facts: Sequence[RankFacts], detached: bool = False, namespace: str | None = None
) -> object:
    """Start the actor `{prefix}_register_center` and return its handle. It takes no CPU.

    `facts`: of the ranks that are known, rank 0 first. Raises `PlacementError` if an actor has this
    name already.
    """
    name, lifetime = f"{prefix}_register_center", "detached" if detached else None
    center = cast("ActorFactory", ray.remote(WorkerGroupRegisterCenter)).options(
        name=name, num_cpus=0, lifetime=lifetime, namespace=namespace
    )
    try:
        first, nodes = facts[0], {fact.rank: fact.node_id for fact in facts}
        info = {"MASTER_ADDR": first.master_address, "MASTER_PORT": first.master_port}
        return center.remote(info, nodes)
    except ValueError as error:  # Ray's error for a name that is taken
        raise PlacementError(
            f"the register center {name!r} exists already: another group has the prefix "
            f"{prefix!r}. Choose another name_prefix (WG_PREFIX), or end that group"
        ) from error


@dataclass(frozen=True)
class Joined:
    """The address and port of rank 0, and what keeps them valid."""

    master_address: str
    master_port: str
    center: object
    """The handle of the register center."""
    port: ReservedPort | None
    """The port that this rank has reserved, if it is rank 0."""


def join_register_center(name: str, rank: int, world_size: int) -> Joined:
    """Find rank 0 through the actor `name`, which rank 0 starts.

    Raises:
        CallTimeoutError: there is no such actor, or it does not answer, for `JOIN_TIMEOUT_S`.
        WorkerDiedError: the actor has ended.
        PlacementError: rank 0 cannot start the actor, because the name is taken.
    """
    prefix = name.removesuffix("_register_center")
    if rank == 0:
        port = ReservedPort.choose()
        node, place = node_address(), (node_address(), str(port.port))
        mine = RankFacts(0, world_size, node, os.getpid(), *place, node_id=this_node())
        center: Any = start_register_center(prefix, [mine])
        return Joined(*place, center, port)
    who, expires = f"rank {rank} of {world_size}", time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            center = ray.get_actor(name)  # a handle has every method of its actor
            left = max(0.0, expires - time.monotonic())
            noted = center.set_worker_info.remote(rank, this_node())
            _, first = ray.get([noted, center.get_rank_zero_info.remote()], timeout=left)
            return Joined(first["MASTER_ADDR"], first["MASTER_PORT"], center, None)
        except RayActorError as error:
            raise WorkerDiedError(
                f"the register center {name!r} has ended before {who} joined; start rank 0 of "
                f"WG_PREFIX={prefix!r} again"
            ) from error
        except (ValueError, GetTimeoutError) as error:  # ValueError: it does not exist yet
            if time.monotonic() >= expires:
                found = "did not answer" if isinstance(error, GetTimeoutError) else "is missing for"
                raise CallTimeoutError(
                    f"the actor {name!r} {found} {who} after {JOIN_TIMEOUT_S:.0f} s; start rank 0 "
                    f"of WG_PREFIX={prefix!r}, or set MASTER_ADDR and MASTER_PORT"
                ) from error
        time.sleep(0.1)


REFUSED = ("max_restarts", "max_task_retries")
"""Options that would have Ray restart a rank, whose weights and process group are then lost."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls(*args, **kwargs)` in a Ray actor, built when the object is called."""

    def __init__(self, cls: object, *args: object, **kwargs: object) -> None:
        super().__init__(cls, *args, **kwargs)
        self.ray_options: dict[str, object] = {}
        self.additional_resources: dict[str, float] = {}
        if isinstance(cls, ActorClass):  # `ray.remote(...)` keeps its options on what it returns
            self.update_options(getattr(cls, "_default_options", None) or {})

    def update_options(self, options: Mapping[str, object]) -> None:
        """Set Ray actor options (`runtime_env`, `max_concurrency`, …).

        Raises `ConfigError` for options that would restart a rank.
        """
        for name in REFUSED:
            if options.get(name):
                raise ConfigError(
                    f"{self.cls.__name__}: the actor option {name}={options[name]!r} is not "
                    "supported. A restarted rank would have neither its weights nor its place in "
                    "the process group. Start the group again and load a checkpoint.",
                    key=name,
                )
        self.ray_options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources of the node, per process."""
        self.additional_resources = dict(additional_resource)

    def actor_options(
        self,
        placement_group: PlacementGroup | None = None,
        bundle_index: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        device_name: str = "cuda",
    ) -> dict[str, object]:
        """Return the actor options of one process of this class.

        Args:
            placement_group: where the process runs; None: anywhere.
            bundle_index: bundle of that group.
            use_gpu: ask for a device.
            num_gpus: share of one device.
            device_name: "npu" asks for the resource NPU, anything else for GPU.
        """
        options = dict(self.ray_options)
        if placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group,
                placement_group_bundle_index=bundle_index,
                placement_group_capture_child_tasks=False,
            )
        options.setdefault("num_cpus", 1)
        given = cast(Mapping[str, float], options.get("resources") or {})
        resources = {**given, **self.additional_resources}
        if use_gpu and device_name == "npu":
            resources["NPU"] = num_gpus
        elif use_gpu:
            options["num_gpus"] = num_gpus
        if resources:
            options["resources"] = resources
        return options

    def options_on_node(self, node_id: str) -> dict[str, object]:
        """Return the actor options of a process that shares a node, and devices, with another."""
        options = dict(self.ray_options)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options.setdefault("num_cpus", 0)
        options["num_gpus"] = 0
        return options

    def __call__(
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = False,
        num_gpus: float = 1,
        sharing_with: RankActor | None = None,
        device_name: str = "cuda",
    ) -> RankActor:
        """Start one rank by itself and return its actor handle.

        It runs in a bundle of a placement group, or on the node and with the devices of
        `sharing_with`. Every public method of the class can be called on the handle. Its rank and
        world size are read from `runtime_env["env_vars"]` of the options, as for a worker outside
        Ray.
        """
        bundle = placement_group, placement_group_bundle_idx
        options = self.actor_options(*bundle, use_gpu, num_gpus, device_name)
        shown: dict[str, str] = {}
        if sharing_with is not None:
            (facts,) = facts_of([sharing_with])
            options, shown = self.options_on_node(facts.node_id), devices_of(facts)
        runtime_env = cast(Mapping[str, Mapping[str, str]], options.get("runtime_env") or {})
        variables = {**(runtime_env.get("env_vars") or {}), **shown}
        plan = RankPlan("", RankEnvironment.read(variables), options, variables)
        name = self.cls.__name__ or next(iter(self.roles))
        timeout, store = SINGLE_START_TIMEOUT_S, make_store("auto")
        handles = start_ranks([plan], self.roles, name, timeout, store)
        return cast("RankActor", handles[0].native)


class RayColocatedClass(ColocatedClass, RayClassWithInitArgs):
    """Several roles in one Ray actor."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        ColocatedClass.__init__(self, class_dict)
        self.ray_options = {}
        self.additional_resources = {}
        for member in class_dict.values():
            if isinstance(member, RayClassWithInitArgs):
                self.ray_options.update(member.ray_options)
                self.additional_resources.update(member.additional_resources)


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> RayColocatedClass:
    """Return a class for one process with one worker per role.

    Its group offers `<role>_<method>` and `spawn`.
    """
    return RayColocatedClass(class_dict)


def create_colocated_worker_cls_fused(
    class_dict: dict[str, ClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Return a fused class with one attribute per role.

    Its group offers `fuse` and `spawn_fused`.
    """
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(copy.copy(class_dict)))
