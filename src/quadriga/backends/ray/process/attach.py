"""What ranks that exist tell a program that attaches to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from quadriga.backends.ray.process.start import ATTACH_TIMEOUT_S
from quadriga.errors import CallTimeoutError, WorkerDiedError
from quadriga.single_controller.ranks.class_with_args import FusedWorker

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor


def classes_of(
    names: Sequence[str] | None, actors: Sequence[RankActor] | None, namespace: str | None = None
) -> dict[str, type]:
    """Ask the first of some ranks for its roles and their worker classes.

    A fused class stands for its roles. Raises `WorkerDiedError` if there is no such rank,
    `CallTimeoutError` if it is busy for longer than a minute.
    """
    found: Any = actors[0] if actors else None  # Ray's handle has every method of the actor
    try:
        if found is None:
            found = ray.get_actor((names or [""])[0], namespace=namespace)
        answer = ray.get(found.quadriga_roles.remote(), timeout=ATTACH_TIMEOUT_S)
    except ray.exceptions.RayActorError as error:
        raise WorkerDiedError(f"The rank {names or actors} has ended: {error}") from error
    except (ValueError, AttributeError) as error:
        raise WorkerDiedError(
            f"expected the names or handles of ranks of a worker group, got {names or actors}; "
            "there is no such rank. Pass ray_cls_with_init and the names of ranks that run."
        ) from error
    except ray.exceptions.GetTimeoutError as error:
        raise CallTimeoutError(
            f"The rank {names or actors} has not told its worker class within "
            f"{ATTACH_TIMEOUT_S:.0f} s, because it runs a call. Pass ray_cls_with_init."
        ) from error
    classes = cast(dict[str, type], answer)
    fused = {role: cls for role, cls in classes.items() if issubclass(cls, FusedWorker)}
    return fused or classes
