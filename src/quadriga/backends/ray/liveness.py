"""Whether an actor's process exists, as Ray's control store knows it. No dashboard is needed."""

from __future__ import annotations

from typing import Any

import ray


def actor_alive(actor: Any) -> bool:
    """True while the actor is being started or runs. Raises nothing for a dead one."""
    if not ray.is_initialized():
        return False
    state = actor_record(actor).get("State")
    return state not in (None, "DEAD")


def actor_record(actor: Any) -> dict[str, Any]:
    """The control store's record: State, Address, Pid, DeathCause, …; empty if unknown."""
    from ray._private import state

    record = state.actors(actor._actor_id.hex())
    return dict(record or {})
