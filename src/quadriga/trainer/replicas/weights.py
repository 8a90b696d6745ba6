"""The weight sync from the actor to the replicas of a rollout."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from quadriga.errors import WorkerError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.trainer.replicas.replica import Replica, ReplicaGroup, Replicas
from quadriga.workers.roles import SendingGroup

if TYPE_CHECKING:
    from quadriga.weight_sync import WeightNeeds

    Needs = list[WeightNeeds]


@dataclass(frozen=True)
class ReplicaLink:
    """From the actor to the replicas, through the store of the backend.

    The ranks of the actor send once, whatever the number of replicas: each replica reads the parts
    of a round by their handles. A replica that is lost meanwhile is left out. One that was lost
    before is started again first, if it may be, and so gets the same weights as the others.
    """

    sender: SendingGroup
    replicas: Replicas

    def sync(self) -> None:
        """Copy all weights, then compare digests on every rank of every replica.

        Raises:
            WorkerError: names the weights that are missing or differ, or the replicas hold several
                versions.
            RolloutDiedError: all replicas are lost.
        """
        replicas = self.replicas
        replicas.restart_lost()
        replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        replicas.restart_lost()  # those that died since, as this call has shown
        every = replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        found = [needs for per_rank in every.values() for needs in cast("Needs", per_rank)]
        # One that was started again may need more than the others; all receive what it needs.
        needs = next((needs for needs in found if needs.part == "unmerged"), found[0])
        reading: dict[DataProtoFuture, Replica] = {}
        with closing(self.sender.send_weights.stream(needs)) as rounds:
            for parts in rounds:
                replicas.collect(reading)  # two rounds at most are in the store
                reading = replicas.submit(partial(_receive, parts))
        replicas.collect(reading)
        finished = replicas.collect(replicas.submit(lambda group: group.finish_weights.submit()))
        versions = {v for per_rank in finished.values() for v in cast("list[int]", per_rank)}
        if len(versions) != 1:
            raise WorkerError(
                f"after a weight sync the replicas of the rollout hold the versions "
                f"{sorted(versions)}, expected one"
            )
        replicas.version = versions.pop()


def _receive(parts: list[DataProto], group: ReplicaGroup) -> DataProtoFuture:
    return group.receive_weights.submit(parts)
