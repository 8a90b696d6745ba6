"""Compare SGLang with transformers for models that were not tested with it.

SGLang has its own implementation of each architecture. Some generate other numbers: 0.5.23 ignores
the sliding window of Mistral and Qwen2, for example, and computes OLMo 3 differently. No error says
so, and digests of weights do not show it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.models.loading import load_causal_lm
from quadriga.rollout.sglang.process import NAME

TESTED = ("llama", "qwen2")
"""Values of `model_type` that tests/real_engines compares with `hf`, without sliding windows."""

_TOKENS = 48
# Largest difference of a log-probability, in nats. Correct models differ by rounding, incorrect
# ones by about the size of a log-probability.
_TOLERANCE = {torch.float32: 1e-2}
_TOLERANCE_16_BIT = 0.5
_LIMITED = ("sliding", "chunked", "local")
"""Parts of the names of layers that do not attend to all tokens before."""

Score = Callable[[Tensor, Tensor], Tensor]
"""`RolloutEngine.score`."""


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Return the most tokens that some layer attends to; None if all layers attend to all."""
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(size, int) or getattr(text, "use_sliding_window", True) is False:
        return None
    if kinds is not None and not any(part in str(kind) for kind in kinds for part in _LIMITED):
        return None
    return size


def probe_length(config: PreTrainedConfig, longest: int | None) -> int | None:
    """Return how many tokens to compare; None for a model that was tested.

    Args:
        longest: the most tokens of a sequence. A window that is not shorter changes nothing.
    """
    window = sliding_window(config)
    if window is not None and longest is not None and window >= longest:
        window = None
    if window is None and config.model_type in TESTED:
        return None
    tokens = _TOKENS + (window or 0)
    return tokens if longest is None else min(tokens, longest)


def check_numbers(
    score: Score, model: ModelConfig, config: PreTrainedConfig, dtype: torch.dtype, tokens: int
) -> None:
    """Compare the scores of SGLang, which holds the weights of the folder, with transformers.

    The model is loaded once more, in host memory, and freed again.

    Raises:
        ModelError: the log-probabilities differ.
    """
    vocabulary: int = config.get_text_config().vocab_size
    ids = ((torch.arange(tokens) * 7 + 5) % vocabulary)[None]
    found = score(ids, torch.ones_like(ids))[0, 1:]
    reference = load_causal_lm(
        model.path,
        dtype=dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
    with torch.inference_mode():
        log_probs = reference(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    expected = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    differences = (found - expected).abs()
    worst = float(differences.max())
    if worst <= _TOLERANCE.get(dtype, _TOLERANCE_16_BIT):
        return
    token = int(differences.argmax()) + 1
    window = sliding_window(config)
    hint = f" (its layers have a window of {window} tokens)" if window else ""
    raise ModelError(
        f"rollout engine {NAME!r}: SGLang computes model_type {config.model_type!r} differently "
        f"from transformers: the log-probability of token {token} of a probe differs by "
        f"{worst:.2g} nats{hint}, so responses would be of another distribution than the one that "
        "is trained; use rollout.name=hf or vllm",
        path=config.name_or_path,
    )
