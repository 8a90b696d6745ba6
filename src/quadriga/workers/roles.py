"""What the worker group of each role offers to the controller, as typed protocols.

A `WorkerGroup` gets its methods from the worker class at run time, so neither an editor nor mypy
can see them. The trainer therefore declares its groups with the protocols below:

    actor: ActorGroup
    actor.update_actor(batch)                # DataProto: the joined result of all ranks
    actor.update_actor.submit(batch)         # DataProtoFuture: does not wait
    actor.update_actor.options(timeout=60)   # the same method with a deadline of 60 s

Each member names the worker method that the ranks run. The last block of this file makes mypy
compare every member with that method, so that a method with another signature is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from quadriga.checkpoint.files import SavedFile
    from quadriga.protocol import DataProtoFuture
    from quadriga.weight_sync.remote import Ticket
    from quadriga.weight_sync.transport import WeightNeeds

ArgumentsP = ParamSpec("ArgumentsP")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)
WorkerT = TypeVar("WorkerT")


class GroupMethod(Protocol[ArgumentsP, ResultT_co]):
    """A method of a worker group: one call runs a worker method on the ranks.

    The dispatch mode of the method says how arguments are split and results are joined. Methods
    that take a batch return one joined batch; methods with mode ONE_TO_ALL return a list with one
    result per rank.
    """

    def __call__(self, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> ResultT_co:
        """Run the method on the ranks and wait for the result.

        Raises:
            WorkerMethodError: the method raised on a rank.
            WorkerDiedError: the process of a rank ended.
            CallTimeoutError: the deadline is exceeded.
            LengthError: the rows do not divide among the ranks.
            DispatchError: an argument cannot be split or sent.
        """

    def submit(self, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs) -> DataProtoFuture:
        """Start the call and return a future of its result without waiting."""

    def options(self, timeout: float | None = None) -> GroupMethod[ArgumentsP, ResultT_co]:
        """Return the same method with a deadline of `timeout` seconds per call."""


class GeneratingGroup(Protocol):
    """What a stage that generates needs of the rollout: a worker group has it."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def generate_sequences(self) -> Callable[[DataProto], DataProto]:
        """Sample one response per row."""


class RoleGroup(Protocol):
    """What the group of every role offers."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def init_model(self) -> GroupMethod[[], list[None]]:
        """Load the model on every rank: `ActorRolloutRefWorker.init_model`,
        `CriticWorker.init_model`."""


class TrainedGroup(RoleGroup, Protocol):
    """A group whose model is trained and saved."""

    @property
    def save_checkpoint(self) -> GroupMethod[[str, int], list[list[SavedFile]]]:
        """Save one shard per rank under a folder, as of a step; returns the files of each rank:
        `ActorRolloutRefWorker.save_checkpoint`, `EngineWorker.save_checkpoint`."""

    @property
    def load_checkpoint(self) -> GroupMethod[[str, int], list[None]]:
        """Load a folder of `save_checkpoint` that was saved at a step:
        `ActorRolloutRefWorker.load_checkpoint`, `EngineWorker.load_checkpoint`."""

    @property
    def export_hf(self) -> GroupMethod[[str], list[None]]:
        """Write a Hugging Face folder: `ActorRolloutRefWorker.export_hf`,
        `EngineWorker.export_hf`."""


class RolloutGroup(RoleGroup, Protocol):
    """The policy as it generates responses."""

    @property
    def generate_sequences(self) -> GroupMethod[[DataProto], DataProto]:
        """Sample one response per row: `ActorRolloutRefWorker.generate_sequences`."""


class ActorGroup(TrainedGroup, Protocol):
    """The policy as it is trained."""

    @property
    def compute_log_prob(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `old_log_probs` and `entropys`: `ActorRolloutRefWorker.compute_log_prob`."""

    @property
    def update_actor(self) -> GroupMethod[[DataProto], DataProto]:
        """Run the optimizer steps of one batch: `ActorRolloutRefWorker.update_actor`."""

    @property
    def sync_weights(self) -> GroupMethod[[], list[int]]:
        """Copy the actor's weights to the rollout engine: `ActorRolloutRefWorker.sync_weights`."""

    @property
    def actor_weight_version(self) -> GroupMethod[[], int]:
        """The version of the weights: `ActorRolloutRefWorker.actor_weight_version`."""


