"""Metrics of a batch and of a step under verl's names.

Lengths count `attention_mask`, as in verl, so that they include the tokens that tools wrote. Values
of tokens (advantages, returns, values) count where `response_mask` is 1.

Shapes: B samples, T response tokens, P prompt tokens. Fields of tokens are [B, T], `prompts` is
[B, P], `attention_mask` is [B, P + T].
"""

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.tensors import as_float, masked_var
from quadriga.errors import FieldError
from quadriga.protocol import DataProto, fields

Metrics: TypeAlias = dict[str, float]

GLOBAL_TOKENS = "global_token_num"
"""Key of `meta_info`: the number of tokens of each sample of the global batch."""
STEP = "step"
PER_ROW = {"__num_turns__": "num_turns", "tool_call_counts": "tool_call_counts"}
"""Column of `non_tensor_batch` → name of its metrics."""
OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Spans whose time is divided by the number of prompt and response tokens."""
EPSILON = 1e-5


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> Metrics:
    """Return scores, rewards, advantages, returns, values and lengths of a batch.

    Each has `…/mean`, `…/max` and `…/min`. Scores and rewards are the sums of samples with a
    response. Over no values a metric is NaN. `clip_ratio` is the share of samples as long as the
    tensor is wide. `use_critic=False` leaves out the metrics of `values`.

    Raises:
        FieldError: the batch lacks a field.
    """
    prompt_B, response_B = _lengths(batch)
    answered = response_B > 0
    chosen = batch.batch[fields.RESPONSE_MASK].bool()
    metrics: Metrics = {}
    sums = {"score": fields.TOKEN_LEVEL_SCORES, "rewards": fields.TOKEN_LEVEL_REWARDS}
    for name, key in sums.items():
        metrics |= _statistics(f"critic/{name}", batch.batch[key].sum(-1)[answered])
    keys = (fields.ADVANTAGES, fields.RETURNS, *([fields.VALUES] if use_critic else []))
    for key in keys:
        metrics |= _statistics(f"critic/{key}", batch.batch[key][chosen])
    if use_critic:
        returns, values = batch.batch[fields.RETURNS], batch.batch[fields.VALUES]
        metrics["critic/vf_explained_var"] = _explained_variance(returns, values, chosen)
    width = batch.batch[fields.RESPONSES].shape[-1]
    metrics |= _length_metrics("response_length", response_B, width)
    metrics |= _length_metrics("response_length_non_aborted", response_B[answered], width)
    metrics["response/aborted_ratio"] = float((~answered).float().mean())
    metrics |= _length_metrics("prompt_length", prompt_B, batch.batch[fields.PROMPTS].shape[-1])
    for column, name in PER_ROW.items():
        if column in batch.non_tensor_batch:
            numbers = np.asarray(batch.non_tensor_batch[column], dtype=np.float64)
            metrics |= _statistics(name, torch.from_numpy(numbers))
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> Metrics:
    """Return `timing_s/<span>` in seconds, and `timing_per_token_ms/<span>` in milliseconds.

    `timing_raw`: span → seconds. The time of "gen" is divided by the number of response tokens,
    that of `OVER_ALL_TOKENS` by the number of all tokens; other spans have no time per token.
    """
    prompt_B, response_B = _lengths(batch)
    responses = float(response_B.sum())
    tokens = {"gen": responses, **dict.fromkeys(OVER_ALL_TOKENS, responses + float(prompt_B.sum()))}
    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in timing_raw.keys() & tokens.keys():
        each = timing_raw[name] * 1000 / tokens[name] if tokens[name] else 0.0
        metrics[f"timing_per_token_ms/{name}"] = each
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> Metrics:
    """Return the tokens of the step, its time in seconds, and tokens per second and GPU.

    Reads `meta_info["global_token_num"]` and `timing_raw["step"]`. Raises `FieldError` if one is
    missing.
    """
    if GLOBAL_TOKENS not in batch.meta_info:
        text = f"meta_info has no {GLOBAL_TOKENS!r}; set it to the numbers of tokens of all samples"
        raise FieldError(f"compute_throughout_metrics: {text}", field=GLOBAL_TOKENS)
    if STEP not in timing_raw:
        has = ", ".join(timing_raw) or "nothing"
        text = f"timing_raw has no {STEP!r}, the seconds of the step; it has: {has}"
        raise FieldError(f"compute_throughout_metrics: {text}", field=STEP)
    total, seconds = sum(batch.meta_info[GLOBAL_TOKENS]), timing_raw[STEP]
    found = {"total_num_tokens": total, "time_per_step": seconds}
    found["throughput"] = total / (seconds * n_gpus)
    return {f"perf/{name}": value for name, value in found.items()}


def reduce_metrics(metrics: dict[str, object]) -> dict[str, object]:
    """Replace the values of each metric by one number, in place, and return the dict.

    The number is the largest value if the name contains "max", the smallest if it contains "min",
    and else the mean, NaN without values. Values are a number, or a list, a tensor or an array of
    numbers.

    Raises:
        FieldError: a value is not a number, or there is none to find the largest or smallest of.
    """
    for name, values in metrics.items():
        parts = values if isinstance(values, list | tuple) else [values]
        local = [part.detach().cpu() if isinstance(part, Tensor) else part for part in parts]
        try:
            array = np.asarray(local)
            if array.size and array.dtype.kind not in "biuf":
                raise TypeError("not numbers")
            if "max" in name or "min" in name:
                metrics[name] = float(array.max() if "max" in name else array.min())
            else:
                metrics[name] = float(array.mean()) if array.size else math.nan
        except (TypeError, ValueError):
            text = f"{name!r} must hold numbers, or lists of them of one length, got {values!r}"
            raise FieldError(f"reduce_metrics: {text}", field=name) from None
    return metrics


def _lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the numbers of prompt and of response tokens; both [B] float."""
    if "prompt_length" in batch.batch and "response_length" in batch.batch:
        return batch.batch["prompt_length"].float(), batch.batch["response_length"].float()
    width = batch.batch[fields.RESPONSES].shape[-1]
    mask = batch.batch[fields.ATTENTION_MASK].bool().float()
    start = mask.shape[-1] - width
    return mask[:, :start].sum(-1), mask[:, start:].sum(-1)


def _length_metrics(name: str, length_B: Tensor, width: int) -> Metrics:
    clipped = float((length_B == width).float().mean())  # NaN without samples
    return {**_statistics(name, length_B), f"{name}/clip_ratio": clipped}


def _statistics(name: str, values: Tensor) -> Metrics:
    """Return mean, maximum and minimum of all values; NaN without values."""
    if not values.numel():
        return {f"{name}/{kind}": math.nan for kind in ("mean", "max", "min")}
    values = as_float(values.detach())
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{kind}": float(value) for kind, value in found.items()}


def _explained_variance(returns: Tensor, values: Tensor, chosen: Tensor) -> float:
    """Return 1 − var(returns − values) / var(returns); NaN for fewer than two tokens."""
    if int(chosen.sum()) < 2:
        return math.nan
    error = masked_var(returns - values, chosen)
    return float(1 - error / (masked_var(returns, chosen) + EPSILON))
