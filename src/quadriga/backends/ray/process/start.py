"""How the processes of a group come to be: all at once, then built side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from quadriga.backends.ray.calls.waiting import RayBatch
from quadriga.backends.ray.process.heap import freeze_heap
from quadriga.backends.ray.process.rank_process import rank_process_class
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import ConfigError
from quadriga.single_controller.backend import RankFacts, RankHandle
from quadriga.single_controller.dispatch.builtin_modes import Dispatch, Execute
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, roles_of
from quadriga.single_controller.ranks.environment import RankEnvironment, preloaded


@dataclass(frozen=True)
class RankPlan:
    """One rank to be started."""

    name: str
    place: RankEnvironment
    options: dict[str, Any]
    variables: dict[str, str]


class UserModes:
    """The modes a user has added. They register themselves where they are unpickled, which comes
    before the worker classes that name them."""

    def __init__(self, dispatch: Sequence[Any], execute: Sequence[Any]) -> None:
        Dispatch.adopt(dispatch)
        Execute.adopt(execute)
        self.dispatch, self.execute = tuple(dispatch), tuple(execute)

    def __reduce__(self) -> tuple[Any, ...]:
        return UserModes, (self.dispatch, self.execute)


def start_ranks(
    plans: Sequence[RankPlan],
    roles: Mapping[str, ClassWithInitArgs],
    class_name: str,
    timeout: float,
    named: bool = True,
    port_range: Sequence[int] | None = None,
) -> list[RankHandle]:
    """Start one process per plan and build its workers. `port_range`: where rank 0 may choose its
    port, (first, last + 1).

    Raises WorkerInitError for the first `__init__` that raised, ConfigError for a name that is
    taken, CallTimeoutError after `timeout` seconds. Nothing is left running after a failure.
    """
    classes = {role: member.cls for role, member in roles.items()}
    actor_class = ray.remote(rank_process_class(class_name, classes))
    send_code_of_loaded_files()
    payload = ray.put((UserModes(Dispatch.added(), Execute.added()), dict(roles)))
    search_path = [path for path in sys.path if os.path.isdir(path)]
    actors: list[Any] = []
    try:
        for plan in plans:
            name = {"name": plan.name} if named else {}
            actors.append(actor_class.options(**plan.options, **name).remote())
        prepared = [
            actor.quadriga_prepare.remote(
                plan.variables, search_path, preloaded(), plan.place.rank == 0, port_range
            )
            for actor, plan in zip(actors, plans, strict=True)
        ]
        # Taking its own rank's answer too keeps the payload, and the modules that it imports,
        # from being loaded before that rank is prepared.
        ready = [
            actor.quadriga_setup.remote(plan.place, prepared[0], mine, payload)
            for actor, plan, mine in zip(actors, plans, prepared, strict=True)
        ]
        freeze_heap()  # while the ranks start
        facts: list[RankFacts] = _wait(ready, plans, actors, next(iter(roles)), timeout)
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
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


def _wait(
    ready: list[Any], plans: Sequence[RankPlan], actors: list[Any], role: str, timeout: float
) -> list[RankFacts]:
    unknown = [
        RankHandle(actor, p.name, RankFacts(p.place.rank, p.place.world_size, "?", 0, "", ""))
        for actor, p in zip(actors, plans, strict=True)
    ]
    return RayBatch(ready, unknown, f"{role}.__init__", timeout).gather()


def start_single(member: ClassWithInitArgs, options: dict[str, Any], sharing_with: Any) -> Any:
    """Start one rank outside a group; returns its actor handle.

    Its place is read from `runtime_env["env_vars"]` of the options, as for a worker outside Ray.
    """
    variables = dict((options.get("runtime_env") or {}).get("env_vars") or {})
    if sharing_with is not None:
        facts = ray.get(sharing_with.quadriga_facts.remote(), timeout=60)
        variables.update(devices_of(facts))
    place = RankEnvironment.read(variables)
    plan = RankPlan("", place, options, variables)
    role = next(iter(member.roles))
    handle = start_ranks([plan], member.roles, member.cls.__name__ or role, 1800.0, named=False)
    return handle[0].native


def devices_of(facts: RankFacts) -> dict[str, str]:
    """The variable that shows a process the devices of an existing rank."""
    return {} if facts.devices is None else {"CUDA_VISIBLE_DEVICES": facts.devices}


def class_roles(roles: Mapping[str, ClassWithInitArgs]) -> dict[str, type]:
    """Every role a process of these classes hosts."""
    return roles_of({role: member.cls for role, member in roles.items()})
