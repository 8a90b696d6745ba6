"""The models of the benchmark of a GRPO step: random weights in the shapes of Qwen2."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl_peer import Case


@dataclass(frozen=True)
class Size:
    """The shape of a model, what it computes with, and the cases that are measured with it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool
    dtype: str
    cases: dict[str, Case] = field(default_factory=dict)


SHORT = {
    "prompt 5 words, limit 64": Case(prompt_words=5, limit=64),
    "prompt 5 words, limit 256": Case(prompt_words=5, limit=256),
    "prompt 125 words, limit 64": Case(prompt_words=125, limit=64),
}
LONG = {
    "prompt 125 words, limit 512": Case(prompt_words=125, limit=512),
    "prompt 500 words, limit 256": Case(prompt_words=500, limit=256),
}
SIZES = {
    "1m": Size(192, 2, 6, 3, 512, 512, tied=False, dtype="float32", cases=SHORT),
    # Shapes of Qwen2.5-0.5B and -1.5B, for an accelerator.
    "0.5b": Size(896, 24, 14, 2, 4864, 151936, tied=True, dtype="bfloat16", cases=LONG),
    "1.5b": Size(1536, 28, 12, 2, 8960, 151936, tied=True, dtype="bfloat16", cases=LONG),
}
