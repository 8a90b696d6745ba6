"""Refuse models whose sliding windows SGLang would ignore.

SGLang 0.5.23 computes some architectures with sliding windows as if every token attended to all
tokens before it (Mistral, Qwen2 and Phi-3, for example). Their log-probabilities are then those of
another model, from the first token behind the window on.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from quadriga.errors import ModelError
from quadriga.rollout.sglang.process import NAME

WINDOWED = ("gemma2", "olmo3")
"""Values of `model_type` whose windows were compared with `hf`; see tests/real_engines."""
_LIMITED = ("sliding", "chunked", "local")
"""Parts of the names of layers that do not attend to all tokens before."""


def check_sliding_windows(config: PreTrainedConfig, longest: int | None) -> None:
    """Raise `ModelError` if SGLang ignores a sliding window of this model.

    Args:
        longest: the most tokens of a sequence; a window that is not shorter changes nothing.
    """
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = getattr(text, "layer_types", None)
    if not isinstance(size, int) or getattr(text, "use_sliding_window", True) is False:
        return
    if kinds is not None and not any(part in str(kind) for kind in kinds for part in _LIMITED):
        return
    if (longest is not None and size >= longest) or config.model_type in WINDOWED:
        return
    raise ModelError(
        f"rollout engine {NAME!r}: the attention window of {size} tokens of model_type "
        f"{config.model_type!r} is ignored by SGLang, or was not tested with it, so responses "
        "could be of another distribution than the one that is trained; tested: "
        f"{', '.join(WINDOWED)}. Use rollout.name=hf or vllm",
        path=config.name_or_path,
    )
