"""The weight syncs of the policy's worker: to the rollout of its process, and to other processes.

consumes      the shards of the training engine, one weight at a time (all ranks take part)
produces      the rollout engine's weights under a new version
checks        the digest of each weight of the training engine against what the rollout holds

`rollout.base.tensor_digest` is a sum over elements, so the digests of boxes that together are a
weight add up to the digest of the weight, whichever ranks hold them. The sender's digest is
computed from its own shards and not from what was sent, so a box that was lost, doubled or put into
another place changes the result.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist

from quadriga.config.schema import ActorRolloutRefConfig
from quadriga.engines import kind_of
from quadriga.engines.base import TrainEngine
from quadriga.parallel.distributed import gather_over_ranks, local_device, rank, world_size
from quadriga.protocol import DataProto
from quadriga.rollout.base import RolloutEngine, UpdateForm
from quadriga.rollout.guard import guarded
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.weight_sync import remote
from quadriga.weight_sync.plan import Plan
from quadriga.weight_sync.transport import (
    Source,
    Transport,
    WeightNeeds,
    needs_of,
    plan_to,
    signed,
    trained_scores,
)


class WeightSync:
    """Copies the weights of a training engine to the rollout engine of the same process.

    All ranks of a worker group have one, and run it together. The layout of the training engine and
    the plan are made at the first sync.

    Args:
        bucket_bytes: the memory for weights in flight, on each rank.
        device: of the weights that are put together for the rollout engine.
        in_place: the training engine keeps its tensors where they are, so a rollout engine that can
            uses them themselves if each rank has whole ones.
    """

    def __init__(
        self,
        source: TrainEngine,
        target: RolloutEngine,
        *,
        bucket_bytes: int = 256 << 20,
        device: str | torch.device = "cpu",
        in_place: bool = False,
    ) -> None:
        self._source, self._target = Source(source), guarded(target)
        self._bucket_bytes, self._in_place = bucket_bytes, in_place
        self._device = local_device(device)
        self._plan: Plan | None = None

    def run(self, version: int) -> Mapping[str, int]:
        """Copy every weight, then compare digests, and scores of probe tokens if the rollout engine
        does not expose its weights. Return `GuardedRollout.moved`, the bytes by path.

        If the target holds a weight in another dtype, the weight is rounded to that dtype before
        its digest is taken and before it is sent.

        Raises:
            WorkerError: weights were not received, or have other values. Names them. Attributes:
                `tensor` (the first one), `tensors`, `version`.
        """
        needs = needs_of(self._target)
        weights = self._source.weights(needs)
        boxes = dict(self._target.weight_boxes())
        held = dict(enumerate(gather_over_ranks(boxes)))
        current = self._plan = plan_to(held, weights, self._plan)
        self._target.begin_sync(version)
        self._target.moved.clear()
        group = dist.group.WORLD if current.link_bytes else None
        form: UpdateForm = "parts" if boxes else "whole"
        # Without transfers between ranks, what is received are the tensors of the source.
        if self._in_place and self._target.engine.shares_weights and not current.link_bytes:
            form = "shared"
        with self._source.reader(needs, weights) as reader:
            transport = Transport(current, rank(), reader, group, self._device, self._target.moved)
            received = weights.with_tied(transport.run(self._bucket_bytes))
            self._target.update_weights(received, version, form)
        if form == "shared":
            self._target.moved["in_place"] = self._target.moved.pop("local", 0)
        sent = weights.digests(self._sum_over_ranks(reader.shares))
        scores = trained_scores(self._source.engine, needs.probe, version)
        self._target.end_sync(sent, scores)
        return dict(self._target.moved)

    def _sum_over_ranks(self, shares: Mapping[str, int]) -> dict[str, int]:
        """Return the sums over ranks, which wrap around as the digest does, in one collective."""
        totals = torch.tensor([signed(share) for share in shares.values()], device=self._device)
        if world_size() > 1:
            dist.all_reduce(totals)
        return dict(zip(shares, totals.tolist(), strict=True))


class PolicyWeights(Worker):
    """A worker whose actor, rollout or both take part in weight syncs.

    Each way of syncing is a method that the controller calls, or a pair of them.
    """

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
        return needs_of(self._rollout())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self, parts: list[DataProto]) -> None:
        """Copy one round of `send_weights`, a bucket of each rank of the actor, to the rollout.

        Raises:
            WorkerError: a bucket was sent twice, or one is lost.
        """
        self._receiver.receive(parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offer_weights(self, needs: list[WeightNeeds]) -> remote.Ticket | None:
        """Return on rank 0 where the ranks of the rollout, one for each of `needs`, join those of
        the actor in a process group. The weight version rises."""
        self._count_version()
        return self._joined_sender.offer(needs, self.weight_version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights_over(self, ticket: remote.Ticket) -> None:
        """Send this rank's part of the actor's weights over the joined group.

        Waits for: `receive_weights_over` on every rank of the rollout.
        """
        self._joined_sender.send(ticket)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights_over(self, ticket: remote.Ticket) -> int:
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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_bytes(self) -> dict[str, float]:
        """Return the bytes that the last weight sync moved to this rank's rollout, as metrics."""
        moved = guarded(self._rollout()).moved
        return {f"weight_sync/bytes_{path}": count for path, count in moved.items()}

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
        return WeightSync(
            self._engine("actor"),
            self._rollout(),
            bucket_bytes=self._bucket_bytes,
            device=self.device,
            in_place=self._keeps_weights_in_place(),
        )

    @cached_property
    def _sender(self) -> remote.WeightSender:
        return remote.WeightSender(self._engine("actor"), self._bucket_bytes)

    @cached_property
    def _receiver(self) -> remote.WeightReceiver:
        return remote.WeightReceiver(self._rollout())

    @cached_property
    def _joined_sender(self) -> remote.JoinedSender:
        return remote.JoinedSender(
            self._engine("actor"), bucket_bytes=self._bucket_bytes, device=self.device
        )

    @cached_property
    def _joined_receiver(self) -> remote.JoinedReceiver:
        return remote.JoinedReceiver(self._rollout(), device=self.device)
