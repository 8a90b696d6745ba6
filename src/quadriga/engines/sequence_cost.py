"""What the sequences of a model cost, from the config of the model.

Reads the config only, so that the controller can balance a batch without the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quadriga.config.schema import AttentionName
from quadriga.engines.base import HeadKind
from quadriga.parallel.costs import CostModel, ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Config = Mapping[str, object]
"""The keys of a config.json."""

# Names of a size in the configs of transformers; the first one that a config has counts.
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff")
_EXPERT_MLP = ("moe_intermediate_size", *_MLP)
_EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
# Kind of a layer → names of its window's size. A kind that is in neither table attends to all
# earlier tokens: names of new kinds of attention need not have the word in them.
_SLIDING = ("sliding_window", "sliding_window_size")
_WINDOWS = {
    "sliding_attention": _SLIDING,
    "hybrid_sliding": _SLIDING,  # sliding attention beside a recurrent state
    "chunked_attention": ("attention_chunk_size",),
    "local": ("window_size",),
}
_NO_ATTENTION = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe", "mlp"})


def sequence_cost(
    config: PreTrainedConfig, head: HeadKind, device_type: str, attention: AttentionName = "auto"
) -> CostModel:
    """Return what prompts and responses cost in a training engine.

    Args:
        config: of the model.
        head: what the output layer computes.
        device_type: "cpu", "cuda" or "npu".
        attention: `engine.attention`.
    """
    # To compute a shared prompt once needs a mask or rows of different lengths, which the SDPA
    # kernel of accelerators lacks.
    once = device_type == "cpu" or (device_type == "cuda" and attention != "sdpa")
    outputs = None if head == "lm" else 1
    return CostModel.of_shape(model_shape(config), outputs=outputs, prompt_attention_once=once)


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the sizes of the text model of a config.

    Sizes that a config does not name are those of a plain transformer: head size hidden / heads, an
    MLP of 4 × hidden. The cost is for comparing sequences, so a factor that all tokens have in
    common does not matter.
    """
    # As a dict: the attributes of configs whose layers differ cannot be read for the whole model.
    text_config = config.get_text_config()
    text: Config = text_config.to_dict()
    hidden = _size(text, ("hidden_size", "n_embd", "d_model"), 1)
    layers = _size(text, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1)
    heads = _size(text, ("num_attention_heads", "n_head", "n_heads"), 1)
    head_size = _size(text, ("head_dim",), max(1, hidden // heads))
    key_heads = _size(text, ("num_key_value_heads",), heads)
    experts = _size(text, _EXPERTS_OF_TOKEN, 0)
    mlp = _size(text, _EXPERT_MLP if experts else _MLP, 4 * hidden)
    return ModelShape(
        hidden_size=hidden, attention_size=heads * head_size, key_value_size=key_heads * head_size,
        mlp_size=mlp * max(1, experts), vocabulary=_size(text, ("vocab_size",), 1),
        windows=_windows(text, _kinds(text_config), layers),
    )  # fmt: skip


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer, [] if the config names none.

    Some configs compute it, so that the dict of the config does not have it.
    """
    for name in ("layer_types", "attention_layers"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and kinds:
            return [str(kind) for kind in kinds]
    return []


def _windows(text: Config, kinds: Sequence[str], layers: int) -> tuple[int | None, ...]:
    """Return for each layer the keys of a query: None for all earlier ones, 0 for no attention."""
    if not kinds:
        window = _size(text, ("sliding_window",), 0)
        uses = text.get("use_sliding_window", True)
        return (window if window and uses else None,) * layers
    windows: list[int | None] = []
    for kind in kinds:
        if kind in _WINDOWS:
            windows.append(_size(text, _WINDOWS[kind], 0) or None)
        else:
            windows.append(0 if kind in _NO_ATTENTION else None)
    return tuple(windows)


def _size(text: Config, names: tuple[str, ...], default: int) -> int:
    """Return the first of `names` that is a number, or the mean of a list with one per layer."""
    for name in names:
        value = text.get(name)
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        if numbers and not isinstance(value, bool):
            return sum(numbers) // len(numbers)
    return default
