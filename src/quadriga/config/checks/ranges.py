"""Check each setting by itself: ranges of numbers and closed lists of choices.

A range belongs to the last part of a key: the range of `lr` holds for
`actor_rollout_ref.actor.optim.lr` and for `critic.optim.lr`. Choices are read from the types.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.convert import check_choice, check_switch, walk_keys
from quadriga.config.setting_types import allows_none, choices_of, is_switch
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Range:
    """Bounds of a number. `above` excludes the lower bound and `below` the upper one."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is within the range; NaN never is."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return over and under

    def words(self) -> str:
        """Return the range in words: "at least 1", "above 0 and at most 1"."""
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        high = f"{'below' if self.below else 'at most'} {self.high:g}"
        parts = [low] * (self.low > -math.inf) + [high] * (self.high < math.inf)
        return " and ".join(parts)


_COUNT = Range(low=1)
_NOT_NEGATIVE = Range(low=0)
_POSITIVE = Range(low=0, above=True)
_SHARE = Range(low=0, high=1)

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        (
            "train_batch_size", "val_batch_size", "batch_size", "micro_batch_size",
            "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu",
            "max_prompt_length", "max_response_length", "max_length", "loss_scale_length",
            "ppo_epochs", "n", "nnodes", "n_gpus_per_node", "num_cpus", "threads_per_worker",
            "total_epochs", "total_training_steps", "total_steps", "max_tokens_per_micro_batch",
            "max_ckpt_to_keep", "buffer_length", "max_num_gen_batches", "phrasings",
            "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size",
            "vocab_size", "max_number", "min_steps", "max_steps", "weight_bucket_mb",
            "rank", "lora_rank", "val_n", "pass_at", "resamples", "tensor_parallel_size",
            "pipeline_parallel_size", "expert_parallel_size", "sequence_parallel_size",
            "context_parallel_size", "virtual_pipeline_parallel_size",
            "expert_tensor_parallel_size", "request_rows", "requests_in_flight",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "lr", "weight_decay", "lr_warmup_steps", "clip_ratio_low", "clip_ratio_high",
            "kl_loss_coef", "temperature", "kl_coef", "test_freq", "save_freq",
            "samples_per_step", "num_processes", "penalty_factor", "warmup_steps", "seed",
            "max_skipped_steps", "min_new_tokens", "stop_token_ids", "restarts",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            "eps", "grad_clip", "horizon", "target_kl", "upper", "lower", "cliprange_value",
            "timeout_s", "call_timeout_s", "deadline_s", "save_interval_s", "stop_grace_s",
            "reward_clip", "initializer_range", "device_memory_gb", "bound", "alpha",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "min_lr_ratio", "gamma", "lam", "stop_at_accuracy", "sft_careful", "max_share",
            "min_p", "prefix_share",
        ),
        _SHARE,
    ),
    # Data files with more rows are not read.
    **dict.fromkeys(("train_size", "val_size", "sft_size"), Range(low=1, high=5_000_000)),
    "rm_size": Range(low=0, high=5_000_000),
    "memory_gb": Range(low=0.25),  # a process of the reward pool starts with less than 0.1 GiB
    "confidence": Range(low=0, high=1, above=True, below=True),
    "top_p": Range(low=0, high=1, above=True),
    **dict.fromkeys(("betas", "momentum", "dropout"), Range(low=0, high=1, below=True)),
    "clip_ratio_c": Range(low=1, above=True),
}  # fmt: skip


_UNLIMITED = (
    "bound", "clip_ratio_c", "clip_ratio_high", "clip_ratio_low", "cliprange_value", "grad_clip",
    "reward_clip", "upper",
)  # fmt: skip
"""Limits that may be infinite, which is none."""


def leaves(config: DataclassInstance, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for every setting of an object, sections excluded."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def check_values(config: DataclassInstance) -> None:
    """Raise `ConfigError` for the first setting that is out of range or not one of its choices."""
    kinds = dict(walk_keys(type(config)))
    for key, value in leaves(config):
        _check_range(key, value)
        _check_choices(key, value, kinds[key])


def _check_range(key: str, value: object) -> None:
    leaf = key.rpartition(".")[2]
    allowed = RANGES.get(leaf)
    for number in value if isinstance(value, list | tuple) else [value]:
        if allowed is not None and value is not None and not _within(allowed, number):
            raise ConfigError(f"{key} must be {allowed.words()}, got {number}", key=key)
        if isinstance(number, float) and not math.isfinite(number) and leaf not in _UNLIMITED:
            raise ConfigError(f"{key} must be a finite number, got {number}", key=key)


def _within(allowed: Range, number: object) -> bool:
    return isinstance(number, int | float) and allowed.holds(number)


def _check_choices(key: str, value: object, kind: object) -> None:
    # `load_config` has checked the choices already, but a settings object that was created in
    # Python has not been checked.
    if is_switch(kind):
        check_switch(key, value, kind)
        return
    choices = choices_of(kind)
    if not choices or (value is None and allows_none(kind)):
        return
    for item in value if isinstance(value, list | tuple) else [value]:
        check_choice(key, item, choices)
