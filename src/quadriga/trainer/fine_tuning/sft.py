"""Supervised fine-tuning.

Every `test_freq` steps the loop computes the loss of the validation conversations. With prompts and
answers it also scores greedy responses, and stops as soon as the accuracy reaches
`stop_at_accuracy`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quadriga.config.commands import SFTConfig
from quadriga.config.paths import absolute_paths
from quadriga.config.schema import ActorConfig, ActorRolloutRefConfig, RolloutConfig
from quadriga.data.conversations import turn_end_ids
from quadriga.models.folder import end_token_ids
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.trainer.checks.data import check_fine_tuning_data
from quadriga.trainer.fine_tuning.one_group import FineTuned, OneGroupTrainer, Validate
from quadriga.trainer.ingredients import check_rows
from quadriga.trainer.preflight import check_fine_tuning_config
from quadriga.trainer.record import RunRecord
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.validation import Validator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import PromptDataset, PromptLoader, SFTDataset
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import RankRuntime
    from quadriga.workers.roles import SFTGroup

_log = logging.getLogger("quadriga")


def run_sft(config: SFTConfig) -> FineTuned:
    """Run `quadriga sft`.

    Raises:
        InputError: settings, files, model folders or nodes do not fit. Nothing was started.
        KeyboardInterrupt: a signal has stopped the run; its argument is the number of the signal.
    """
    check_fine_tuning_config(config)
    return SFTTrainer(config).run()


class SFTTrainer(OneGroupTrainer[SFTConfig, "SFTGroup"]):
    """Minimises the mean of −log p over the response tokens of a batch, over all ranks."""

    saved_as = Role.Actor

    def __init__(self, config: SFTConfig) -> None:
        from quadriga.data import PromptLoader
        from quadriga.rewards import RewardManager
        from quadriga.trainer.memory.check import RunMemory  # imports torch

        given, config = config, absolute_paths(config)
        rows = load_sft_rows(config)
        tell_other_ends(config.model.path, rows.tokenizer, rows.train.ends)
        self.val_loader, self.val_conversations, evaluated = None, None, None
        if rows.val_prompts is not None:  # as one batch
            self.val_loader = PromptLoader(
                rows.val_prompts, config.trainer.val_size, shuffle=False, drop_last=False
            )
        if rows.val_conversations is not None:
            evaluated, size = rows.val_conversations.lengths, config.data.train_batch_size
            self.val_conversations = PromptLoader(
                rows.val_conversations, size, shuffle=False, drop_last=False
            )
        RunMemory(config, rows.train.lengths, rows.val_prompts, evaluated).check()
        super().__init__(given, config, rows.tokenizer, rows.train)
        self.reward_fn = RewardManager.from_settings(config.reward, rows.tokenizer)
        check_rows(self.reward_fn, self.val_loader, config.data.val_files)

    def worker(self, runtime: RankRuntime) -> ClassWithInitArgs:
        """See `OneGroupTrainer`."""
        from quadriga.single_controller import ClassWithInitArgs
        from quadriga.workers import SFTWorker

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
        seed, prompts, conversations = (
            self.config.trainer.seed,
            self.val_loader,
            self.val_conversations,
        )
        validator = Validator(seed, prompts, policy, self.reward_fn, record)
        if prompts is None and conversations is None:
            return None

        def validate() -> bool:
            if prompts is not None:
                with record.span("sync_weights"):
                    policy.sync_weights()
            if conversations is not None:
                with record.span("evaluate"):
                    record.add({"val/loss": validation_loss(policy, conversations)})
            return self.reached_goal(validator.run(step=self.step, due=True))

        return validate

    def reached_goal(self, metrics: dict[str, float]) -> bool:
        """Return whether the accuracy is at least `stop_at_accuracy`."""
        goal = self.config.trainer.stop_at_accuracy
        if goal is not None and metrics and "val/accuracy" not in metrics:
            _log.warning(
                "trainer.stop_at_accuracy=%s has no effect: the rewards are not 0 or 1, so their "
                "mean %.3f is no accuracy",
                goal,
                metrics["val/score"],
            )
        return goal is not None and metrics.get("val/accuracy", -1.0) >= goal

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
    from quadriga.data import PromptDataset, SFTDataset
    from quadriga.models.context_window import LongestSequence
    from quadriga.workers.reward_model import tokenizer_of

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
