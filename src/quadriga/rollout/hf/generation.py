"""Generation of one micro-batch with a model of transformers: prefill, decoding, compaction.

Shapes: b rows, P prompt columns, R response columns, V vocabulary entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quadriga.models.vision.rows import MultiModalRows
from quadriga.parallel.packing import first_row_with_same_prompt
from quadriga.rollout.hf.kv_cache import (
    CacheBuffers,
    growing_cache,
    release_cache,
    reorder_cache,
    sees_all_tokens,
)
from quadriga.rollout.params import SamplingParams
from quadriga.rollout.sampling import draw
from quadriga.rollout.stop_strings import StopStrings

COMPACT_BELOW = 0.75
"""Ended rows leave the batch when at most this share of its rows is still generating. Compaction
copies the cache, so it does not pay for every single row."""


class CachedModel:
    """A model that continues sequences with a cache."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._parameters = set(inspect.signature(module.forward).parameters)

    def forward(
        self,
        cache: Cache,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        images: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Run the model on new tokens [b, added] of each row; return the last logits [b, V].

        `positions` are [b, added], or [3, b, added] of tokens beside which there are `images`.
        """
        return run_with_cache(self.module, self._parameters, cache, ids, mask, positions, images)


def run_with_cache(
    module: PreTrainedModel,
    parameters: Container[str],
    cache: Cache,
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    images: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run a model, whose `forward` has `parameters`; see `CachedModel.forward`."""
    arguments: dict[str, object] = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "past_key_values": cache,
        "cache_params": cache,  # the name in models without attention
        "use_cache": True,
        "logits_to_keep": 1,
    }
    arguments |= images or {}
    known = {name: value for name, value in arguments.items() if name in parameters}
    logits: Tensor = module(**known).logits
    return logits[:, -1]


def takes_bias(module: PreTrainedModel, cache: Cache) -> bool:
    """Return whether every layer takes a bias [b, 1, 1, columns] as mask, and uses it as it is."""
    return (
        bool(getattr(module, "_supports_attention_backend", False))
        and module.config._attn_implementation in ("eager", "sdpa")
        and sees_all_tokens(cache)
    )


# The columns of a micro-batch are the prompt columns in use, then one column for each new token.
# Three rows, of which 0 and 1 share a prompt; P = 4, max_new_tokens 3:
#
#             prompt_ids     columns in use    position of the first new token
#   row 0     ·  · 11 12       · 11 12                  2
#   row 1     ·  · 11 12       · 11 12                  2
#   row 2     · 13 14 15      13 14 15                  3
#
# Column 0 is padding in every row, so `prompt_width` is 3. The prefill runs the distinct prompts
# (row 0 and row 2) and gives row 0 1 2 the cache rows 0 0 1. `visible` has 3 + 3 columns and is
# False at the padding (row 0 and 1, column 0). When token t is appended it is in column 3 + t, and
# the model receives the first 3 + t + 1 columns.
#
# Compaction after row 1 ended: 2 of 3 rows are running, and 2 ≤ 0.75 · 3.
#
#              before     after
#   active      0 1 2      0 2      rows of the micro-batch to which the tensors below belong
#   seeds       s s s      s s      `seeds`, `positions`, `mask` and the cache have one row for each
#   positions   3 3 4      3 4      active row; `ids`, `log_probs`, `lengths` and `stopped` keep all
#                                   rows and are indexed by `active`
#
# `mask` tells the model which columns to hide. Its form depends on the layers of the model:
#
# - None: no row has padding.
# - a bias [b, 1, 1, columns], a large negative number where `visible` is False: every layer attends
#   to all tokens before the query. Layers use it as it is, and it is made once.
# - `visible` [b, columns]: some layers have windows, chunks, ALiBi or a recurrent state. The model
#   makes the mask of each kind of layer from it, for every token.


