"""What a run is made of before any worker starts: tokenizer, prompts, reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.config.schema import DataConfig, RewardConfig, TrainConfig
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class Ingredients:
    """`train_loader` and `val_loader` give batches of prompts; `reward` scores answered ones."""

    tokenizer: Any
    train_loader: Any
    val_loader: Any | None
    reward: Callable[[DataProto], DataProto]


def load_ingredients(config: TrainConfig) -> Ingredients:
    """Load them all, checking every row.

    Raises:
        DataError: a file is missing, or a row cannot be used.
        ModelError: the model folder holds no tokenizer.
    """
    from quadriga.data import PromptDataset, PromptLoader
    from quadriga.models import load_tokenizer

    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    seed = config.data.seed if config.data.seed is not None else config.trainer.seed
    train = prompt_dataset(PromptDataset, config.data.train_files, config.data, tokenizer)
    val = None
    if config.data.val_files:
        held_out = prompt_dataset(PromptDataset, config.data.val_files, config.data, tokenizer)
        val = PromptLoader(
            held_out, config.data.val_batch_size, shuffle=False, seed=seed, drop_last=False
        )
    return Ingredients(
        tokenizer=tokenizer,
        train_loader=PromptLoader(
            train,
            config.data.train_batch_size,
            shuffle=config.data.shuffle,
            seed=seed,
            drop_last=True,
        ),
        val_loader=val,
        reward=make_reward(config.reward, tokenizer, config.algorithm.reward_components),
    )


def prompt_dataset(cls: Any, files: list[str], data: DataConfig, tokenizer: Any) -> Any:
    """The prompts of `files`, templated and filtered as `data` says."""
    return cls(
        files,
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
    )


def make_reward(
    reward: RewardConfig, tokenizer: Any, components: Sequence[str] = ()
) -> Callable[[DataProto], DataProto]:
    """The rule rewards of the settings: built-in by `data_source`, or the user's own function."""
    from quadriga.rewards import RewardManager, load_reward_function

    function = load_reward_function(reward.path, reward.name) if reward.path else None
    return RewardManager(
        tokenizer,
        function,
        num_processes=reward.num_processes,
        timeout_s=reward.timeout_s,
        components=components,
    )
