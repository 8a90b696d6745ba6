"""Supervised fine-tuning, with the same workers as reinforcement learning.

consumes      batches of prompts with given responses, in the order of the loader
produces      metrics, samples and checkpoints in the run folder, and the trained model
waits for     each update, since the next one needs its weights

Every `test_freq` steps the loop computes the loss of the validation conversations. With prompts and
answers it also scores greedy responses, and stops as soon as the accuracy reaches
`stop_at_accuracy`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quadriga.config.commands import SFTConfig, SFTDataConfig
from quadriga.config.paths import absolute_paths
from quadriga.config.schema import ActorConfig, ActorRolloutRefConfig, DataConfig, RolloutConfig
from quadriga.data.conversations import turn_end_ids
from quadriga.models.folder import end_token_ids, with_absolute_paths
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.checks.sequence_checks import check_sft_data
from quadriga.trainer.checks.settings import check_warmup
from quadriga.trainer.dataflow import check_dataflow, sft_dataflow
from quadriga.trainer.fine_tuning.one_group import (
    is_due,
    start_one_group,
    steps_of,
    total_steps_of,
)
from quadriga.trainer.ingredients import check_rows, make_reward, prompt_dataset
from quadriga.trainer.preflight import check_fine_tuning_config
from quadriga.trainer.record import RunRecord
from quadriga.trainer.role_workers import threads_per_rank
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.validation import Validator
from quadriga.trainer.worker_groups import StartedGroups, save_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import PromptDataset, PromptLoader, SFTDataset, SFTLoader
    from quadriga.workers.roles import SFTGroup

_log = logging.getLogger(__name__)

_KEY = Role.Actor.key
"""Folder of the policy in a checkpoint."""


@dataclass(frozen=True)
class SFTResult:
    """The folder of the trained model, the steps that were taken, and the accuracy of the last
    validation (None without validation data, or if scores are not 0 or 1)."""

    model_path: str
    steps: int
    accuracy: float | None


@dataclass(frozen=True)
class SFTGroups(StartedGroups):
    """The one worker group of a run, as the trainer calls it."""

    policy: SFTGroup


def run_sft(config: SFTConfig) -> SFTResult:
    """Run `quadriga sft`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    trainer = SFTTrainer(config)
    try:
        with trainer.checkpoints.stop.listening():
            trainer.init_workers()
            return trainer.fit()
    finally:
        trainer.close()


