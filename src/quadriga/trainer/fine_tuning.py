"""Supervised fine-tuning, and the loop that it has in common with reward models.

consumes      batches of rows, in the order of the loader
produces      metrics, samples and checkpoints in the run folder, and the trained model
waits for     each update, since the next one needs its weights

Every `test_freq` steps supervised fine-tuning computes the loss of the validation conversations.
With prompts and answers it also scores greedy responses.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.paths import absolute_paths
from quadriga.config.schema import ActorConfig, ActorRolloutRefConfig, RolloutConfig
from quadriga.data import PromptDataset, PromptLoader, SFTDataset
from quadriga.data.conversations import MARGINS, PairDataset, PairLengths, turn_end_ids
from quadriga.data.loader import BatchDataset, ordered_loader
from quadriga.errors import QuadrigaError
from quadriga.models.folder import end_token_ids
from quadriga.models.limits import LongestSequence
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.single_controller import Backend, ClassWithInitArgs
from quadriga.streams.playing import start_of
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.checks.data import check_fine_tuning_data
from quadriga.trainer.checks.settings import refuse, warmup_problems
from quadriga.trainer.ingredients import check_rows
from quadriga.trainer.preflight import check_fine_tuning_config, check_sizes, profile_problems
from quadriga.trainer.record import RunRecord
from quadriga.trainer.restarts import restarted
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.roles.workers import threads_per_rank
from quadriga.trainer.validation import Validator
from quadriga.trainer.worker_groups import (
    StartedGroups,
    close_on_error,
    load_roles,
    one_pool,
    open_backend,
    start_group,
)
from quadriga.workers import RankRuntime, SFTWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.workers.roles import PairTrainingGroup, SFTGroup

_log = logging.getLogger("quadriga")
ConfigT = TypeVar("ConfigT", SFTConfig, RMConfig)
GroupT = TypeVar("GroupT", bound="SFTGroup | PairTrainingGroup")
Validate = Callable[[], object]
"""Validates and logs it."""


@dataclass(frozen=True)
class FineTuned:
    """The folder of the trained model, the steps that were taken, and the metrics of the last
    validation ({} without validation data)."""

    model_path: str
    steps: int
    validation: dict[str, float]


@dataclass(frozen=True)
class OneGroup(StartedGroups, Generic[GroupT]):
    """The one worker group of a run, as the trainer calls it."""

    policy: GroupT


class OneGroupTrainer(ABC, Generic[ConfigT, GroupT]):
    """Updates the model of one worker group with batch after batch.

    `init_workers` starts the worker group, `fit` runs the loop, `close` stops the group, and `run`
    does all of this.

    Attributes:
        saved_as: the role of the model, which names its folder in a checkpoint.
        step: the number of the current step.
        total_steps: the number of optimizer steps.
    """

    saved_as: Role

    def __init__(
        self,
        given: ConfigT,
        config: ConfigT,
        tokenizer: PreTrainedTokenizerBase,
        rows: BatchDataset[Any],
        callbacks: Iterable[object],
    ) -> None:

        self.given: ConfigT = given
        self.config: ConfigT = config
        self.tokenizer = tokenizer
        trainer, data = config.trainer, config.data
        self.loader = PromptLoader(
            rows, data.train_batch_size, shuffle=data.shuffle, seed=trainer.seed
        )
        self.total_steps = trainer.total_training_steps or len(self.loader) * trainer.total_epochs
        refuse(config, warmup_problems("optim", config.optim, self.total_steps))
        refuse(config, profile_problems(trainer, self.total_steps))
        self.checkpoints = Checkpointing(config, self.loader, given, callbacks)
        self.restarts = self.checkpoints.restarts
        self.step = 0
        self._groups: OneGroup[GroupT] | None = None
        self._session: Backend | None = None  # keeps Ray running while the group is ended

    @abstractmethod
    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """Return the class of the worker."""

    @abstractmethod
    def update(self, policy: GroupT, rows: DataProto) -> DataProto:
        """Update the model with a batch, and return the metrics of the ranks."""

    @abstractmethod
    def validation(self, policy: GroupT, record: RunRecord) -> Validate | None:
        """Return what validates; None without validation data."""

    def init_workers(self) -> OneGroup[GroupT]:
        """Start the ranks, load the model, and return the worker group.

        A group that is started already is returned as it is.

        Raises:
            PlacementError: the nodes cannot hold the ranks. Nothing was started.
            WorkerError: a rank failed while it started.
        """
        if self._groups is None:
            self._groups = self.restarts.placed(self._start, self.config, check_sizes)
            self._session = self._session or open_backend(self.config.trainer)
        return self._groups

    def _start(self, config: ConfigT) -> OneGroup[GroupT]:

        trainer = config.trainer
        threads, steps = threads_per_rank(trainer), self.total_steps
        runtime = RankRuntime(trainer.device, threads, trainer.seed, steps)
        backend = open_backend(trainer)
        with close_on_error(backend) as groups:
            pool = one_pool(trainer, backend)
            group: Any = start_group(backend, pool, self.worker(runtime), groups, trainer)
            group.init_model()
        return OneGroup(backend=backend, groups=groups, policy=group)

    def run(self) -> FineTuned:
        """Run the loop, and stop the worker group.

        Raises:
            KeyboardInterrupt: a signal has stopped the run; its argument is the signal's number.
        """
        try:
            with self.checkpoints.stop.listening():
                return self.fit()
        finally:
            self.close()

    @restarted
    def fit(self) -> FineTuned:
        """Run the loop: update, and where it is due validate and save."""
        policy = self.init_workers().policy
        groups = {self.saved_as.key: policy}
        # Loaded before the run folder is opened: a folder of a run that cannot be continued keeps
        # all that it holds.
        resumed = self.checkpoints.resume(groups)
        self.step = 0 if resumed is None else resumed.state.step
        if resumed is not None:
            load_roles(resumed, groups)
        given = self.config, self.total_steps, self.tokenizer, self.checkpoints.uploads
        make = partial(RunRecord, *given, resumed, self.given, self.checkpoints.callbacks)
        save = partial(self.checkpoints.writer.save, groups=groups)
        with (
            self.restarts.record(make, resumed) as record,
            self.checkpoints.finishing(record, save),
        ):
            validate = self.validation(policy, record)
            for rows in self.schedule():
                with record.span("step"):
                    record.log_update(self.update(policy, rows))
                self.checkpoints.complete = (self.step, {})
                self.checkpoints.end_step(record, validate=validate, save=save, groups=groups)
                self.restarts.completed = self.step
            path = str(record.folder.model)
            policy.export_hf(path)
            return FineTuned(path, self.step, record.last_validation)

    def end_lost(self, error: QuadrigaError) -> str:
        """End the group, after a loss."""
        if self._groups is not None:
            groups, self._groups = self._groups, None
            groups.close()
        return "started again: all ranks"

    def schedule(self) -> Iterator[DataProto]:
        """Yield one batch of rows per step, epoch after epoch, and count `step`. Within a step the
        first signal lets the step end."""
        callbacks = self.checkpoints.callbacks
        with self.checkpoints.stop.steps():
            while self.step < self.total_steps:
                for rows in self.loader:
                    if callbacks.stopped(self.step):
                        return
                    self.step += 1
                    self.checkpoints.begin_update()
                    with self.init_workers().profiled(self.config.trainer, self.step):
                        yield rows
                    if self.step == self.total_steps:
                        break

    def close(self) -> None:
        """Stop the worker group, if it is started."""
        with ExitStack() as stack:
            if self._session is not None:
                stack.callback(self._session.shutdown)
            if self._groups is not None:
                self._groups.close()
                self._groups = None


def run_sft(config: SFTConfig, callbacks: Iterable[object] = ()) -> FineTuned:
    """Run `quadriga sft`. `callbacks`: of the program, see `observability.callbacks`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    return SFTTrainer(config, callbacks).run()


