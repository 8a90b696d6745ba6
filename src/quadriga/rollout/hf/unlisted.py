"""A check of models whose architecture was never compared with the naive loop.

`models/architectures.py` lists the architectures that were. For others (a model with its own code,
or one that a newer version of transformers added), eight tokens show whether the model is causal,
and whether its cache gives the same numbers as no cache when rows are repeated and removed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quadriga.errors import ModelError
from quadriga.rollout.hf.kv_cache import growing_cache, reorder_cache

CachedForward = Callable[[Cache, Tensor], Tensor]
"""(cache, new token ids [b, added]) -> the last logits [b, V]."""

# Largest difference of a log-probability, in nats. Correct models differ by rounding, incorrect
# ones by about the size of a log-probability.
_TOLERANCE = {torch.float64: 1e-2, torch.float32: 1e-2}
_TOLERANCE_16_BIT = 0.5

_TOKENS, _PREFIX = 8, 4


def check_generation(model: PreTrainedModel, device: torch.device, cached: CachedForward) -> None:
    """Compare `cached`, which continues a sequence, with a forward pass over all its tokens.

    Raises:
        ModelError: the logits differ, or the model cannot use a cache of transformers.
    """
    vocabulary: int = model.config.get_text_config().vocab_size
    ids = ((torch.arange(_TOKENS) * 7 + 5) % vocabulary)[None].to(device)
    with torch.inference_mode():
        whole = _log_probs(model(input_ids=ids).logits)[0]
        prefix = _log_probs(model(input_ids=ids[:, :_PREFIX]).logits)[0]
        problem = _difference(prefix, whole[:_PREFIX], model.dtype)
        if problem:
            raise _error(model, f"its tokens attend to later tokens: {problem}")
        try:
            steps = _generate(model, ids, cached)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            text = str(error).strip() or repr(error)
            raise _error(model, f"it cannot generate with a cache: {text}") from error
        problem = _difference(steps, whole[_PREFIX - 1 :], model.dtype)
        if problem:
            raise _error(model, f"it generates other numbers with a cache: {problem}")


def _generate(model: PreTrainedModel, ids: Tensor, cached: CachedForward) -> Tensor:
    """Return log-probabilities [tokens, V] of a row that is repeated, and then removed again."""
    cache = growing_cache(model.config)
    logits = [cached(cache, ids[:, :_PREFIX])]
    reorder_cache(cache, torch.tensor([0, 0], device=ids.device))
    for t in range(_PREFIX, _TOKENS):
        rows = 1 if t > _PREFIX else 2
        logits.append(cached(cache, ids[:, t : t + 1].expand(rows, 1))[-1:])
        if rows == 2:
            reorder_cache(cache, torch.tensor([1], device=ids.device))
    return _log_probs(torch.cat(logits))


def _log_probs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _difference(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Say by how much log-probabilities differ; None if only by rounding."""
    difference = float((found - expected).abs().max())
    if difference <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return None
    return f"log-probabilities differ by {difference:.2g} nats"


def _error(model: PreTrainedModel, problem: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} (model_type {model.config.model_type!r}) is not in "
        f"docs/concepts/architectures.md, and {problem}; use a model of a listed architecture",
        path=model.config.name_or_path,
    )
