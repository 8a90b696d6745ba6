"""What a run needs before any worker starts: tokenizer, prompts and reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar, cast

from quadriga.config.commands import GenerationConfig
from quadriga.config.schema import AgentConfig, DataConfig, ModelConfig, TrainConfig
from quadriga.data import PromptLoader
from quadriga.errors import ConfigError
from quadriga.rewards import RewardManager
from quadriga.streams.playing import start_of
from quadriga.trainer.checks.data import check_training_data
from quadriga.trainer.dataflow import StepPlan, scores_come_from_roles, validation_dataflow
from quadriga.trainer.stages import BatchReward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data.images import ImageRules
    from quadriga.data.loader import Mixture
    from quadriga.data.user_classes import Prompts

PromptSettings = TypeVar("PromptSettings", DataConfig, GenerationConfig)


@dataclass(frozen=True)
class Ingredients:
    """The tokenizer, the loaders of prompts, and the function that scores responses to them."""

    tokenizer: PreTrainedTokenizerBase
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    reward: BatchReward

    def close(self) -> None:
        """End the processes of the reward function, if it has some."""

        if isinstance(self.reward, RewardManager):
            self.reward.close()


def load_ingredients(config: TrainConfig, reward: BatchReward | None = None) -> Ingredients:
    """Load everything and check every data row.

    Args:
        reward: scores the responses, in place of the rules of the settings. It says itself what it
            needs of a row, so the rows need no rule.

    Raises:
        DataError: a file is missing, or a row cannot be used.
        ModelError: the model folder holds no tokenizer, or a sequence or a token does not fit a
            model.
        ConfigError: a sequence does not fit the token budget of a micro-batch.
    """
    from quadriga.data.loader import ordered_loader
    from quadriga.data.user_classes import sampler_state, user_sampler
    from quadriga.models.loading import tokenizer_of

    data, model = with_tool_prompts(config.data, config.agent), config.actor_rollout_ref.model
    tokenizer = tokenizer_of(model)
    # A seed of its own lets two runs differ in sampling and still see the same order of prompts.
    seed = data.seed if data.seed is not None else config.trainer.seed
    images = image_rules(model, data.image_key)
    train = load_prompts(data.train_files, data, tokenizer, images)
    # Dynamic sampling and a stream of prompt groups concatenate the batches of several draws.
    draws_again = config.algorithm.filter_groups.enable
    train.same_width = draws_again or config.trainer.max_staleness > 0
    agent = config.agent.path is not None
    make_space(train, config.agent)
    datasets, val_loader, sampler = [train], None, None
    if data.val_files:
        val = load_prompts(data.val_files, data, tokenizer, images)
        datasets.append(val)
        make_space(val, config.agent)
        val_loader = ordered_loader(val, data.val_batch_size)
    if data.sampler.path is not None:
        sampler = user_sampler(data.sampler.path, data.sampler, train, seed)
        sampler_state(sampler)  # raises for a state that a checkpoint cannot hold
    # Every training batch has the same size, so that it divides by ranks and mini-batches.
    train_loader = PromptLoader(
        train, data.train_batch_size, shuffle=data.shuffle, seed=seed, drop_last=True,
        mixture=make_mixture(data, train), sampler=sampler,
    )  # fmt: skip
    check_training_data(config, tokenizer, datasets)
    if reward is None:
        components = config.algorithm.reward_components
        start = start_of(config.reward.spread)
        reward = rules = RewardManager.from_settings(config.reward, tokenizer, components, start)
        rules.batch_rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        # Rows need no rule where a role or an environment scores the responses.
        if not agent and not scores_come_from_roles(StepPlan.of(config).stages):
            check_rows(rules, train_loader, data.train_files)
        if not agent and not scores_come_from_roles(validation_dataflow(config)):
            check_rows(rules, val_loader, data.val_files)
    return Ingredients(tokenizer, train_loader, val_loader, reward)


def make_space(prompts: Prompts, agent: AgentConfig) -> None:
    """Let prompts have what an environment needs: all columns, and space for what `reset` adds."""
    if agent.path is not None:
        prompts.keeps_columns = prompts.same_width = True
        prompts.longest += agent.reset_tokens


def with_tool_prompts(data: PromptSettings, agent: AgentConfig) -> PromptSettings:
    """Return the settings of the prompts, into which the chat template writes the tools."""
    if agent.path is None:
        return data
    from quadriga.agents.environments import EnvironmentRef
    from quadriga.agents.tools import with_tools

    ref = EnvironmentRef(agent.path, agent.name, agent.options)
    _, tools = with_tools(ref, lambda: "hermes")  # the format of calls does not change prompts
    given = {"tools": tools} if tools else {}
    return replace(data, chat_template_kwargs={**data.chat_template_kwargs, **given})


def check_ingredients(config: TrainConfig, given: Ingredients) -> None:
    """Check that the prompts that a program gives fit the models and the settings.

    A dataset of the program's own that does not know its longest prompt is not compared.

    Raises:
        As `check_training_data`.
    """
    loaders = (given.train_loader, given.val_loader)
    datasets = [loader.dataset for loader in loaders if loader is not None]
    known = list(takewhile(lambda dataset: hasattr(dataset, "longest"), datasets))
    if known:
        check_training_data(config, given.tokenizer, cast("list[Prompts]", known))


def load_prompts(
    files: Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageRules | None = None,
) -> Prompts:
    """Return the prompts of `files`, from the user's dataset class if the settings name one.

    `images`: how images become tokens, for a model that takes images.
    """
    from quadriga.data import PromptDataset
    from quadriga.data.user_classes import user_dataset

    if data.dataset.path is not None:
        return user_dataset(data.dataset.path, files, tokenizer, data, images)
    return PromptDataset.from_settings(files, tokenizer, data, images=images)


def image_rules(model: ModelConfig, image_key: str | None) -> ImageRules | None:
    """Return how the images of prompts become tokens; None for a model of text.

    Args:
        image_key: column of the images.

    Raises:
        ModelError: the model takes images, and its folder has no image processor.
        ConfigError: the model takes images, and Pillow is not installed.
    """
    from quadriga.data.images import ImageRules
    from quadriga.models.images import image_tokens, load_image_processor

    tokens = image_tokens(model) if model.path else None
    if tokens is None:
        return None
    processor = load_image_processor(model)
    return ImageRules(
        image_key=image_key, image_token=tokens.image, merge_size=tokens.merge_size,
        process=partial(processor, return_tensors="pt"),
        count_patches=processor.get_number_of_image_patches, settings=processor.to_json_string(),
    )  # fmt: skip


def make_mixture(data: DataConfig, prompts: Prompts) -> Mixture | None:
    """Return the shares of the training files, if the settings have weights.

    Raises:
        ConfigError: the weights do not fit the files, or a dataset class of the user has no files.
    """
    from quadriga.data.loader import Mixture

    if data.train_weights is None:
        return None
    sizes = getattr(prompts, "file_sizes", None)
    if sizes is None:
        raise ConfigError(
            f"data.train_weights needs the number of prompts of each file, but "
            f"data.dataset.name={data.dataset.name} has no attribute file_sizes; add it, or remove "
            "the weights",
            key="data.train_weights",
        )
    return Mixture(sizes, data.train_weights)


def check_rows(reward: RewardManager, loader: PromptLoader | None, files: Sequence[str]) -> None:
    """Check that every row of a loader's data, which `files` hold, can be scored.

    Raises:
        DataError: names the files, the row and what it lacks.
    """
    from quadriga.data.loader import items_of

    if loader is not None:
        dataset: Any = loader.dataset
        dataset.keeps_columns = reward.reads_columns
        reward.check(items_of(dataset), files)
