"""Check settings of sampling, of `quadriga generate` and of `quadriga eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quadriga.config.checks.replicas import check_replicas_are_read
from quadriga.config.checks.trained_part import check_whole_model
from quadriga.config.commands import (
    EvalConfig,
    GenerateConfig,
    GenerationConfig,
    SFTConfig,
    SFTTrainerConfig,
)
from quadriga.config.convert import check_values, leaves
from quadriga.config.describe import as_written
from quadriga.config.schema import SamplingConfig
from quadriga.errors import ConfigError

OUTPUTS = (".jsonl", ".parquet")
"""Suffixes of the files that `quadriga generate` writes."""

_OF_GENERATION = {f.name for f in dataclasses.fields(GenerationConfig)} - {
    "prompt_key",
    "image_key",
    "overwrite",
    "seed",
}
"""Settings that an evaluation of responses in files does not read."""


def check_sampling(key: str, sampling: SamplingConfig, max_response_length: int) -> None:
    """Check the settings of one section of sampling settings. `key`: its name.

    Raises:
        ConfigError: a value is out of range, or `min_new_tokens` is more than the longest response.
    """
    problems = {
        "top_k": (
            "must be -1 (all tokens) or at least 1",
            sampling.top_k != -1 and sampling.top_k < 1,
        ),
        "stop": ("must be texts that are not empty", not all(sampling.stop)),
    }
    for name, (rule, broken) in problems.items():
        if broken:
            value = as_written(getattr(sampling, name))
            raise ConfigError(f"{key}.{name} {rule}, got {value}", key=f"{key}.{name}")
    over = sampling.min_new_tokens - max_response_length
    if over > 0:
        raise ConfigError(
            f"{key}.min_new_tokens={sampling.min_new_tokens} is more than the longest response, "
            f"max_response_length={max_response_length}; lower it by {over}, or allow longer "
            "responses",
            key=f"{key}.min_new_tokens",
        )


def check_samples_differ(n_key: str, n: int, key: str, sampling: SamplingConfig) -> None:
    """Raise `ConfigError` if several responses to a prompt would be equal, because sampling is
    greedy. `key`: the section of `sampling`."""
    if sampling.temperature == 0 and n > 1:
        raise ConfigError(
            f"{n_key}={n} greedy responses ({key}.temperature=0) would all be equal; set "
            f"{key}.temperature above 0, or {n_key}=1",
            key=n_key,
        )


def check_generate_settings(config: GenerateConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga generate`."""
    _check_generation(config)
    if config.output is not None and Path(config.output).suffix not in OUTPUTS:
        raise ConfigError(
            f"output must end in one of {', '.join(OUTPUTS)}, got {config.output!r}", key="output"
        )


def check_eval_settings(config: EvalConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga eval`."""
    _check_generation(config)
    if bool(config.data_files) == bool(config.response_files):
        raise ConfigError(
            "set either data_files=[…], to generate responses with model.path, or "
            "response_files=[…], to score responses that files hold, and not both",
            key="data_files",
        )
    if config.response_files:
        _check_unread(config)
    elif beyond := [k for k in config.pass_at if k > config.n]:
        raise ConfigError(
            f"pass_at={as_written(config.pass_at)} has k={max(beyond)}, but n={config.n} responses "
            f"to a prompt hold no {max(beyond)}; set n to at least {max(beyond)}",
            key="pass_at",
        )
    if config.reward.on_failure == "mask":
        raise ConfigError(
            "reward.on_failure=mask leaves failed samples out of an update, and an evaluation has "
            "none; set it to zero or fail",
            key="reward.on_failure",
        )


def check_sft_validation(config: SFTConfig) -> None:
    """Check the settings of the responses that `quadriga sft` generates in validation.

    Raises:
        ConfigError: a value is out of range, or a setting has no effect.
    """
    trainer, data, key = config.trainer, config.data, "trainer.val_sampling"
    if trainer.stop_at_accuracy is not None and not data.val_files:
        raise ConfigError(
            f"trainer.stop_at_accuracy={trainer.stop_at_accuracy} needs validation "
            "prompts; set data.val_files",
            key="trainer.stop_at_accuracy",
        )
    check_sampling(key, trainer.val_sampling, trainer.max_response_length)
    if trainer.val_sampling == SFTTrainerConfig().val_sampling:
        return
    if not data.val_files or data.messages_key is not None:
        reason = "data.val_files is empty"
        if data.val_files:
            reason = (
                f"data.messages_key={data.messages_key} has conversations, scored by their loss"
            )
        raise ConfigError(
            f"{key} has no effect: no response is generated in validation, because {reason}; "
            "remove it",
            key=key,
        )


def _check_generation(config: GenerationConfig) -> None:
    check_values(config)
    check_sampling("sampling", config.sampling, config.max_response_length)
    check_samples_differ("n", config.n, "sampling", config.sampling)
    check_whole_model("model", config.model)
    check_replicas_are_read(config.rollout.replicas, "rollout.replicas")


def _check_unread(config: EvalConfig) -> None:
    """Check that no setting of the generation is given where responses exist already."""
    default = dict(leaves(EvalConfig()))
    for key, value in leaves(config):
        section = key.partition(".")[0]
        if section in _OF_GENERATION and value != default[key]:
            raise ConfigError(
                f"{key}={as_written(value)} is not read, because response_files holds the "
                "responses already; remove it, or give data_files in place of response_files",
                key=key,
            )
