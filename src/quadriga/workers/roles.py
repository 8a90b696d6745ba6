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
from inspect import get_annotations
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
    """What the group of every role offers.

    Attributes:
        init_model: load the model on every rank: `ActorRolloutRefWorker.init_model`,
            `CriticWorker.init_model`.
    """

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    init_model: GroupMethod[[], list[None]]


class TrainedGroup(RoleGroup, Protocol):
    """A group whose model is trained and saved.

    Attributes:
        save_checkpoint: save one shard per rank under a folder, as of a step; returns the files of
            each rank: `ActorRolloutRefWorker.save_checkpoint`, `EngineWorker.save_checkpoint`.
        load_checkpoint: load a folder of `save_checkpoint` that was saved at a step:
            `ActorRolloutRefWorker.load_checkpoint`, `EngineWorker.load_checkpoint`.
        export_hf: write a Hugging Face folder: `ActorRolloutRefWorker.export_hf`,
            `EngineWorker.export_hf`.
    """

    save_checkpoint: GroupMethod[[str, int], list[list[SavedFile]]]
    load_checkpoint: GroupMethod[[str, int], list[None]]
    export_hf: GroupMethod[[str], list[None]]


class RolloutGroup(RoleGroup, Protocol):
    """The policy as it generates responses.

    Attributes:
        generate_sequences: sample one response per row: `ActorRolloutRefWorker.generate_sequences`.
    """

    generate_sequences: GroupMethod[[DataProto], DataProto]


class ActorGroup(TrainedGroup, Protocol):
    """The policy as it is trained.

    Attributes:
        compute_log_prob: compute `old_log_probs` and `entropys`:
            `ActorRolloutRefWorker.compute_log_prob`.
        update_actor: run the optimizer steps of one batch: `ActorRolloutRefWorker.update_actor`.
        sync_weights: copy the actor's weights to the rollout engine:
            `ActorRolloutRefWorker.sync_weights`.
        actor_weight_version: the version of the weights:
            `ActorRolloutRefWorker.actor_weight_version`.
    """

    compute_log_prob: GroupMethod[[DataProto], DataProto]
    update_actor: GroupMethod[[DataProto], DataProto]
    sync_weights: GroupMethod[[], list[int]]
    actor_weight_version: GroupMethod[[], int]


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
    """The actor, for a rollout in other processes.

    Attributes:
        send_weights: yield the weights in rounds; an item has one bucket per rank:
            `ActorRolloutRefWorker.send_weights`.
        offer_weights: return where both groups join, on rank 0:
            `ActorRolloutRefWorker.offer_weights`.
        send_weights_over: send all weights over the joined group:
            `ActorRolloutRefWorker.send_weights_over`.
    """

    send_weights: StreamMethod[[WeightNeeds], list[DataProto]]
    offer_weights: GroupMethod[[list[WeightNeeds]], list[Ticket | None]]
    send_weights_over: GroupMethod[[Ticket], list[None]]


class ReceivingGroup(Protocol):
    """A rollout whose weights come from other processes.

    Attributes:
        weight_needs: return what the sender must know: `ActorRolloutRefWorker.weight_needs`.
        receive_weights: copy one round to the rollout engines:
            `ActorRolloutRefWorker.receive_weights`.
        receive_weights_over: receive all weights over the joined group, and compare them:
            `ActorRolloutRefWorker.receive_weights_over`.
        finish_weights: compare digests; return the weight version of each rank:
            `ActorRolloutRefWorker.finish_weights`.
    """

    weight_needs: GroupMethod[[], list[WeightNeeds]]
    receive_weights: GroupMethod[[list[DataProto]], list[None]]
    receive_weights_over: GroupMethod[[Ticket], list[int]]
    finish_weights: GroupMethod[[], list[int]]


class StagingGroup(ReceivingGroup, Protocol):
    """A rollout whose weights come while it generates.

    Attributes:
        stage_weights: copy one round beside the rollout engine: `InFlightWorker.stage_weights`.
    """

    stage_weights: GroupMethod[[list[DataProto]], list[None]]


class TurnTakingGroup(RoleGroup, Protocol):
    """A policy whose rollout and training engines take turns in device memory.

    Attributes:
        rollout_mode: free device memory for generation: `ActorRolloutRefWorker.rollout_mode`.
        trainer_mode: free device memory for training: `ActorRolloutRefWorker.trainer_mode`.
    """

    rollout_mode: GroupMethod[[], list[dict[str, float]]]
    trainer_mode: GroupMethod[[], list[dict[str, float]]]


class RefGroup(RoleGroup, Protocol):
    """The frozen reference policy.

    Attributes:
        compute_ref_log_prob: compute `ref_log_prob`: `ActorRolloutRefWorker.compute_ref_log_prob`.
    """

    compute_ref_log_prob: GroupMethod[[DataProto], DataProto]


class CriticGroup(TrainedGroup, Protocol):
    """The value model.

    Attributes:
        compute_values: compute `values`: `CriticWorker.compute_values`.
        update_critic: run the optimizer steps of one batch: `CriticWorker.update_critic`.
    """

    compute_values: GroupMethod[[DataProto], DataProto]
    update_critic: GroupMethod[[DataProto], DataProto]


class RewardModelGroup(RoleGroup, Protocol):
    """The reward model.

    Attributes:
        compute_rm_score: compute `rm_scores`: `RewardModelWorker.compute_rm_score`.
    """

    compute_rm_score: GroupMethod[[DataProto], DataProto]


class PairTrainingGroup(TrainedGroup, Protocol):
    """The reward model as it is trained on pairs of responses.

    Attributes:
        update_rm: run one optimizer step on one batch of pairs: `PairTrainingWorker.update_rm`.
        compute_pair_scores: compute `rm_scores` of pairs: `PairTrainingWorker.compute_pair_scores`.
    """

    update_rm: GroupMethod[[DataProto], DataProto]
    compute_pair_scores: GroupMethod[[DataProto], DataProto]


class SFTGroup(RolloutGroup, ActorGroup, Protocol):
    """The policy as it is trained on given responses.

    Attributes:
        compute_sft_log_prob: compute `old_log_probs` of given responses:
            `SFTWorker.compute_sft_log_prob`.
        update_sft: run one optimizer step on one batch: `SFTWorker.update_sft`.
    """

    compute_sft_log_prob: GroupMethod[[DataProto], DataProto]
    update_sft: GroupMethod[[DataProto], DataProto]


def methods_of(roles: Iterable[type]) -> list[str]:
    """Return the names of the worker methods that these protocols ask for, sorted."""
    bases = {base for role in roles for base in role.__mro__}
    return sorted({name for base in bases for name in get_annotations(base)})


if TYPE_CHECKING:
    # Nothing of this block exists at run time.
    from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker, InFlightWorker, SFTWorker
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

    class _OfPolicy(SFTGroup, TurnTakingGroup, RefGroup, SendingGroup, StagingGroup):
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

    # mypy compares overridden methods with those of the base class
    class _OfEngine(CriticGroup, RewardModelGroup, PairTrainingGroup):
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

    _OfPolicy(), _OfEngine()  # an error if a member is missing
