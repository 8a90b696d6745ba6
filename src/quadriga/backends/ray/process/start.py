"""Starting the processes of a group: all at once, and built side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from quadriga.backends.ray.calls.row_store import make_store
from quadriga.backends.ray.calls.waiting import RayBatch
from quadriga.backends.ray.cluster import kill_actor
from quadriga.backends.ray.process.memory import FULL_EVERY_IN_CONTROLLER, collect_rarely
from quadriga.backends.ray.process.profiling import TorchProfiler
from quadriga.backends.ray.process.rank_process import (
    AsyncRankProcess,
    RankProcess,
    rank_process_class,
)
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import CallTimeoutError, ConfigError, DispatchError, WorkerDiedError
from quadriga.single_controller.backend import RankFacts, RankHandle
from quadriga.single_controller.dispatch.builtin_modes import Dispatch, Execute
from quadriga.single_controller.dispatch.modes import DispatchMode, ExecuteMode
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, roles_of
from quadriga.single_controller.ranks.environment import RankEnvironment, preloaded

if TYPE_CHECKING:
    from quadriga.backends.ray.calls.store import RayStore
    from quadriga.backends.ray.cluster import ActorFactory, RankActor, Ref

SINGLE_START_TIMEOUT_S = 1800.0
UNLIMITED = 2**20
"""`max_concurrency` of Ray for ranks that count their running calls themselves."""
ATTACH_TIMEOUT_S = 60.0
"""How long an existing rank may be busy when it is asked where it runs."""


@dataclass(frozen=True)
class RankPlan:
    """One rank to be started."""

    name: str
    place: RankEnvironment
    options: dict[str, object]
    """Options of the Ray actor."""
    variables: dict[str, str]
    """Environment variables of the process."""
    profiler: TorchProfiler | None = None
    """What traces its calls."""


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
    named: bool = True,
    port_range: Sequence[int] | None = None,
) -> list[RankHandle]:
    """Start one process per plan and build its workers.

    Args:
        plans: one per rank, in order.
        roles: the classes that every process builds, by role.
        class_name: what Ray calls the actor class.
        timeout: seconds for all `__init__`s.
        store: where the ranks put large fields.
        named: give the actors the names of the plans.
        port_range: (first, last + 1), where rank 0 may reserve its port.

    Raises `WorkerInitError` for the first `__init__` that raised, `ConfigError` for a name that is
    taken, `CallTimeoutError` after `timeout` seconds. No process is left after a failure.
    """
    collect_rarely(FULL_EVERY_IN_CONTROLLER)
    classes = {role: member.cls for role, member in roles.items()}
    rank_class = rank_process_class(class_name, classes)
    factory = cast("ActorFactory", ray.remote(rank_class))
    send_code_of_loaded_files()
    payload = ray.put((UserModes(Dispatch.added(), Execute.added()), dict(roles), store))
    search_path = [path for path in sys.path if os.path.isdir(path)]
    actors: list[RankActor] = []
    try:
        for plan in plans:
            name = {"name": plan.name} if named else {}
            options, arguments = _concurrency(rank_class, plan.options)
            actors.append(factory.options(**options, **name).remote(*arguments))
        prepared = [
            actor.quadriga_prepare.remote(
                plan.variables, search_path, preloaded(), plan.place.rank == 0, port_range
            )
            for actor, plan in zip(actors, plans, strict=True)
        ]
        ready = [
            actor.quadriga_setup.remote(plan.place, prepared[0], mine, payload, plan.profiler)
            for actor, plan, mine in zip(actors, plans, prepared, strict=True)
        ]
        facts = _wait(ready, plans, actors, next(iter(roles)), timeout)
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


def _concurrency(
    rank_class: type[RankProcess], options: Mapping[str, object]
) -> tuple[dict[str, object], tuple[object, ...]]:
    """Return the options and the arguments of the actor of a rank.

    Ray would count a call that waits for the call before it as a running one. With
    `max_concurrency=1`, a small call that overtakes a large one would keep it from running for
    ever. A rank with coroutine methods therefore counts its running calls itself.
    """
    if not issubclass(rank_class, AsyncRankProcess):
        return dict(options), ()
    limit = options.get("max_concurrency")
    return {**options, "max_concurrency": UNLIMITED}, (limit,)


def _wait(
    ready: list[Ref],
    plans: Sequence[RankPlan],
    actors: Sequence[RankActor],
    role: str,
    timeout: float,
) -> list[RankFacts]:
    """Wait for every `quadriga_setup`, with handles that do not know their process yet."""
    unknown = [
        RankHandle(actor, p.name, RankFacts(p.place.rank, p.place.world_size, "?", 0, "", ""))
        for actor, p in zip(actors, plans, strict=True)
    ]
    facts = RayBatch(ready, unknown, f"{role}.__init__", timeout).gather()
    return cast(list[RankFacts], facts)


def start_single(
    member: ClassWithInitArgs, options: dict[str, object], sharing_with: RankActor | None
) -> RankActor:
    """Start one rank outside a group and return its actor handle.

    Its rank and world size are read from `runtime_env["env_vars"]` of the options, as for a worker
    outside Ray.
    """
    runtime_env = cast(Mapping[str, Mapping[str, str]], options.get("runtime_env") or {})
    variables = dict(runtime_env.get("env_vars") or {})
    if sharing_with is not None:
        variables.update(devices_of(facts_of([sharing_with])[0]))
    place = RankEnvironment.read(variables)
    plan = RankPlan("", place, options, variables)
    name = member.cls.__name__ or next(iter(member.roles))
    timeout, store = SINGLE_START_TIMEOUT_S, make_store("auto")
    handles = start_ranks([plan], member.roles, name, timeout, store, named=False)
    return cast("RankActor", handles[0].native)


def facts_of(actors: Sequence[RankActor]) -> list[RankFacts]:
    """Ask ranks where they run.

    Raises `CallTimeoutError` if one of them runs a call for longer than a minute, `WorkerDiedError`
    if one of them has ended, `DispatchError` if an actor is no rank of a worker group.
    """
    timeout = ATTACH_TIMEOUT_S
    if others := [actor for actor in actors if not hasattr(actor, "quadriga_facts")]:
        raise DispatchError(
            f"A group can attach to ranks that a worker group has started, got {others[0]!r}. Call "
            "other actors with Ray's own calls."
        )
    refs = [actor.quadriga_facts.remote() for actor in actors]
    try:
        return cast(list[RankFacts], ray.get(refs, timeout=timeout))
    except GetTimeoutError:
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        busy = [actor for actor, ref in zip(actors, refs, strict=True) if ref not in ready]
        raise CallTimeoutError(
            f"{len(busy)} of {len(actors)} existing ranks did not say within {timeout:g} s where "
            f"they run, because each of them runs a call: {busy}. Attach to them when their calls "
            "have ended.",
            method="quadriga_facts",
            stacks={},
        ) from None
    except RayActorError as error:
        raise WorkerDiedError(
            f"One of {len(actors)} existing ranks has ended: {error}", method="quadriga_facts"
        ) from error


def devices_of(facts: RankFacts) -> dict[str, str]:
    """Return the variable that shows a process the devices of an existing rank."""
    return {} if facts.devices is None else {"CUDA_VISIBLE_DEVICES": facts.devices}


def class_roles(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, type]:
    """Return every role that a process of these classes hosts."""
    return roles_of({role: member.cls for role, member in roles.items()})