class SFTTrainer:
    """Minimises the mean of −log p over the response tokens of a batch, over all ranks.

    `init_workers` starts the worker group, `fit` runs the loop, `close` stops the group.
    """

    def __init__(self, config: SFTConfig) -> None:
        from quadriga.data import SFTLoader
        from quadriga.trainer.memory.check import sft_memory  # imports torch

        check_dataflow(sft_dataflow())
        self.given, config = config, absolute_paths(config)
        self.config, data = config, config.data
        rows = load_sft_rows(config)
        self.tokenizer, train, self.val_prompts = rows.tokenizer, rows.train, rows.val_prompts
        tell_other_ends(config.model.path, self.tokenizer, train.ends)
        evaluated, self.val_conversations = None, None
        if rows.val_conversations is not None:
            evaluated, size = rows.val_conversations.lengths, data.train_batch_size
            self.val_conversations = SFTLoader(
                rows.val_conversations, size, shuffle=False, drop_last=False
            )
        sft_memory(config, train.lengths, self.val_prompts, evaluated).check()
        self.loader = SFTLoader(
            train,
            data.train_batch_size,
            shuffle=data.shuffle,
            seed=config.trainer.seed,
        )
        check_warmup("optim", config.optim, self.total_steps)
        self.val_loader = _validation_loader(config, self.val_prompts)
        self.reward_fn = make_reward(config.reward, self.tokenizer)
        check_rows(self.reward_fn, self.val_loader, config.data.val_files)
        self.checkpoints = Checkpointing(config, self.loader, self.given)
        self.step = 0
        self._groups: SFTGroups | None = None

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps, unless `stop_at_accuracy` ends the run earlier."""
        return total_steps_of(self.config.trainer, self.loader)

    def init_workers(self) -> SFTGroups:
        """Start the ranks, load the model, and return the worker group.

        A group that is started already is returned as it is.

        Raises:
            PlacementError: the nodes cannot hold the ranks. Nothing was started.
            WorkerError: a rank failed while it started.
        """
        if self._groups is None:
            self._groups = self._start()
        return self._groups

    def _start(self) -> SFTGroups:
        from quadriga.single_controller import ClassWithInitArgs
        from quadriga.workers import RankRuntime, SFTWorker

        trainer = self.config.trainer
        runtime = RankRuntime(
            device=trainer.device,
            threads=threads_per_rank(trainer),
            seed=trainer.seed,
            total_steps=self.total_steps,
            max_response_length=trainer.max_response_length,
        )
        # A rollout would hold a second copy of the weights.
        role = Role.Actor if self.val_loader is None else Role.ActorRollout
        worker = ClassWithInitArgs(
            SFTWorker, config=_worker_config(self.config), role=role.key, runtime=runtime
        )
        started, group = start_one_group(trainer, role, worker)
        return SFTGroups(backend=started.backend, groups=started.groups, policy=group)

    def fit(self) -> SFTResult:
        """Run the loop: update, and where it is due sync weights, validate and save."""
        settings, policy = self.config.trainer, self.init_workers().policy
        # Loaded before the run folder is opened: a folder of a run that cannot be continued keeps
        # all that it holds.
        resumed = self.checkpoints.resume()
        if resumed is not None:
            self.step = resumed.state.step
            policy.load_checkpoint(str(resumed.folder / _KEY), self.step)
        with RunRecord.open(
            self.config, self.total_steps, self.tokenizer, resumed, self.given
        ) as record:
            validator = Validator(settings.seed, self.val_loader, policy, self.reward_fn, record)
            if resumed is not None and self.has_validation:
                self.checkpoints.end_pending(
                    resumed, record, lambda: self.validate(validator, record)
                )
            for rows in () if self._reached_goal(validator.last) else self.schedule():
                with record.span("step"):
                    record.log_update(policy.update_sft(rows))
                if self.end_step(validator, record):
                    break
            path = str(record.folder.model)
            policy.export_hf(path)
            return SFTResult(path, self.step, validator.last.get("val/accuracy"))

    def end_step(self, validator: Validator, record: RunRecord) -> bool:
        """See `Checkpointing.end_step`."""
        total, policy = self.total_steps, self.init_workers().policy

        def validate() -> bool:
            return self._reached_goal(self.validate(validator, record))

        due = self.has_validation and is_due(self.config.trainer, self.step, total)
        return self.checkpoints.end_step(
            record,
            self.step,
            last=self.step == total,
            validate=validate if due else None,
            save=partial(save_roles, groups={_KEY: policy}),
        )

    @property
    def has_validation(self) -> bool:
        """Whether there is validation data."""
        return self.val_loader is not None or self.val_conversations is not None

    def validate(self, validator: Validator, record: RunRecord) -> dict[str, float]:
        """Compute the loss of the validation conversations, and score responses to the prompts.
        Return the metrics of the scores, {} without prompts."""
        policy = self.init_workers().policy
        if self.val_loader is not None:
            with record.span("sync_weights"):
                policy.sync_weights()
        if self.val_conversations is not None:
            with record.span("evaluate"):
                record.add({"val/loss": validation_loss(policy, self.val_conversations)})
        return validator.run(step=self.step, due=True)

    def schedule(self) -> Iterator[DataProto]:
        """Yield one batch of rows per step, epoch after epoch, and count `step`."""
        for step, rows in steps_of(self.checkpoints, self.loader, self.total_steps, self.step):
            self.step = step
            yield rows

    def close(self) -> None:
        """Stop the worker group and the reward processes, if they are started."""
        with closing(self.reward_fn):
            if self._groups is not None:
                self._groups.close()
                self._groups = None

    def _reached_goal(self, metrics: dict[str, float]) -> bool:
        goal = self.config.trainer.stop_at_accuracy
        if goal is not None and metrics and "val/accuracy" not in metrics:
            _log.warning(
                "trainer.stop_at_accuracy=%s has no effect: the rewards are not 0 or 1, so their "
                "mean %.3f is no accuracy",
                goal,
                metrics["val/score"],
            )
        return goal is not None and metrics.get("val/accuracy", -1.0) >= goal


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
    from quadriga.models import load_tokenizer

    model, data = config.model, config.data
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    train = conversations(data, data.train_files, tokenizer)
    evaluated = None
    if data.val_files and data.val_loss:
        evaluated = conversations(data, data.val_files, tokenizer).head(config.trainer.val_size)
    prompts = _validation_prompts(config, tokenizer)
    check_sft_data(config, tokenizer, [train, evaluated] if evaluated else [train], prompts)
    return SFTRows(tokenizer, train, prompts, evaluated)


def _worker_config(config: SFTConfig) -> ActorRolloutRefConfig:
    return ActorRolloutRefConfig(
        model=with_absolute_paths(config.model),
        actor=ActorConfig(
            optim=config.optim,
            engine=config.engine,
            ppo_micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
        ),
        rollout=RolloutConfig(dtype=config.engine.dtype, val_sampling=config.trainer.val_sampling),
    )


def _validation_prompts(
    config: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptDataset | None:
    """The first `val_size` validation prompts, or None without files of prompts."""
    if not config.data.val_files or config.data.messages_key is not None:
        return None
    data = DataConfig(
        prompt_key=config.data.prompt_key,
        max_prompt_length=config.data.max_length,
        chat_template_kwargs=config.data.chat_template_kwargs,
        cache_dir=config.data.cache_dir,
        image_key=None,
    )
    prompts = prompt_dataset(config.data.val_files, data, tokenizer)
    return prompts.head(config.trainer.val_size)


def _validation_loader(config: SFTConfig, prompts: PromptDataset | None) -> PromptLoader | None:
    """A loader of the prompts as one batch, or None without prompts."""
    from quadriga.data import PromptLoader

    if prompts is None:
        return None
    return PromptLoader(prompts, config.trainer.val_size, shuffle=False, drop_last=False)


_log = logging.getLogger("quadriga")


def conversations(
    data: SFTDataConfig, files: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> SFTDataset:
    """Return the conversations of `files`, as the settings describe their columns.

    Raises:
        DataError: a file is missing, or a row cannot be used.
        ModelError: it is unknown which tokens of a conversation the assistant writes.
    """
    from quadriga.data import SFTDataset

    return SFTDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        messages_key=data.messages_key,
        loss_turns=data.loss_turns,
        max_length=data.max_length,
        chat_template_kwargs=data.chat_template_kwargs,
        cache_dir=data.cache_dir,
    )


def validation_loss(policy: SFTGroup, loader: SFTLoader) -> float:
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
