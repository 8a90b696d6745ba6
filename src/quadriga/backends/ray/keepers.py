"""Keepers on Ray: an actor without resources on each node that keeps values of another one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from quadriga.backends.ray.cluster import actor_on_node, cluster_nodes
from quadriga.errors import LostObjectError, first_line
from quadriga.single_controller.keepers import Bytes, Keeper, KeptValues

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref

_WAIT_S = 60.0  # for a keeper that does not answer


@dataclass(frozen=True)
class RayKeeper(Keeper):
    """A handle of a `KeptValues` in an actor."""

    actor: RankActor

    def begin(self, key: str, step: int) -> tuple[str, str]:
        """See `Keeper`."""
        path, memory = _answer(self.actor.begin.remote(key, step))
        return path, memory

    def write(self, key: str, data: Bytes) -> None:
        """See `Keeper`."""
        _answer(self.actor.write.remote(key, data))

    def end(self, key: str) -> None:
        """See `Keeper`."""
        _answer(self.actor.end.remote(key))

    def steps(self, key: str) -> list[int]:
        """See `Keeper`."""
        with suppress(LostObjectError):
            return [*_answer(self.actor.steps.remote(key))]
        return []

    def read(self, key: str, step: int, start: int, size: int) -> bytes:
        """See `Keeper`."""
        return bytes(_answer(self.actor.read.remote(key, step, start, size)))


def _answer(call: Ref) -> Any:  # as the method returns it
    try:
        return ray.get(call, timeout=_WAIT_S)
    except RayError as error:
        text = f"the keeper of snapshots does not answer: {first_line(error)}"
        raise LostObjectError(text) from None


def keepers_of(nodes: list[str]) -> list[RayKeeper]:
    """Return a keeper for each rank, by the nodes of the ranks: on the next node in the order of
    addresses, or on the same one if there is no other.

    Keepers of one node are one new actor, which ends when the last of these handles is gone.
    """
    alive = [n.node_id for n in sorted(cluster_nodes(), key=lambda n: n.address) if n.alive]
    places = [alive[(alive.index(n) + 1) % len(alive)] if n in alive else alive[0] for n in nodes]
    actors = {place: actor_on_node(KeptValues, place) for place in {*places}}
    return [RayKeeper(actors[place]) for place in places]
