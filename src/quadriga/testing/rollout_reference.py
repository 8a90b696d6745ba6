"""The reference of the rollout laws: a model computed by transformers alone, and its sampling.

Nothing here is shared with a rollout engine. The model computes one sequence at a time, without a
cache and without padding; the filters are loops over Python numbers.

Shapes: n tokens, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.observability.quiet import quiet_libraries
from quadriga.rollout.abilities import FilterOrder
from quadriga.rollout.base import SamplingParams

# A head size and a hidden size that the kernels of every engine support. The query projection is
# square, so that a transposed one has the expected shape.
_SHAPE = TinyModel(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=96,
    max_position_embeddings=128,
)
_TEXTS = ("one two three four five six seven eight nine ten",)
_HEAD_SCALE = 6.0
SQUARE_WEIGHT = "model.layers.1.self_attn.q_proj.weight"
"""A weight of the reference model with as many rows as columns."""


def write_reference_model(folder: str | Path) -> None:
    """Write the model of the rollout laws: a Llama with a window of 128 tokens.

    Its distributions are neither flat nor certain, so that each filter excludes something and equal
    best tokens do not occur.
    """
    write_tiny_model(folder, _TEXTS, _SHAPE)
    file = Path(folder) / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"] * _HEAD_SCALE
    save_file(weights, file, metadata={"format": "pt"})


class NaiveModel:
    """A causal language model of a folder, in float32, one whole sequence at a time."""

    def __init__(self, folder: str | Path) -> None:
        with quiet_libraries():
            self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32
            )
        self._model.train(False)
        self._logits: dict[tuple[int, ...], Tensor] = {}

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self._model.config.get_text_config().vocab_size)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of all weights, by checkpoint name."""
        return {name: t.detach().clone() for name, t in self._model.state_dict().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy some of the weights."""
        own = self._model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        self._logits.clear()

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [n, V] behind each of the n tokens, float32."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.no_grad():
                ids = torch.tensor([key])
                self._logits[key] = self._model(input_ids=ids, use_cache=False).logits[0].float()
        return self._logits[key]

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """Return the log-probability [n] of each token at temperature 1; 0 for the first."""
        log_p = self.logits(tokens).log_softmax(-1)
        chosen = log_p[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
        return torch.cat([chosen.new_zeros(1), chosen])


def distribution(
    logits_V: Tensor, sampling: SamplingParams, position: int, order: FilterOrder
) -> list[float]:
    """Return the probabilities [V] from which response token `position` is drawn."""
    logits = logits_V.double()
    if position < sampling.min_new_tokens:
        ends = [token for token in sampling.end_token_ids if token < len(logits)]
        logits = logits.index_fill(0, torch.tensor(ends, dtype=torch.int64), -math.inf)
    excluded = torch.tensor(sampling.excluded_token_ids, dtype=torch.int64)
    logits = logits.index_fill(0, excluded, -math.inf)
    if sampling.greedy:
        best = int(logits.argmax())
        return [float(token == best) for token in range(len(logits))]
    probs: list[float] = (logits / sampling.temperature).softmax(0).tolist()
    if order == "joint":
        kept = [_kept(name, probs, sampling) for name in ("top_k", "top_p", "min_p")]
        return _renormalised(probs, set.intersection(*kept))
    for name in order.split(", "):
        probs = _renormalised(probs, _kept(name, probs, sampling))
    return probs


def _kept(name: str, probs: Sequence[float], sampling: SamplingParams) -> set[int]:
    """Return the tokens that one filter keeps."""
    ordered = sorted(range(len(probs)), key=lambda token: -probs[token])
    if name == "top_k":
        return set(ordered if sampling.top_k == -1 else ordered[: sampling.top_k])
    if name == "min_p":
        return {token for token in ordered if probs[token] >= sampling.min_p * probs[ordered[0]]}
    if sampling.top_p == 1.0:
        return set(ordered)
    kept, before = set(), 0.0
    for token in ordered:
        if before >= sampling.top_p:
            break
        kept.add(token)
        before += probs[token]
    return kept


def _renormalised(probs: Sequence[float], kept: set[int]) -> list[float]:
    total = sum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


def completes(before: str, now: str, strings: Sequence[str]) -> bool:
    """Return whether one of `strings` ends within what `now` has more than `before`.

    A character of which only some bytes were there (U+FFFD) counts as more.
    """
    known = len(before.rstrip("\ufffd"))
    ends = (at + len(s) for s in strings for at in range(len(now)) if now.startswith(s, at))
    return any(end > known for end in ends)


def chi_square_p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Return how likely counts at least this far from `probs` are (Pearson's chi-square test).

    Tokens with fewer than five expected draws are one category. A token that was drawn although it
    has probability 0 gives 0.
    """
    total = sum(counts)
    if any(count and not p for count, p in zip(counts, probs, strict=True)):
        return 0.0
    rare = [i for i, p in enumerate(probs) if p * total < 5]
    cells = [(counts[i], p * total) for i, p in enumerate(probs) if p * total >= 5]
    rest = sum(probs[i] for i in rare) * total
    if rest >= 5:
        cells.append((sum(counts[i] for i in rare), rest))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    if len(cells) < 2:
        return 1.0
    # The survival function of chi-square with k degrees of freedom is Q(k/2, x/2).
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
