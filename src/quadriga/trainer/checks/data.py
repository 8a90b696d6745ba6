"""Checks of the data against the models, before a worker starts: lengths, token ids, images.

The lengths are those of the data: the longest prompt that is there, and not the longest one that
the settings allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from quadriga.config import schema
from quadriga.config.commands import GenerationConfig, RMConfig, SFTConfig
from quadriga.config.role_ranks import has_reward_model, reference_engine
from quadriga.errors import ConfigError
from quadriga.models.images import image_tokens
from quadriga.models.limits import (
    LongestSequence,
    check_context_window,
    check_stop_tokens,
    check_vocabulary,
)
from quadriga.protocol.fields import RAW_PROMPT
from quadriga.rollout import REFERENCE, rollout_of
from quadriga.trainer.checks.settings import Problems, refuse
from quadriga.trainer.roles.needs import needs_critic, needs_reference, reads_ref_log_prob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from quadriga.data import SFTDataset
    from quadriga.data.chat import Chat
    from quadriga.data.conversations import PairDataset
    from quadriga.data.user_classes import Prompts

_TRIED = 2048
"""Prompts of which one of each kind is written by the template of a reward model."""
_IMAGES = {
    "name": "fsdp",
    "tensor_parallel_size": 1,
    "sequence_parallel_size": 1,
    "context_parallel_size": 1,
}
"""Settings of a training engine -> the value with which it computes images."""


def check_training_data(
    config: schema.TrainConfig, tokenizer: PreTrainedTokenizerBase, datasets: Sequence[Prompts]
) -> None:
    """Check that the prompts of `quadriga train`, with the longest response, fit the models.

    Args:
        datasets: the prompts for training, then those for validation if there are some.

    Raises:
        ModelError: a sequence exceeds a context window, or a token id exceeds an embedding.
        ConfigError: a sequence exceeds the token budget of a micro-batch, or the window of the
            rollout engine, or a stop token is outside the vocabulary.
    """
    policy, response = config.actor_rollout_ref, config.data.max_response_length
    key = "actor_rollout_ref.rollout"
    _check_sampled(f"{key}.sampling", policy.rollout.sampling, policy.model)
    if len(datasets) > 1:
        _check_sampled(f"{key}.val_sampling", policy.rollout.val_sampling, policy.model)
    longest = longest_with_response(datasets, response, "data.")
    check_model_inputs(policy.model, tokenizer, longest, datasets)
    if needs_critic(config) and config.critic.model.path:
        check_model_inputs(config.critic.model, tokenizer, longest, datasets)
    rollout_of(policy.rollout).check_window(policy.model, longest)
    trained = longest_with_response(datasets[:1], response, "data.")
    if has_reward_model(config):
        _check_scored(config, tokenizer, trained, datasets[:1])
    for key, engine in _engines(config):
        check_token_budget(key, engine, trained)


def check_fine_tuning_data(
    config: SFTConfig | RMConfig,
    tokenizer: PreTrainedTokenizerBase,
    longest: LongestSequence,
    datasets: Sequence[SFTDataset | PairDataset],
    validation: Prompts | None = None,
) -> None:
    """Check that the rows of `quadriga sft` or `rm`, and generated validation, fit the model.

    Args:
        longest: the longest row of all datasets.
        validation: prompts to which `sft` generates responses.

    Raises:
        As `check_training_data`.
    """
    check_model_inputs(config.model, tokenizer, longest, datasets)
    check_token_budget("engine", config.engine, longest)
    if validation is not None and isinstance(config, SFTConfig):
        trainer = config.trainer
        _check_sampled("trainer.val_sampling", trainer.val_sampling, config.model)
        generated = longest_with_response([validation], trainer.max_response_length, "trainer.")
        check_model_inputs(config.model, tokenizer, generated, [validation])


def check_generation_data(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
) -> None:
    """Check that the prompts of a generation, with the longest response, fit the model.

    Raises:
        As `check_training_data`.
    """
    _check_sampled("sampling", config.sampling, config.model)
    longest = longest_with_response([prompts], config.max_response_length, "")
    check_model_inputs(config.model, tokenizer, longest, [prompts])
    rollout_of(config.rollout).check_window(config.model, longest)


def _check_sampled(key: str, sampling: schema.SamplingConfig, model: schema.ModelConfig) -> None:
    check_stop_tokens(f"{key}.stop_token_ids", sampling.stop_token_ids, model)


def longest_with_response(
    datasets: Sequence[Prompts], max_response_length: int, prefix: str
) -> LongestSequence:
    """Return the longest sequence: the longest prompt of the data with the longest response.

    `prefix`: of the keys `max_prompt_length` and `max_response_length` in messages.
    """
    prompt = max(dataset.longest for dataset in datasets)
    total = prompt + max_response_length
    return LongestSequence(
        total,
        f"the longest prompt has {prompt} tokens, and {prompt} + {prefix}max_response_length="
        f"{max_response_length} is {total} tokens",
        f"lower {prefix}max_response_length",
    )


def check_model_inputs(
    model: schema.ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    longest: LongestSequence,
    datasets: Sequence[Prompts | SFTDataset | PairDataset],
) -> None:
    """Check lengths and token ids against one model.

    Raises:
        ModelError: a sequence exceeds the context window, or a token id exceeds the embedding.
    """
    check_context_window(model, longest)
    largest = max(dataset.largest_id for dataset in datasets)
    check_vocabulary(model, tokenizer, largest_id=largest)


def _check_scored(
    config: schema.TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    trained: LongestSequence,
    datasets: Sequence[Prompts],
) -> None:
    """Check the inputs of the reward model, which needs one more token for each sequence.

    Conversations that it encodes again have lengths that are known after generation only. Of
    these, a prompt of each kind is tried with a short response.
    """
    from quadriga.data.chat import encode_chats
    from quadriga.data.loader import items_of
    from quadriga.models.loading import tokenizer_of
    from quadriga.workers.reward_model import same_tokens

    section = config.reward_model
    model, own = section.model, tokenizer_of(section.model)
    arguments = config.data.chat_template_kwargs
    if same_tokens(own, tokenizer, section.chat_template_kwargs, arguments):
        longest = LongestSequence(
            trained.tokens + 1, f"{trained.arithmetic}, and one is added", trained.remedy
        )
        check_model_inputs(model, tokenizer, longest, datasets)
        check_token_budget("reward_model.engine", section.engine, longest)
        return
    check_vocabulary(model, own, largest_id=0)
    prompts: dict[tuple[str, ...], Chat] = {}  # roles -> a prompt with turns of these roles
    for item in islice(items_of(datasets[0]), _TRIED):
        prompts.setdefault(tuple(m["role"] for m in item[RAW_PROMPT]), item[RAW_PROMPT])
    answered: list[Chat] = [[*p, {"role": "assistant", "content": "1"}] for p in prompts.values()]
    encoded = encode_chats(own, answered, complete=True, arguments=section.chat_template_kwargs)
    tokens = max(len(ids) for ids in encoded)
    longest = LongestSequence(
        tokens + 1,
        f"a prompt with a response of one digit has {tokens} tokens of the reward model, and one "
        "is added",
        "lower data.max_prompt_length, beyond which prompts are left out,",
    )
    check_context_window(model, longest)


def check_token_budget(key: str, engine: schema.EngineConfig, longest: LongestSequence) -> None:
    """Check that the longest sequence fits a micro-batch that is cut by tokens.

    A sequence is never split, so a longer one would exceed the memory that the budget is for.

    Raises:
        ConfigError: names the setting below `key`, with the arithmetic.
    """
    budget = engine.micro_batch_tokens
    ranks = budget // engine.max_tokens_per_micro_batch
    if engine.use_dynamic_bsz and longest.tokens > budget:
        setting = f"{key}.max_tokens_per_micro_batch"
        shared = f" × {ranks} ranks that split the tokens = {budget}" if ranks > 1 else ""
        raise ConfigError(
            f"{setting}={engine.max_tokens_per_micro_batch}{shared} is below the longest sequence: "
            f"{longest.arithmetic}; set it to at least {-(-longest.tokens // ranks)}, or "
            f"{longest.remedy} by {longest.tokens - budget}",
            key=setting,
        )


def _engines(config: schema.TrainConfig) -> Iterator[tuple[str, schema.EngineConfig]]:
    """Yield (key, settings) of the training engines that cut micro-batches of their own."""
    yield "actor_rollout_ref.actor.engine", config.actor_rollout_ref.actor.engine
    # KL over the vocabulary computes the reference in the micro-batches of the actor.
    if needs_reference(config) and reads_ref_log_prob(config):
        yield reference_engine(config)
    if needs_critic(config):
        yield "critic.engine", config.critic.engine


def check_images_supported(config: schema.TrainConfig | GenerationConfig) -> None:
    """Check, if the model takes images, that every role of a run or a generation can.

    Raises:
        ConfigError: one cannot. Names the setting.
    """
    if isinstance(config, schema.TrainConfig):
        model, problems = config.actor_rollout_ref.model, _text_only(config)
    else:
        model = config.model
        problems = _text_rollout("rollout.name", config.rollout, model.path)
    if model.path and image_tokens(model) is not None:
        refuse(config, problems)


def _text_only(config: schema.TrainConfig) -> Problems:
    policy = config.actor_rollout_ref
    but = f"computes text only, but the model in {policy.model.path} takes images"
    yield from _text_rollout("actor_rollout_ref.rollout.name", policy.rollout, policy.model.path)
    for use in ("actor", "ref"):
        for name, needed in _IMAGES.items():
            if getattr(getattr(policy, use).engine, name) != needed:
                yield f"actor_rollout_ref.{use}.engine.{name}", f"{but}; set it to {needed}"
    if needs_critic(config):
        yield "algorithm.adv_estimator", f"has a critic, which {but}; set it to one such as grpo"
    if has_reward_model(config):
        yield "reward_model.enable", f"{but}; score by rules, and set it to false"


def _text_rollout(key: str, rollout: schema.RolloutEngineConfig, path: str) -> Problems:
    if not rollout_of(rollout).computes_images:
        but = f"computes text only, but the model in {path} takes images"
        yield key, f"{but}; set it to {REFERENCE}"
