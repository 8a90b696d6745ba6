"""An actor that knows where the ranks of a group are, for processes that know only its name.

The ranks themselves learn rank 0's address from the group, so a group starts this actor on request
only: `ray.get_actor(f"{prefix}_register_center").get_rank_zero_info.remote()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import ray

from quadriga.single_controller.backend import RankFacts

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import ActorFactory


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

    def get_facts(self) -> list[RankFacts]:
        """Return everything known of each rank, in the order of ranks."""
        return [self._facts[rank] for rank in sorted(self._facts)]


def start_register_center(
    prefix: str, facts: Sequence[RankFacts], detached: bool, namespace: str | None
) -> object:
    """Start the actor `{prefix}_register_center` and return its handle. It takes no CPU."""
    options: dict[str, object] = {"name": f"{prefix}_register_center", "num_cpus": 0}
    if detached:
        options["lifetime"] = "detached"
    if namespace is not None:
        options["namespace"] = namespace
    factory = cast("ActorFactory", ray.remote(WorkerGroupRegisterCenter))
    return factory.options(**options).remote(list(facts))
