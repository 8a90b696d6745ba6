"""An actor that knows where the ranks of a group are, for processes that know only its name.

The ranks themselves learn rank 0's address from the group, so a group starts this actor on request
only: `ray.get_actor(f"{prefix}_register_center").get_rank_zero_info.remote()`. Workers that were
started without a group use it to find rank 0 (`join_register_center`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from quadriga.backends.ray.cluster import node_address, this_node
from quadriga.errors import CallTimeoutError, PlacementError, WorkerDiedError
from quadriga.single_controller.backend import RankFacts
from quadriga.single_controller.ranks.environment import ReservedPort

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import ActorFactory

JOIN_TIMEOUT_S = 300.0
"""How long a rank waits for the register center that rank 0 starts."""


class WorkerGroupRegisterCenter:
    """Hold where the ranks of one group are."""

    def __init__(self, facts: Sequence[RankFacts]) -> None:
        self._facts = {fact.rank: fact for fact in facts}

    def get_rank_zero_info(self) -> dict[str, str]:
        """Return `{"MASTER_ADDR", "MASTER_PORT"}`."""
        first = self._facts[0]
        return {"MASTER_ADDR": first.master_address, "MASTER_PORT": first.master_port}

    def get_worker_info(self) -> dict[int, str]:
        """Return the id of each rank's node, by rank."""
        return {rank: fact.node_id for rank, fact in self._facts.items()}

    def add_rank(self, fact: RankFacts) -> RankFacts:
        """Note where a rank is, and return where rank 0 is."""
        self._facts[fact.rank] = fact
        return self._facts[0]


def start_register_center(
    prefix: str, facts: Sequence[RankFacts], detached: bool, namespace: str | None
) -> object:
    """Start the actor `{prefix}_register_center` and return its handle. It takes no CPU.

    Raises `PlacementError` if an actor has this name already.
    """
    options: dict[str, object] = {"name": f"{prefix}_register_center", "num_cpus": 0}
    if detached:
        options["lifetime"] = "detached"
    if namespace is not None:
        options["namespace"] = namespace
    factory = cast("ActorFactory", ray.remote(WorkerGroupRegisterCenter))
    try:
        return factory.options(**options).remote(list(facts))
    except ValueError as error:  # Ray's error for a name that is taken
        raise PlacementError(
            f"the register center {options['name']!r} exists already: another group has the prefix "
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
        CallTimeoutError: there is no such actor, or it does not answer, within `JOIN_TIMEOUT_S`
            seconds.
        WorkerDiedError: the actor has ended.
        PlacementError: rank 0 cannot start the actor, because the name is taken.
    """
    prefix = name.removesuffix("_register_center")
    port = ReservedPort.choose() if rank == 0 else None
    address, number = (node_address(), str(port.port)) if port else ("", "")
    mine = RankFacts(
        rank, world_size, node_address(), os.getpid(), address, number, prefix, None, this_node()
    )
    if port is not None:
        return Joined(address, number, start_register_center(prefix, [mine], False, None), port)
    expires = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            center: Any = ray.get_actor(name)  # a handle has every method of its actor
            left = max(0.0, expires - time.monotonic())
            first = ray.get(center.add_rank.remote(mine), timeout=left)
            return Joined(first.master_address, first.master_port, center, None)
        except ValueError as error:  # rank 0 has not started it yet
            if time.monotonic() > expires:
                raise CallTimeoutError(
                    f"rank {rank} of {world_size} found no actor {name!r} within "
                    f"{JOIN_TIMEOUT_S:.0f} s; start rank 0 of WG_PREFIX={prefix!r}, or set "
                    "MASTER_ADDR and MASTER_PORT"
                ) from error
        except GetTimeoutError as error:
            raise CallTimeoutError(
                f"the register center {name!r} did not answer rank {rank} of {world_size} within "
                f"{JOIN_TIMEOUT_S:.0f} s"
            ) from error
        except RayActorError as error:
            raise WorkerDiedError(
                f"the register center {name!r} has ended before rank {rank} of {world_size} "
                f"joined; start rank 0 of WG_PREFIX={prefix!r} again"
            ) from error
        time.sleep(0.1)