class SFTTrainer(OneGroupTrainer[SFTConfig, "SFTGroup"]):
    """Minimises the mean of −log p over the response tokens of a batch, over all ranks."""

    saved_as = Role.Actor

    def __init__(self, config: SFTConfig, callbacks: Iterable[object] = ()) -> None:
        from quadriga.rewards import RewardManager
        from quadriga.trainer.checks.memory import RunMemory  # imports torch

        given, config = config, absolute_paths(config)
        rows = load_sft_rows(config)
        tell_other_ends(config.model.path, rows.tokenizer, rows.train.ends)
        self.val_loader, self.val_conversations, evaluated = None, None, None
        if rows.val_prompts is not None:  # as one batch
            self.val_loader = ordered_loader(rows.val_prompts, config.trainer.val_size)
        if rows.val_conversations is not None:
            evaluated, size = rows.val_conversations.lengths, config.data.train_batch_size
            self.val_conversations = ordered_loader(rows.val_conversations, size)
        RunMemory(config, rows.train.lengths, rows.val_prompts, evaluated).check()
        super().__init__(given, config, rows.tokenizer, rows.train, callbacks)
        self.reward_fn = RewardManager.from_settings(
            config.reward, rows.tokenizer, start=start_of(config.reward.spread)
        )
        check_rows(self.reward_fn, self.val_loader, config.data.val_files)

    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """See `OneGroupTrainer`."""

        config, trainer = self.config, self.config.trainer
        settings = ActorRolloutRefConfig(
            model=config.model,
            actor=ActorConfig(
                optim=config.optim,
                engine=config.engine,
                ppo_micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
            ),
            rollout=RolloutConfig(dtype=config.engine.dtype, val_sampling=trainer.val_sampling),
        )
        runtime = replace(runtime, max_response_length=trainer.max_response_length)
        # A rollout would hold a second copy of the weights.
        role = Role.Actor if self.val_loader is None else Role.ActorRollout
        return ClassWithInitArgs(SFTWorker, config=settings, role=role.key, runtime=runtime)

    def update(self, policy: SFTGroup, rows: DataProto) -> DataProto:
        """See `OneGroupTrainer`."""
        return policy.update_sft(rows)

    def validation(self, policy: SFTGroup, record: RunRecord) -> Validate | None:
        """Return what logs the loss of the validation conversations, and scores of responses to
        the prompts."""
        seed, prompts = self.config.trainer.seed, self.val_loader
        conversations = self.val_conversations
        validator = Validator(seed, prompts, policy, self.reward_fn, record)
        if prompts is None and conversations is None:
            return None
        for loader in filter(None, (prompts, conversations)):
            loader.rewind()  # a loss may have ended a validation in its middle

        def validate() -> None:
            if prompts is not None:
                with record.span("sync_weights"):
                    policy.sync_weights()
            if conversations is not None:
                with record.span("evaluate"):
                    record.add({"val/loss": validation_loss(policy, conversations)})
            validator.run(step=self.step, due=True)

        return validate

    def close(self) -> None:
        """Stop the worker group and the reward processes, if they are started."""
        with closing(self.reward_fn):
            super().close()


