"""What a run needs before any worker starts: tokenizer, prompts and reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.schema import DataConfig, RewardConfig, TrainConfig
from quadriga.trainer.dataflow import step_dataflow, validation_dataflow
from quadriga.trainer.roles.places import scores_come_from_roles
from quadriga.trainer.run.sequence_checks import check_training_data
from quadriga.trainer.stages import BatchReward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import PromptDataset, PromptLoader
    from quadriga.rewards import RewardManager


@dataclass(frozen=True)
class Ingredients:
    """The tokenizer, the loaders of prompts, and the function that scores responses to them."""

    tokenizer: PreTrainedTokenizerBase
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    reward: BatchReward

    def close(self) -> None:
        """End the processes of the reward function, if it has some."""
        from quadriga.rewards import RewardManager

        if isinstance(self.reward, RewardManager):
            self.reward.close()


def load_ingredients(config: TrainConfig) -> Ingredients:
    """Load everything and check every data row.

    Raises:
        DataError: a file is missing, or a row cannot be used.
        ModelError: the model folder holds no tokenizer, or a sequence or a token does not fit a
            model.
        ConfigError: a sequence does not fit the token budget of a micro-batch.
    """
    from quadriga.data import PromptLoader
    from quadriga.models import load_tokenizer

    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    # A seed of its own lets two runs differ in sampling and still see the same order of prompts.
    seed = config.data.seed if config.data.seed is not None else config.trainer.seed
    val_loader = None
    train = prompt_dataset(config.data.train_files, config.data, tokenizer)
    # Dynamic sampling concatenates the batches of several draws.
    train.same_width = config.algorithm.filter_groups.enable
    datasets = [train]
    if config.data.val_files:
        val = prompt_dataset(config.data.val_files, config.data, tokenizer)
        datasets.append(val)
        val_loader = PromptLoader(
            val,
            config.data.val_batch_size,
            shuffle=False,
            seed=seed,
            drop_last=False,
        )
    # Every training batch has the same size, so that it divides by ranks and mini-batches.
    train_loader = PromptLoader(
        train,
        config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=seed,
        drop_last=True,
    )
    check_training_data(config, tokenizer, datasets)
    reward = make_reward(config.reward, tokenizer, config.algorithm.reward_components)
    # Rows need no rule where a role scores the responses.
    if not scores_come_from_roles(step_dataflow(config)):
        check_rows(reward, train_loader)
    if not scores_come_from_roles(validation_dataflow(config)):
        check_rows(reward, val_loader)
    return Ingredients(tokenizer, train_loader, val_loader, reward)


def prompt_dataset(
    files: Sequence[str], data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptDataset:
    """Return the prompts of `files`, with template and length filter as `data` says."""
    from quadriga.data import PromptDataset

    return PromptDataset(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        cache_dir=data.cache_dir,
    )


def make_reward(
    reward: RewardConfig, tokenizer: PreTrainedTokenizerBase, components: Sequence[str] = ()
) -> RewardManager:
    """Return the rule rewards of the settings: the user's own function if `reward.path` is set,
    else the built-in function of each row's `data_source`."""
    from quadriga.rewards import RewardManager

    return RewardManager.from_settings(reward, tokenizer, components)


def check_rows(reward: RewardManager, loader: PromptLoader | None) -> None:
    """Check that every row of a loader's data can be scored.

    Raises:
        DataError: names the row and what it lacks.
    """
    from quadriga.data.loader import items_of

    if loader is not None:
        reward.check(items_of(loader.dataset))