class StreamMethod(Protocol[ArgumentsP, ResultT_co]):
    """A generator method of a worker group. Item i of the stream joins item i of every rank."""

    def stream(
        self, *args: ArgumentsP.args, **kwargs: ArgumentsP.kwargs
    ) -> Generator[ResultT_co, None, None]:
        """Run the generators on the ranks; each is at most one item ahead of the iterator.

        Raises:
            WorkerError: as a call of a method.
        """


class SendingGroup(Protocol):
    """The actor, for a rollout in other processes."""

    @property
    def send_weights(self) -> StreamMethod[[WeightNeeds], list[DataProto]]:
        """Yield the weights in rounds; an item has one bucket per rank:
        `ActorRolloutRefWorker.send_weights`."""

    @property
    def offer_weights(self) -> GroupMethod[[list[WeightNeeds]], list[Ticket | None]]:
        """Return where both groups join, on rank 0: `ActorRolloutRefWorker.offer_weights`."""

    @property
    def send_weights_over(self) -> GroupMethod[[Ticket], list[None]]:
        """Send all weights over the joined group: `ActorRolloutRefWorker.send_weights_over`."""


class ReceivingGroup(Protocol):
    """A rollout whose weights come from other processes."""

    @property
    def weight_needs(self) -> GroupMethod[[], list[WeightNeeds]]:
        """Return what the sender must know: `ActorRolloutRefWorker.weight_needs`."""

    @property
    def receive_weights(self) -> GroupMethod[[list[DataProto]], list[None]]:
        """Copy one round to the rollout engines: `ActorRolloutRefWorker.receive_weights`."""

    @property
    def receive_weights_over(self) -> GroupMethod[[Ticket], list[int]]:
        """Receive all weights over the joined group, and compare them:
        `ActorRolloutRefWorker.receive_weights_over`."""

    @property
    def finish_weights(self) -> GroupMethod[[], list[int]]:
        """Compare digests; return the weight version of each rank:
        `ActorRolloutRefWorker.finish_weights`."""


class StagingGroup(ReceivingGroup, Protocol):
    """A rollout whose weights come while it generates."""

    @property
    def stage_weights(self) -> GroupMethod[[list[DataProto]], list[None]]:
        """Copy one round beside the rollout engine: `InFlightWorker.stage_weights`."""


class TurnTakingGroup(RoleGroup, Protocol):
    """A policy whose rollout and training engines take turns in device memory."""

    @property
    def rollout_mode(self) -> GroupMethod[[], list[dict[str, float]]]:
        """Free device memory for generation: `ActorRolloutRefWorker.rollout_mode`."""

    @property
    def trainer_mode(self) -> GroupMethod[[], list[dict[str, float]]]:
        """Free device memory for training: `ActorRolloutRefWorker.trainer_mode`."""


