"""From padded batches to the tokens that must be computed, each once.

Shapes: B rows, S = P + R columns (prompt, response), N packed tokens, K targets.

A packed micro-batch is one row of N tokens: no padding, and a prompt that several rows share is
there once. Attention needs rows again: `RowLayout` says where each token goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ProtocolError, ShapeError
from quadriga.parallel.row_layout import RowLayout, TokenPlaces, prompts_apart, whole_rows


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
        layout = self.layout.to(device)
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
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    *,
    share_prompts: bool = True,
    split_attention: bool = True,
) -> PackedBatch:
    """Pack [B, P + R] rows (left-padded prompts, then responses) whose targets are `response_mask`.

    `share_prompts` computes a prompt that several rows have in common once. The result is the
    same function of the weights: a prompt's hidden states do not depend on what follows.
    `split_attention` lays prompts and responses out apart (`row_layout`).
    Raises `ShapeError` when shapes disagree, `ProtocolError` when a target has no token before it
    or is not attended to.
    """
    _check_shapes(input_ids, attention_mask, response_mask)
    width = response_mask.shape[1]
    prompt_width = input_ids.shape[1] - width
    valid = attention_mask.bool()
    position_BS = valid.long().cumsum(1) - 1
    owner = torch.arange(len(input_ids))
    if share_prompts:
        owner = first_row_with_same_prompt(input_ids[:, :prompt_width], valid[:, :prompt_width])
    places, kept = _places(position_BS, valid, owner, prompt_width)
    layout = prompts_apart(places) if split_attention else whole_rows(places)

    row, target = response_mask.bool().nonzero(as_tuple=True)
    column = target + prompt_width
    position = position_BS[row, column]
    if bool((position < 1).any()) or not bool(valid[row, column].all()):
        raise ProtocolError(
            "response_mask marks a token that has no token before it or that attention_mask "
            "leaves out; every response needs a prompt of at least one token",
            field="response_mask",
        )
    return PackedBatch(
        input_ids=input_ids[kept][None],
        position_ids=places.column[None],
        layout=layout,
        predictors=places.token_of_slot[row, position - 1],
        labels=input_ids[row, column],
        places=row * width + target,
        shape=(len(response_mask), width),
    )


def _places(
    position_BS: Tensor, valid: Tensor, owner: Tensor, prompt_width: int
) -> tuple[TokenPlaces, Tensor]:
    """Number the tokens that are computed; also which places [B, S] these are."""
    kept = valid.clone()
    kept[owner != torch.arange(len(owner)), :prompt_width] = False
    index_BS = kept.flatten().long().cumsum(0).view_as(kept) - 1
    index_BS[:, :prompt_width] = index_BS[owner, :prompt_width]
    length = valid.sum(1)
    longest = max(int(length.max()), 1) if len(length) else 1
    row, column = valid.nonzero(as_tuple=True)
    token_of_slot = torch.zeros(len(valid), longest, dtype=torch.int64)
    token_of_slot[row, position_BS[row, column]] = index_BS[row, column]
    kept_row, kept_column = kept.nonzero(as_tuple=True)
    places = TokenPlaces(
        token_of_slot=token_of_slot,
        prompt_length=valid[:, :prompt_width].sum(1),
        length=length,
        owner=owner,
        row=kept_row,
        column=position_BS[kept_row, kept_column],
        in_prompt=kept_column < prompt_width,
    )
    return places, kept


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
