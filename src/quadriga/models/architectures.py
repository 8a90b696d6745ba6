"""How each causal architecture is computed: which were compared with a naive loop, and how.

An architecture is a `model_type` of transformers. The naive loop runs one sequence at a time, for
each token the whole model without a cache. `tests/architectures` compares all tables below with it,
and `docs/concepts/architectures.md` shows them.

Training computes rows in one of two forms:

- packed: no padding, shared prompts once (`engines/attention`). All layers but attention
  must work token by token, and attention must go through the interface of transformers.
- padded: padding at the end of each row (`parallel.packing.left_align`). For every causal model.

Generation batches prompts in one of two forms:

- mixed lengths: padding before the prompts, which the model hides in each of its layers.
- equal lengths: prompts of one length together, without padding. Right for every model whose state
  is in a cache of transformers.

An architecture that is in no table (a model with its own code, or one that a newer version of
transformers added) is computed in the second form of both, after `rollout/unlisted.py` has checked
it.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quadriga.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RowForm = Literal["packed", "padded"]
"""The form of the rows in training."""

PromptForm = Literal["mixed lengths", "equal lengths"]
"""Which prompts generation computes together."""


@dataclass(frozen=True)
class Architecture:
    """How an architecture is computed."""

    rows: RowForm
    prompts: PromptForm


PACKED = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "cohere", "cohere2",
    "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3",
    "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo",
    "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "jetmoe",
    "kolibri1", "laguna", "llama", "llama4", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "modernbert-decoder", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "solar_open", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
"""Packed rows, mixed lengths."""

PADDED = (
    "axk2", "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "deepseek_v32", "doge",
    "dots3_note_text", "falcon", "falcon_h1", "gemma4_unified", "glm_moe_dsa", "gpt_neo",
    "gpt_neox_japanese", "gptj", "granitemoehybrid", "hy_v4", "inkling2_text", "inkling_text",
    "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba2", "mpt", "nemotron", "nemotron_h",
    "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "stablelm", "xglm", "zamba", "zamba2", "zaya",
)  # fmt: skip
"""Padded rows, mixed lengths."""

EQUAL_LENGTHS = ("deepseek_v4", "falcon_mamba", "mamba", "minimax_m3_vl_text")
"""Padded rows, equal lengths."""

VISION = ("qwen2_5_vl", "qwen2_vl")
"""Models of text and images: padded rows, mixed lengths. `images.py` says what they need."""

REFUSED: dict[str, tuple[str, ...]] = {
    "it is an encoder, whose tokens attend to later tokens": (
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
        "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "it is the decoder of an encoder-decoder model": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
        "musicgen", "musicgen_melody", "pegasus", "plbart", "prophetnet", "trocr", "whisper",
    ),
    "it takes images or sound, and its text model cannot be loaded alone": (
        "dots3_note", "emu3", "fuyu", "gemma3n", "git", "got_ocr2", "mllama", "moshi",
        "moss_transcribe_diarize", "phi4_multimodal",
    ),
    "its state is not in a cache of transformers, so generation cannot remove or repeat rows": (
        "minimax", "openai-gpt", "recurrent_gemma", "reformer", "rwkv", "xlstm",
    ),
    "its tokens attend to later tokens": ("cpmant", "xlm", "xlnet"),
    "it drafts tokens for another model": ("gemma4_assistant", "gemma4_unified_assistant"),
    "it computes patches of bytes instead of tokens": ("blt",),
}  # fmt: skip
"""Reason -> architectures that are refused for it."""

ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(PACKED, Architecture("packed", "mixed lengths")),
    **dict.fromkeys(PADDED, Architecture("padded", "mixed lengths")),
    **dict.fromkeys(EQUAL_LENGTHS, Architecture("padded", "equal lengths")),
}
"""`model_type` -> how it is computed, for models of text."""

VISION_ARCHITECTURES = dict.fromkeys(VISION, Architecture("padded", "mixed lengths"))
"""The same for models of text and images."""

UNLISTED = Architecture("padded", "equal lengths")
"""How every other architecture is computed that is not refused."""

_REASONS = {name: reason for reason, names in REFUSED.items() for name in names}


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return how the model of this config is computed."""
    known = {**ARCHITECTURES, **VISION_ARCHITECTURES}
    return known.get(config.model_type, UNLISTED)


def is_listed(config: PreTrainedConfig) -> bool:
    """Return whether the architecture was compared with the naive loop."""
    return config.model_type in ARCHITECTURES or takes_images(config)


def takes_images(config: PreTrainedConfig) -> bool:
    """Return whether the model computes images beside text."""
    return config.model_type in VISION_ARCHITECTURES


def check_architecture(model_type: str, path: str) -> None:
    """Check that the architecture `model_type` of the model in `path` is not refused.

    Raises:
        ModelError: the architecture is refused. Says why.
    """
    reason = _REASONS.get(model_type)
    if reason is not None:
        raise ModelError(
            f"model_type {model_type!r} of the model in {path} is not supported: {reason}; set the "
            "path to a causal language model (docs/concepts/architectures.md lists them)"
        )
