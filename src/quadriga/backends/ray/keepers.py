"""Keepers on Ray: an actor without resources on each node that keeps values of another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from quadriga.backends.ray.cluster import actor_on_node, cluster_nodes
from quadriga.errors import LostObjectError, first_line
from quadriga.single_controller.keepers import Keeper, KeptValues, Value

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref

_WAIT_S = 60.0  # for a keeper that does not answer


@dataclass(frozen=True)
class RayKeeper(Keeper):
    """A handle of a `KeptValues` in an actor."""

    actor: RankActor

    def add(self, key: str, step: int, value: Value) -> None:
        """See `Keeper`."""
        _answer(self.actor.add.remote(key, step, value))

    def end(self, key: str, step: int) -> None:
        """See `Keeper`."""
        _answer(self.actor.end.remote(key, step))

    def steps(self, key: str) -> list[int]:
        """See `Keeper`."""
        try:
            found: list[int] = _answer(self.actor.steps.remote(key))
        except LostObjectError:
            return []
        return found

    def value(self, key: str, step: int, index: int) -> Value:
        """See `Keeper`."""
        return _answer(self.actor.value.remote(key, step, index))


def _answer(call: Ref) -> Any:  # as the method returns it
    try:
        return ray.get(call, timeout=_WAIT_S)
    except RayError as error:
        text = f"the keeper of snapshots does not answer: {first_line(error)}"
        raise LostObjectError(text) from None


def keepers_of(nodes: list[str]) -> list[RayKeeper]:
    """Return a keeper for each rank, by the nodes of the ranks: on the next node in the order of
    addresses, or on the same one if there is no other.

    Keepers of one node are one actor, which ends when the last handle of the controller is gone.
    """
    alive = [n.node_id for n in sorted(cluster_nodes(), key=lambda n: n.address) if n.alive]
    places = {n: alive[(alive.index(n) + 1) % len(alive)] for n in nodes if n in alive}
    missing = alive[0]
    actors = {
        place: actor_on_node(KeptValues, place, f"quadriga_keeper_{place}")
        for place in {missing, *places.values()}
    }
    return [RayKeeper(actors[places.get(node, missing)]) for node in nodes]
