"""Whether ranks still exist, as Ray's control store and their nodes say. No dashboard is needed."""

from __future__ import annotations

from typing import Any

import ray

from quadriga.backends.ray.health.nodes import answering
from quadriga.single_controller.backend import RankHandle


def node_address() -> str:
    """The address by which other machines of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())


def rank_alive(handle: RankHandle) -> bool:
    """Whether the rank's process exists: Ray knows of no death, and its node answers."""
    node_id = handle.facts.node_id
    return actor_alive(handle.native) and answering([node_id]).get(node_id, True)


def actor_alive(actor: Any) -> bool:
    """True while the actor is being started or runs. Raises nothing for a dead one."""
    if not ray.is_initialized():
        return False
    return actor_record(actor).get("State") not in (None, "DEAD")


def actor_record(actor: Any) -> dict[str, Any]:
    """The control store's record: State, Address, DeathCause, …; empty if it knows none."""
    from ray._private import state

    return dict(state.actors(actor._actor_id.hex()) or {})