@dataclass(frozen=True)
class SFTRows:
    """The rows of a run. Without files, there are no prompts or conversations of a validation."""

    tokenizer: PreTrainedTokenizerBase
    train: SFTDataset
    val_prompts: PromptDataset | None
    val_conversations: SFTDataset | None


def load_sft_rows(config: SFTConfig) -> SFTRows:
    """Load the tokenizer and all rows, and check them against the model.

    Raises:
        InputError: a file, a row or the model does not fit.
    """
    from quadriga.models.loading import tokenizer_of

    data, tokenizer = config.data, tokenizer_of(config.model)
    train = SFTDataset.from_settings(data.train_files, tokenizer, data)
    evaluated, prompts = None, None
    if data.val_files and data.val_loss:
        evaluated = SFTDataset.from_settings(data.val_files, tokenizer, data)
        evaluated = evaluated.head(config.trainer.val_size)
    if data.val_files and data.messages_key is None:
        prompts = PromptDataset.from_settings(
            data.val_files, tokenizer, data, max_prompt_length=data.max_length, image_key=None
        ).head(config.trainer.val_size)
    datasets = [train, evaluated] if evaluated else [train]
    size = max(sum(rows.longest) for rows in datasets)
    longest = LongestSequence(
        size,
        f"the longest conversation has {size} tokens",
        "lower data.max_length, beyond which rows are left out,",
    )
    check_fine_tuning_data(config, tokenizer, longest, datasets, prompts)
    return SFTRows(tokenizer, train, prompts, evaluated)


def validation_loss(policy: SFTGroup, loader: PromptLoader) -> float:
    """Return the mean of −log p over the tokens of the assistant, nats per token."""
    total, count = 0.0, 0
    for batch in loader:
        # The ranks take equal parts. Rows that are added to that end do not count.
        rows, added = pad_dataproto_to_divisor(batch, policy.world_size)
        found = unpad_dataproto(policy.compute_sft_log_prob(rows), added)
        mask = batch.batch[fields.RESPONSE_MASK]
        total -= float((found.batch[fields.OLD_LOG_PROBS].double() * mask).sum())
        count += int(mask.sum())
    return total / count


