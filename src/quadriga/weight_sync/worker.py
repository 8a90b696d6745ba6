"""The weight syncs of the policy's worker: to the rollout of its process, and to other processes.

Each way of syncing is a method that the controller calls, or a pair of them. The policy's worker
(`quadriga.workers.ActorRolloutRefWorker`) inherits them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

from quadriga.engines import kind_of
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quadriga.config.schema import ActorRolloutRefConfig
    from quadriga.engines.base import TrainEngine
    from quadriga.rollout.base import RolloutEngine
    from quadriga.weight_sync.remote import (
        JoinedReceiver,
        JoinedSender,
        Ticket,
        WeightReceiver,
        WeightSender,
    )
    from quadriga.weight_sync.sync import WeightNeeds, WeightSync


class PolicyWeights(Worker):
    """A worker whose actor, rollout or both take part in weight syncs."""

    config: ActorRolloutRefConfig
    device: str

    def __init__(self) -> None:
        super().__init__()
        self.weight_version = 0
        self._steps_of_version = 0  # optimizer steps of the actor before the last sync

    def _engine(self, use: Literal["actor", "ref"]) -> TrainEngine:
        """Return a training engine. Raises `WorkerError` if the worker has none."""
        raise NotImplementedError

    def _rollout(self) -> RolloutEngine:
        """Return the rollout engine. Raises `WorkerError` if the worker has none."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> int:
        """Copy the actor's weights to the rollout engine. Return the new weight version.

        Raises:
            WorkerError: digests differ after the copy; the message names the tensors.
        """
        self._count_version()
        return self._sync_here()

    def _sync_here(self) -> int:
        """Copy the weights of this version to the rollout engine of this process."""
        self._sync.run(self.weight_version)
        return self.weight_version

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def actor_weight_version(self) -> int:
        """Return the version that the rollout must hold to sample from the actor's weights.

        After an optimizer step it is that of the next sync, which no rollout holds yet.
        """
        return self.weight_version + int(self._trained_since_sync())

    def _trained_since_sync(self) -> bool:
        return self._engine("actor").optimizer_steps != self._steps_of_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, needs: WeightNeeds) -> Iterator[DataProto]:
        """Yield this rank's part of the actor's weights in buckets, for a rollout in other
        processes, which has these needs. The weight version rises."""
        self._count_version()
        yield from self._sender.send(needs, self.weight_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_needs(self) -> WeightNeeds:
        """Return what `send_weights` must know of the rollout engine."""
        from quadriga.weight_sync.sync import needs_of

        return needs_of(self._rollout())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, parts: list[DataProto]) -> None:
        """Copy one round of `send_weights`, a bucket of each rank of the actor, to the rollout.

        Raises:
            WorkerError: a bucket was sent twice, or one is lost.
        """
        self._receiver.receive(parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(self, needs: list[WeightNeeds]) -> Ticket | None:
        """Return on rank 0 where the ranks of the rollout, one for each of `needs`, join those of
        the actor in a process group. The weight version rises."""
        self._count_version()
        return self._joined_sender.offer(needs, self.weight_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights_over(self, ticket: Ticket) -> None:
        """Send this rank's part of the actor's weights over the joined group.

        Waits for: `receive_weights_over` on every rank of the rollout.
        """
        self._joined_sender.send(ticket)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights_over(self, ticket: Ticket) -> int:
        """Copy the weights of `send_weights_over` to the rollout engine. Return their version.

        Raises:
            WorkerError: weights were not received, or differ; the message names them.
        """
        self.weight_version = self._joined_receiver.receive(ticket)
        return self.weight_version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_weights(self) -> int:
        """Compare the digests of all weights that were received. Return their version.

        Raises:
            WorkerError: weights were not received, or differ; the message names them.
        """
        self.weight_version = self._receiver.finish()
        return self.weight_version

    def _count_version(self) -> None:
        self.weight_version += 1
        self._steps_of_version = self._engine("actor").optimizer_steps

    @property
    def _bucket_bytes(self) -> int:
        return self.config.rollout.weight_bucket_mb << 20

    def _keeps_weights_in_place(self) -> bool:
        """Return whether the rollout may use the tensors of the actor, which then must not be moved
        to host memory between calls."""
        rollout, engine = self.config.rollout, self.config.actor.engine
        if not kind_of(engine).stores_checkpoint_weights:
            return False
        return rollout.share_weights and not (rollout.take_turns or engine.param_offload)

    @cached_property
    def _sync(self) -> WeightSync:
        from quadriga.weight_sync.sync import WeightSync

        return WeightSync(
            self._engine("actor"),
            self._rollout(),
            bucket_bytes=self._bucket_bytes,
            device=self.device,
            in_place=self._keeps_weights_in_place(),
        )

    @cached_property
    def _sender(self) -> WeightSender:
        from quadriga.weight_sync.remote import WeightSender

        return WeightSender(self._engine("actor"), self._bucket_bytes)

    @cached_property
    def _receiver(self) -> WeightReceiver:
        from quadriga.weight_sync.remote import WeightReceiver

        return WeightReceiver(self._rollout())

    @cached_property
    def _joined_sender(self) -> JoinedSender:
        from quadriga.weight_sync.remote import JoinedSender

        return JoinedSender(
            self._engine("actor"), bucket_bytes=self._bucket_bytes, device=self.device
        )

    @cached_property
    def _joined_receiver(self) -> JoinedReceiver:
        from quadriga.weight_sync.remote import JoinedReceiver

        return JoinedReceiver(self._rollout(), device=self.device)