class Generation:
    """The generation of one micro-batch: `prefill`, `decode`, `collect`."""

    def __init__(
        self,
        model: CachedModel,
        sampling: SamplingParams,
        seeds: Tensor,
        stop_strings: StopStrings | None,
        buffers: CacheBuffers,
    ) -> None:
        self.model = model
        self.device = model.device
        self.stop_strings = stop_strings
        self.buffers = buffers
        self.sampling = sampling
        self.seeds = seeds
        count, width = len(seeds), sampling.max_new_tokens
        self.ids = torch.full((count, width), sampling.pad_token_id, device=self.device)
        self.log_probs = torch.zeros(count, width, device=self.device)
        self.lengths = torch.full((count,), width, device=self.device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.end_tokens = torch.tensor(
            sampling.end_token_ids, dtype=torch.int64, device=self.device
        )
        self.active = torch.arange(count, device=self.device)

    def prefill(
        self, prompt_ids: Tensor, attention_mask: Tensor, images: MultiModalRows | None = None
    ) -> None:
        """Run the model on the distinct prompts, then copy their cache rows to every row.

        Prompts with equal tokens and different images are distinct.
        """
        valid = attention_mask.bool()
        first_column = int(valid.any(0).long().argmax())
        valid = valid[:, first_column:]
        # Padding may have any id, also one that the embedding does not have.
        prompts = prompt_ids[:, first_column:].masked_fill(~valid, 0)
        owner = _first_row_with_same_prompt(prompts, valid, images)
        distinct, prompt_of_row = torch.unique(owner, return_inverse=True)
        prompt_of_row = prompt_of_row.to(self.device)
        prompt_mask = valid[distinct].to(self.device)
        self.cache = growing_cache(self.model.module.config, self.buffers)
        padded = not bool(valid.all())
        positions, pixels = (prompt_mask.cumsum(1) - 1).clamp(min=0), {}
        following = prompt_mask.sum(1)
        if images is not None:
            owners = images.select(distinct)
            pixels = {name: t.to(self.device) for name, t in owners.joined().items()}
            positions = owners.position_ids[..., first_column:].transpose(0, 1).to(self.device)
            # The first new token is behind the largest number of the prompt in any dimension.
            following = positions.amax((0, 2)) + 1
        logits = self.model.forward(
            self.cache,
            prompts[distinct].to(self.device),
            prompt_mask if padded else None,
            positions,
            pixels,
        )
        reorder_cache(self.cache, prompt_of_row)
        self.logits = logits.index_select(0, prompt_of_row)
        self.positions = following.index_select(0, prompt_of_row)
        self.prompt_width = prompt_mask.shape[1]
        self.mask = self._decoding_mask(prompt_mask, prompt_of_row) if padded else None

    def _decoding_mask(self, prompt_mask: Tensor, prompt_of_row: Tensor) -> Tensor:
        """Return `visible` [b, columns] or a bias [b, 1, 1, columns] for all columns to come."""
        new = prompt_mask.new_ones(len(prompt_of_row), self.sampling.max_new_tokens)
        visible = torch.cat([prompt_mask.index_select(0, prompt_of_row), new], 1)
        if not takes_bias(self.model.module, self.cache):
            return visible
        dtype = self.logits.dtype
        bias = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return bias.masked_fill_(~visible, torch.finfo(dtype).min)[:, None, None]

    def decode(self) -> None:
        """Sample a token for each active row and run the model on it, until every row has ended."""
        running = torch.ones_like(self.active, dtype=torch.bool)
        last = self.sampling.max_new_tokens - 1
        for t in range(last + 1):
            token, log_prob = draw(self.logits, self.sampling, self.seeds, t)
            # Rows that ended but were not removed yet are written too; `collect` masks them.
            self.ids[self.active, t] = token
            self.log_probs[self.active, t] = log_prob
            ended = self.active[running & (torch.isin(token, self.end_tokens) | self._complete(t))]
            self.lengths[ended] = t + 1
            self.stopped[ended] = True
            running = ~self.stopped[self.active]
            running_count = int(running.sum())
            if running_count == 0 or t == last:
                return
            if running_count <= COMPACT_BELOW * len(running):
                kept = running.nonzero()[:, 0]
                token, running = token[kept], running[kept]
                self._keep(kept)
            self._step(token, self.prompt_width + t + 1)

    def _complete(self, t: int) -> Tensor:
        """Return [b] bool: whether token t of each active row completes a stop string."""
        if self.stop_strings is None or t + 1 < self.sampling.min_new_tokens:
            return torch.zeros_like(self.active, dtype=torch.bool)
        rows = self.ids[self.active, : t + 1].tolist()
        return torch.tensor([self.stop_strings.completed_by_last(r) for r in rows]).to(self.device)

    def _keep(self, kept: Tensor) -> None:
        """Remove all rows from the batch but `kept`, indices into the active rows."""
        self.active = self.active[kept]
        self.seeds = self.seeds[kept]
        self.positions = self.positions[kept]
        if self.mask is not None:
            self.mask = self.mask[kept]
        reorder_cache(self.cache, kept)

    def _step(self, token: Tensor, columns: int) -> None:
        """Run the model on one new token of each active row; `columns` includes that token."""
        mask = None if self.mask is None else self.mask[..., :columns]
        self.logits = self.model.forward(self.cache, token[:, None], mask, self.positions[:, None])
        self.positions = self.positions + 1

    def collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask, log-probabilities and `stopped` on the CPU, masked behind the end.

        The cache is not used afterwards: its buffers are kept for the next micro-batch.
        """
        release_cache(self.cache)
        mask = torch.arange(self.ids.shape[1], device=self.device) < self.lengths[:, None]
        ids = self.ids.masked_fill(~mask, self.sampling.pad_token_id)
        log_probs = self.log_probs.masked_fill(~mask, 0.0)
        return ids.cpu(), mask.long().cpu(), log_probs.cpu(), self.stopped.cpu()


def _first_row_with_same_prompt(
    prompts: Tensor, valid: Tensor, images: MultiModalRows | None
) -> Tensor:
    """Return, for each row, the index [b] of the first row with the same tokens and images."""
    if images is not None:
        # The number of the images is one more column, as if it were a token before the prompt.
        prompts = torch.cat([images.image_numbers()[:, None], prompts], 1)
        valid = torch.cat([valid.new_ones(len(valid), 1), valid], 1)
    return first_row_with_same_prompt(prompts, valid)