class RefGroup(RoleGroup, Protocol):
    """The frozen reference policy."""

    @property
    def compute_ref_log_prob(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `ref_log_prob`: `ActorRolloutRefWorker.compute_ref_log_prob`."""


class CriticGroup(TrainedGroup, Protocol):
    """The value model."""

    @property
    def compute_values(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `values`: `CriticWorker.compute_values`."""

    @property
    def update_critic(self) -> GroupMethod[[DataProto], DataProto]:
        """Run the optimizer steps of one batch: `CriticWorker.update_critic`."""


class RewardModelGroup(RoleGroup, Protocol):
    """The reward model."""

    @property
    def compute_rm_score(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `rm_scores`: `RewardModelWorker.compute_rm_score`."""


class PairTrainingGroup(TrainedGroup, Protocol):
    """The reward model as it is trained on pairs of responses."""

    @property
    def update_rm(self) -> GroupMethod[[DataProto], DataProto]:
        """Run one optimizer step on one batch of pairs: `PairTrainingWorker.update_rm`."""

    @property
    def compute_pair_scores(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `rm_scores` of pairs: `PairTrainingWorker.compute_pair_scores`."""


class SFTGroup(RolloutGroup, ActorGroup, Protocol):
    """The policy as it is trained on given responses."""

    @property
    def compute_sft_log_prob(self) -> GroupMethod[[DataProto], DataProto]:
        """Compute `old_log_probs` of given responses: `SFTWorker.compute_sft_log_prob`."""

    @property
    def update_sft(self) -> GroupMethod[[DataProto], DataProto]:
        """Run one optimizer step on one batch: `SFTWorker.update_sft`."""


def methods_of(roles: Iterable[type]) -> list[str]:
    """Return the names of the worker methods that these protocols ask for, sorted."""
    members = [vars(base).items() for role in roles for base in role.__mro__]
    names = {name for own in members for name, member in own if isinstance(member, property)}
    return sorted(names - {"world_size"})


if TYPE_CHECKING:
    # Nothing of this block exists at run time.
    from quadriga.workers.actor_rollout_ref import (
        ActorRolloutRefWorker,
        InFlightWorker,
        SFTWorker,
    )
    from quadriga.workers.reward_model import PairTrainingWorker, RewardModelWorker
    from quadriga.workers.runtime import CriticWorker

    def joined(
        method: Callable[Concatenate[WorkerT, ArgumentsP], ResultT],
    ) -> GroupMethod[ArgumentsP, ResultT]:
        """The group method of a worker method whose results are joined into one."""

    def per_rank(
        method: Callable[Concatenate[WorkerT, ArgumentsP], ResultT],
    ) -> GroupMethod[ArgumentsP, list[ResultT]]:
        """The group method of a worker method with mode ONE_TO_ALL."""

    def per_rank_stream(
        method: Callable[Concatenate[WorkerT, ArgumentsP], Iterator[ResultT]],
    ) -> StreamMethod[ArgumentsP, list[ResultT]]:
        """The group method of a generator with mode ONE_TO_ALL."""

    class _OfPolicy:
        world_size = 1
        init_model = per_rank(ActorRolloutRefWorker.init_model)
        generate_sequences = joined(ActorRolloutRefWorker.generate_sequences)
        compute_log_prob = joined(ActorRolloutRefWorker.compute_log_prob)
        compute_ref_log_prob = joined(ActorRolloutRefWorker.compute_ref_log_prob)
        update_actor = joined(ActorRolloutRefWorker.update_actor)
        sync_weights = per_rank(ActorRolloutRefWorker.sync_weights)
        actor_weight_version = joined(ActorRolloutRefWorker.actor_weight_version)
        save_checkpoint = per_rank(ActorRolloutRefWorker.save_checkpoint)
        load_checkpoint = per_rank(ActorRolloutRefWorker.load_checkpoint)
        export_hf = per_rank(ActorRolloutRefWorker.export_hf)
        send_weights = per_rank_stream(ActorRolloutRefWorker.send_weights)
        weight_needs = per_rank(ActorRolloutRefWorker.weight_needs)
        receive_weights = per_rank(ActorRolloutRefWorker.receive_weights)
        stage_weights = per_rank(InFlightWorker.stage_weights)
        offer_weights = per_rank(ActorRolloutRefWorker.offer_weights)
        send_weights_over = per_rank(ActorRolloutRefWorker.send_weights_over)
        receive_weights_over = per_rank(ActorRolloutRefWorker.receive_weights_over)
        finish_weights = per_rank(ActorRolloutRefWorker.finish_weights)
        rollout_mode = per_rank(ActorRolloutRefWorker.rollout_mode)
        trainer_mode = per_rank(ActorRolloutRefWorker.trainer_mode)
        update_sft = joined(SFTWorker.update_sft)
        compute_sft_log_prob = joined(SFTWorker.compute_sft_log_prob)

    class _OfEngine:  # mypy compares overridden methods with those of the base class
        world_size = 1
        init_model = per_rank(CriticWorker.init_model)
        save_checkpoint = per_rank(CriticWorker.save_checkpoint)
        load_checkpoint = per_rank(CriticWorker.load_checkpoint)
        export_hf = per_rank(CriticWorker.export_hf)
        compute_values = joined(CriticWorker.compute_values)
        update_critic = joined(CriticWorker.update_critic)
        compute_rm_score = joined(RewardModelWorker.compute_rm_score)
        update_rm = joined(PairTrainingWorker.update_rm)
        compute_pair_scores = joined(PairTrainingWorker.compute_pair_scores)

    _actor: ActorGroup = _OfPolicy()
    _rollout: RolloutGroup = _OfPolicy()
    _turns: TurnTakingGroup = _OfPolicy()
    _ref: RefGroup = _OfPolicy()
    _sender: SendingGroup = _OfPolicy()
    _receiver: StagingGroup = _OfPolicy()
    _critic: CriticGroup = _OfEngine()
    _reward_model: RewardModelGroup = _OfEngine()
    _pair_training: PairTrainingGroup = _OfEngine()
    _sft: SFTGroup = _OfPolicy()
