"""The cost of computing sequences: linear and quadratic in their tokens.

A forward pass over a prompt of P tokens with responses of R1, R2, … tokens has these FLOPs:

    all layers but attention   token    · (P + R1 + R2 + …)  a shared prompt counts once
    output layer               output   · (R1 + R2 + …)      only where a response is predicted
    attention                  per_pair · (pairs of a query and a key that it attends to)

The backward pass has twice as many, so the ratio of two costs is the same with gradients. Ranks,
mini-batches and micro-batches are balanced with this cost.

Shapes: B rows. Numpy only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
"""[B] tokens."""

Costs = NDArray[np.float64]
"""[B] FLOPs, or tokens for `TOKENS`."""


@dataclass(frozen=True)
class AttentionCost:
    """Attention of the layers that have one window.

    Attributes:
        per_pair: FLOPs of one query and one key, over all heads of these layers.
        window: the number of keys to which a query attends at most; None: all tokens up to it.
    """

    per_pair: float
    window: int | None = None

    def of_first(self, tokens: Counts) -> Costs:
        """Return the FLOPs [B] of the first `tokens` queries of a row."""
        # Query p (from 0) attends to min(p + 1, window) keys. Window 3, 5 tokens:
        #
        #   keys of the queries 0 1 2 3 4     1 2 3 3 3
        #   inside = 3                        3 · 4 / 2 = 6 for the first three, then 2 · 3 = 6
        inside = tokens if self.window is None else np.minimum(tokens, self.window)
        pairs: Costs = inside * (inside + 1) / 2 + (tokens - inside) * inside
        return self.per_pair * pairs


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide how its cost grows with the tokens.

    Attributes:
        hidden_size: entries of a hidden state.
        attention_size: heads × head size.
        key_value_size: key and value heads × head size.
        mlp_size: intermediate entries that a token computes; with experts, in its experts.
        vocabulary: rows of the output layer.
        windows: for each layer, the keys to which a query attends at most; None: all earlier
            tokens, 0: the layer has no attention (recurrence).
    """

    hidden_size: int
    attention_size: int
    key_value_size: int
    mlp_size: int
    vocabulary: int
    windows: tuple[int | None, ...]


@dataclass(frozen=True)
class CostModel:
    """What prompts and responses cost. The default counts the computed tokens.

    Attributes:
        token: FLOPs per token in all layers but attention.
        output: FLOPs of the output layer per response token.
        attention: the layers with attention, by window.
        prompt_attention_once: whether attention computes the queries of a shared prompt once, or in
            each row again (`parallel.attention_blocks` has both arrangements).
    """

    token: float = 1.0
    output: float = 0.0
    attention: tuple[AttentionCost, ...] = ()
    prompt_attention_once: bool = True

    @classmethod
    def of_shape(
        cls, shape: ModelShape, *, outputs: int | None = None, prompt_attention_once: bool = True
    ) -> CostModel:
        """Return the cost of a model; a matrix of n entries costs 2 · n FLOPs per token.

        The MLP is taken to have three matrices (gate, up, down).

        Args:
            outputs: numbers that the output layer computes for a token; None: the vocabulary.
        """
        # Hidden size 4, attention size 4, key and value size 2, MLP 8, 3 layers, vocabulary 10:
        #
        #   query and output projection    2 · 4 · 4 = 32 entries
        #   key and value projection       2 · 4 · 2 = 16
        #   MLP                            3 · 4 · 8 = 96
        #   token     3 layers · 2 · (32 + 16 + 96) = 864
        #   output    2 · 4 · 10 = 80
        #   per_pair  3 layers · (2 · 4 for the score + 2 · 4 for the value) = 48
        matrices = 2 * shape.attention_size + 2 * shape.key_value_size + 3 * shape.mlp_size
        layers = Counter(window for window in shape.windows if window != 0)
        return cls(
            token=2.0 * len(shape.windows) * shape.hidden_size * matrices,
            output=2.0 * shape.hidden_size * (shape.vocabulary if outputs is None else outputs),
            attention=tuple(
                AttentionCost(4.0 * count * shape.attention_size, window)
                for window, count in layers.items()
            ),
            prompt_attention_once=prompt_attention_once,
        )

    def of_prompts(self, prompt: Counts) -> Costs:
        """Return what each prompt costs [B], once for all rows that share it."""
        tokens: Costs = self.token * prompt.astype(np.float64)
        return tokens + self._attention(prompt) if self.prompt_attention_once else tokens

    def of_responses(self, prompt: Counts, response: Counts) -> Costs:
        """Return what each response costs [B], given the tokens of its prompt."""
        attention = self._attention(prompt + response)
        if self.prompt_attention_once:
            attention = attention - self._attention(prompt)
        tokens: Costs = (self.token + self.output) * response.astype(np.float64)
        return tokens + attention

    def _attention(self, tokens: Counts) -> Costs:
        total: Costs = np.zeros(len(tokens), dtype=np.float64)
        for layers in self.attention:
            total += layers.of_first(tokens)
        return total


TOKENS = CostModel()
"""Counts the computed tokens: each response, and a shared prompt once."""
