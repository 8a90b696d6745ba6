"""Which values a setting may have by itself, by the last part of its name."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quadriga.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Bounds of a number. `above` excludes the lower bound, `below` the upper one."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies within. NaN never does."""
        over = value > self.low if self.above else value >= self.low
        under = value < self.high if self.below else value <= self.high
        return over and under

    def words(self) -> str:
        """The range as a sentence's end: "at least 1"."""
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
            "max_ckpt_to_keep", "buffer_length", "max_num_gen_batches", "val_size",
            "train_size", "sft_size", "phrasings", "hidden_size", "num_layers", "num_heads",
            "num_kv_heads", "intermediate_size", "vocab_size", "max_number",
            "min_steps", "max_steps",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "lr", "weight_decay", "lr_warmup_steps", "clip_ratio_low", "clip_ratio_high",
            "kl_loss_coef", "temperature", "kl_coef", "test_freq", "save_freq",
            "samples_per_step", "num_processes", "penalty_factor", "warmup_steps", "seed",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        (
            "eps", "grad_clip", "horizon", "target_kl", "upper", "lower", "cliprange_value",
            "timeout_s", "call_timeout_s", "reward_clip", "initializer_range",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(("min_lr_ratio", "gamma", "lam", "stop_at_accuracy", "sft_careful"), _SHARE),
    "top_p": Range(low=0, high=1, above=True),
    "betas": Range(low=0, high=1, below=True),
    "clip_ratio_c": Range(low=1, above=True),
}  # fmt: skip

_DTYPES = ("auto", "float32", "bfloat16", "float16")

CHOICES: dict[str, tuple[str, ...]] = {
    "backend": ("ray", "local"),
    "device": ("auto", "cpu", "cuda", "npu"),
    "dtype": _DTYPES,
    "reduce_dtype": _DTYPES[1:],
    "lr_scheduler": ("constant", "linear", "cosine"),
    "kl_ctrl.type": ("fixed", "adaptive"),
    "filter_groups.mode": ("mask", "refill"),
    "under_filled": ("proceed", "error"),
    "rollout_correction.level": ("none", "token", "sequence", "geometric"),
    "rollout_correction.mode": ("truncate", "mask"),
}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key of a settings object that is no section, with its value."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def check_values(config: Any) -> None:
    """Raise `ConfigError` for the first setting whose value no run could use."""
    for key, value in leaves(config):
        _check_range(key, value)
        for name, allowed in CHOICES.items():
            if key == name or key.endswith(f".{name}"):
                check_choice(key, value, allowed)


def check_choice(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ConfigError`, naming the nearest, unless `value` is one of `allowed`."""
    allowed = sorted(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{key}={value!r} is not known; expected one of {', '.join(allowed)}{hint}",
        key=key,
        nearest=near[0] if near else None,
    )


def _check_range(key: str, value: Any) -> None:
    wanted = RANGES.get(key.rpartition(".")[2])
    if wanted is None or value is None:
        return
    for number in value if isinstance(value, list | tuple) else [value]:
        if not wanted.holds(number):
            raise ConfigError(f"{key} must be {wanted.words()}, got {number}", key=key)
