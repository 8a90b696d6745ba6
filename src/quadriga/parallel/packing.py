"""From padded batches to the tokens that must be computed, each once.

Shapes: B rows, S = P + R columns (prompt, response), L longest row, N packed tokens, K targets.

A packed micro-batch is one row of N tokens: no padding, and a prompt that several rows share is
there once. Attention needs rows again; `RowLayout` says where each token goes. Token i of a row
stands in column i, so the plain causal mask is right, and padding, which comes last, is never
attended to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ProtocolError, ShapeError


@dataclass(frozen=True)
class RowLayout:
    """Where packed tokens stand in rows.

    `token_of_slot` [B, L] int64: packed index in each slot (padding slots name token 0).
    `slot_of_token` [N] int64: flat slot (b * L + i) where a token's output is read.
    """

    token_of_slot: Tensor
    slot_of_token: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One packed micro-batch.

    `input_ids`, `position_ids` [1, N]; `layout`; `predictors` [K]: packed index of the token
    whose output predicts target k; `labels` [K]: the target's id; `places` [K]: flat place
    (b * R + t) of the target; `shape` (B, R).
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: RowLayout
    predictors: Tensor
    labels: Tensor
    places: Tensor
    shape: tuple[int, int]

    def unpack(self, values_K: Tensor) -> Tensor:
        """[K] -> [B, R], zero at every other place. Differentiable."""
        flat = values_K.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), values_K).view(self.shape)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        if self.input_ids.device == device:
            return self
        layout = RowLayout(
            self.layout.token_of_slot.to(device, non_blocking=True),
            self.layout.slot_of_token.to(device, non_blocking=True),
        )
        moved = [
            x.to(device, non_blocking=True)
            for x in (self.input_ids, self.position_ids, self.predictors, self.labels, self.places)
        ]
        ids, positions, predictors, labels, places = moved
        return PackedBatch(ids, positions, layout, predictors, labels, places, self.shape)


def first_row_with_same_prompt(prompts: Tensor, mask: Tensor) -> Tensor:
    """[B] index of the first row whose prompt (ids and mask, both [B, P]) equals row b's."""
    rows = torch.arange(len(prompts))
    if len(prompts) < 2:
        return rows
    visible = torch.where(mask, prompts, -1)
    _, group = torch.unique(visible, dim=0, return_inverse=True)
    first = torch.full((len(prompts),), len(prompts)).scatter_reduce(0, group, rows, "amin")
    return first[group]


def pack_rows(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, *, share_prompts: bool = True
) -> PackedBatch:
    """Pack [B, P + R] rows (left-padded prompts, then responses) whose targets are `response_mask`.

    `share_prompts` computes a prompt that several rows have in common once. The result is the
    same function of the weights: a prompt's hidden states do not depend on what follows.
    Raises `ShapeError` when shapes disagree, `ProtocolError` when a target has no token before it
    or is not attended to.
    """
    _check_shapes(input_ids, attention_mask, response_mask)
    rows_count, width = response_mask.shape
    prompt_width = input_ids.shape[1] - width
    valid = attention_mask.bool()
    position_BS = valid.long().cumsum(1) - 1
    owner = torch.arange(rows_count)
    if share_prompts:
        owner = first_row_with_same_prompt(input_ids[:, :prompt_width], valid[:, :prompt_width])
    kept = valid.clone()
    kept[owner != torch.arange(rows_count), :prompt_width] = False
    index_BS = kept.flatten().long().cumsum(0).view_as(kept) - 1
    index_BS[:, :prompt_width] = index_BS[owner, :prompt_width]

    longest = max(int(position_BS[:, -1].max()) + 1, 1) if rows_count else 1
    row, column = valid.nonzero(as_tuple=True)
    token_of_slot = torch.zeros(rows_count, longest, dtype=torch.int64)
    token_of_slot[row, position_BS[row, column]] = index_BS[row, column]
    kept_row, kept_column = kept.nonzero(as_tuple=True)
    kept_position = position_BS[kept_row, kept_column]

    target_row, target = response_mask.bool().nonzero(as_tuple=True)
    position = position_BS[target_row, target + prompt_width]
    attended = valid[target_row, target + prompt_width]
    if bool((position < 1).any()) or not bool(attended.all()):
        raise ProtocolError(
            "response_mask marks a token that has no token before it or that attention_mask "
            "leaves out; every response needs a prompt of at least one token",
            field="response_mask",
        )
    return PackedBatch(
        input_ids=input_ids[kept_row, kept_column][None],
        position_ids=kept_position[None],
        layout=RowLayout(token_of_slot, kept_row * longest + kept_position),
        predictors=token_of_slot[target_row, position - 1],
        labels=input_ids[target_row, target + prompt_width],
        places=target_row * width + target,
        shape=(rows_count, width),
    )


def _check_shapes(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> None:
    fits = input_ids.shape == attention_mask.shape and input_ids.ndim == response_mask.ndim == 2
    if not fits or len(input_ids) != len(response_mask):
        raise ShapeError(
            "input_ids and attention_mask must be [B, P + R] and response_mask [B, R]; got "
            f"{tuple(input_ids.shape)}, {tuple(attention_mask.shape)}, {tuple(response_mask.shape)}"
        )
    if input_ids.shape[1] <= response_mask.shape[1]:
        raise ShapeError(
            f"input_ids has {input_ids.shape[1]} columns and response_mask {response_mask.shape[1]}"
            ": no column is left for the prompt"
        )