def tell_other_ends(
    model_path: str, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> None:
    """Log a warning if conversations end with a token that does not end generation.

    The arguments of the chat template can change the token with which it ends a turn.
    """
    other = set(ends) - {*end_token_ids(model_path, tokenizer), *turn_end_ids(tokenizer)}
    if other:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(other))))
        _log.warning(
            "the chat template ends a turn of the assistant with %s, which does not end generation "
            "of a response; add its id (%s) to trainer.val_sampling.stop_token_ids here, and to "
            "eos_token_id in generation_config.json of the trained model",
            names,
            ", ".join(map(str, sorted(other))),
        )


# Training of a reward model on pairs of responses.


def run_rm(config: RMConfig, callbacks: Iterable[object] = ()) -> FineTuned:
    """Run `quadriga rm`. `callbacks`: of the program, see `observability.callbacks`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    return RMTrainer(config, callbacks).run()


class RMTrainer(OneGroupTrainer[RMConfig, "PairTrainingGroup"]):
    """Minimises the mean of −log σ(s_chosen − s_rejected − margin) over the pairs of a batch."""

    saved_as = Role.RewardModel

    def __init__(self, config: RMConfig, callbacks: Iterable[object] = ()) -> None:
        from quadriga.trainer.checks.memory import RunMemory  # imports torch

        given, config = config, absolute_paths(config)
        pairs = load_pairs(config)
        self.val_pairs = pairs.val
        RunMemory(config, pairs.lengths).check()
        super().__init__(given, config, pairs.tokenizer, pairs.train, callbacks)

    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """See `OneGroupTrainer`."""
        from quadriga.workers import PairTrainingWorker

        return ClassWithInitArgs(PairTrainingWorker, config=self.config, runtime=runtime)

    def update(self, policy: PairTrainingGroup, rows: DataProto) -> DataProto:
        """See `OneGroupTrainer`."""
        return policy.update_rm(rows)

    def validation(self, policy: PairTrainingGroup, record: RunRecord) -> Validate | None:
        """Return what logs `val/loss` and `val/accuracy` over the validation pairs."""
        pairs = self.val_pairs
        if pairs is None:
            return None

        def validate() -> None:
            with record.span("validate"):
                metrics = validate_pairs(policy, pairs, self.config.data.train_batch_size)
            record.log_validation(self.step, metrics)

        return validate


def validate_pairs(policy: PairTrainingGroup, pairs: PairDataset, size: int) -> dict[str, float]:
    """Return the loss of pairs, and the share whose chosen response has the higher score."""
    from quadriga.algorithms.value_loss import pairwise_loss

    losses: list[float] = []
    right = 0
    for batch in ordered_loader(pairs, size):
        # The ranks take equal parts. Rows that are added to that end do not count.
        rows, added = pad_dataproto_to_divisor(batch, policy.world_size)
        scores_B = unpad_dataproto(policy.compute_pair_scores(rows), added)
        chosen_P, rejected_P = scores_B.batch[fields.RM_SCORES].sum(-1).view(-1, 2).unbind(-1)
        losses += pairwise_loss(chosen_P, rejected_P, batch.batch[MARGINS][0::2]).loss_P.tolist()
        right += int((chosen_P > rejected_P).sum())
    return {"val/loss": sum(losses) / len(losses), "val/accuracy": right / len(losses)}


@dataclass(frozen=True)
class Pairs:
    """The tokenizer and the pairs of a run. `val` is None without files for validation."""

    tokenizer: PreTrainedTokenizerBase
    train: PairDataset
    val: PairDataset | None

    @property
    def lengths(self) -> PairLengths:
        """Bounds of the tokens of all pairs."""
        both = [data.lengths for data in (self.train, self.val) if data is not None]
        return PairLengths(max(one.longest for one in both), max(one.own for one in both))


def load_pairs(config: RMConfig) -> Pairs:
    """Load the tokenizer and all pairs, and check them against the model.

    Raises:
        InputError: a file, a row or the model does not fit.
    """
    from quadriga.models.loading import padding_token, tokenizer_of

    model, data = config.model, config.data
    tokenizer, padding = tokenizer_of(model), padding_token(model)
    train, val = (
        PairDataset.from_settings(files, tokenizer, data, pad_token_id=padding) if files else None
        for files in (data.train_files, data.val_files)
    )
    assert train is not None
    found = Pairs(tokenizer, train, val)
    longest = LongestSequence(
        found.lengths.longest + 1,
        f"the longest conversation has {found.lengths.longest} tokens, and one is added",
        "lower data.max_length, beyond which pairs are left out,",
    )
    check_fine_tuning_data(config, tokenizer, longest, [train] if val is None else [train, val])
    return found
