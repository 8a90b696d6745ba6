"""Generation of one micro-batch with a model of transformers: prefill, decoding, compaction.

Tokens are sampled by inverse CDF, with one uniform number for each (sample seed, token position).
So the tokens of a row are a function of its own seed and its own logits. They depend neither on the
number of workers nor on the other rows of the batch.

Shapes: B or b rows, P prompt columns, R response columns, V vocabulary entries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quadriga.errors import ModelError
from quadriga.models.architectures import architecture_of
from quadriga.models.images import MultiModalRows
from quadriga.models.routes import UNKNOWN, Routers
from quadriga.parallel.packing import first_row_with_same_prompt
from quadriga.rollout.abilities import SamplingParams
from quadriga.rollout.base import Continued
from quadriga.rollout.hf import kv_cache
from quadriga.rollout.responses import StopStrings, begun_responses

COMPACT_BELOW = 0.9
"""Ended rows leave the batch when at most this share of its rows is still generating. The cache is
copied then, and kernels are prepared anew for each number of rows."""


# One token


def _as_int64(value: int) -> int:
    """Return the int64 with the same 64 bits as the unsigned `value`; torch has no uint64 maths."""
    return value - (1 << 64) if value >> 63 else value


# Constants of splitmix64: 2^64 / golden ratio, and the two multipliers of its finalizer.
_GOLDEN = _as_int64(0x9E3779B97F4A7C15)
_MIX_1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = _as_int64(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift without the sign: `>>` on int64 would fill the upper bits with the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, positions: Tensor) -> Tensor:
    """Return [B, R] float64 numbers in [0, 1), functions of seed and token position alone.

    Args:
        seeds_B: int64.
        positions: [R] or [B, R] int64.
    """
    steps = (positions + 1) * _GOLDEN
    states = _mix(seeds_B + _GOLDEN)[:, None] + steps
    # A float64 has 53 bits of precision, so the upper 53 of the 64 bits are used.
    return _shift_right(_mix(states), 11).to(torch.float64) * 2.0**-53


def _without_excluded(scores_BV: Tensor, sampling: SamplingParams, positions_B: Tensor) -> Tensor:
    """Set the scores of tokens that must not be sampled at these positions to -inf.

    End tokens are among them while the response is shorter than its minimum.
    """

    def without(scores_BV: Tensor, tokens: Sequence[int]) -> Tensor:
        known = [token for token in tokens if token < scores_BV.shape[-1]]
        if not known:
            return scores_BV
        return scores_BV.index_fill(-1, torch.tensor(known, device=scores_BV.device), -math.inf)

    allowed_BV = without(scores_BV, sampling.excluded_token_ids)
    if not sampling.min_new_tokens:
        return allowed_BV
    early_B = positions_B < sampling.min_new_tokens
    return torch.where(early_B[:, None], without(allowed_BV, sampling.end_token_ids), allowed_BV)


def _filtered(scores_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Set the scores that top-k, then top-p, then min-p exclude to -inf.

    Top-k keeps scores that equal the k-th largest. Top-p keeps a token if the more likely tokens
    together have less than `top_p`, so the most likely token always stays. Min-p keeps a token with
    at least `min_p` times the probability of the most likely one.
    """
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        kth = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, -math.inf)
    if sampling.top_p < 1.0:
        # top_p 0.7, one row with the probabilities .15 .5 .05 .3:
        #
        #   sorted           .5    .3    .15   .05
        #   sum before       0     .5    .8    .95
        #   kept            yes    yes   no    no      so .5 and .3 remain
        ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= sampling.top_p
        )
        scores_BV = scores_BV.masked_fill(drop, -math.inf)
    if sampling.min_p > 0.0:
        # p ≥ min_p · p_max in logarithms; the normalisation is the same on both sides.
        least = scores_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < least, -math.inf)
    return scores_BV


def draw(
    logits_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor, positions_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    Args:
        uniform_B: the numbers of the rows at these positions (`uniform`).
        positions_B: int64, the index of each token in its response.

    Returns:
        [B] int64 tokens, and [B] float32 log-probabilities of the kind `sampling.log_probs`, nats.
    """
    logits = logits_BV.float()
    if sampling.greedy:
        token = _without_excluded(logits, sampling, positions_B).argmax(-1)
        log_prob = torch.zeros_like(logits[:, 0])
        return token, log_prob if sampling.log_probs == "sampled" else _log_prob(logits, token)
    scores = logits / sampling.temperature if sampling.temperature != 1.0 else logits
    allowed = _filtered(_without_excluded(scores, sampling, positions_B), sampling)
    probs = allowed.softmax(-1)
    token = _inverse_cdf(probs, uniform_B)
    wanted = {"policy": scores, "sampled": allowed, "temperature_1": logits}[sampling.log_probs]
    if wanted is allowed:  # the softmax is there already
        return token, probs.gather(-1, token[:, None])[:, 0].log()
    return token, _log_prob(wanted, token)


def _log_prob(scores_BV: Tensor, token_B: Tensor) -> Tensor:
    return scores_BV.gather(-1, token_B[:, None])[:, 0] - scores_BV.logsumexp(-1)


def _inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability is above the number u."""
    # Three rows, V = 4:
    #
    #            probabilities      cumulative            u      token
    #   row 0   .5  .3  .15  .05    .5  .8  .95  1.0    0.62      1      .5 ≤ .62 < .8
    #   row 1   .5  .3  .15  .05    .5  .8  .95  1.0    0.50      1      .5 is not above .5
    #   row 2    0  .4   0   .6      0  .4  .4   1.0    0.40      3      token 2 has probability 0
    #
    # The sums are in float64: in float32, tokens of a large vocabulary would be lost to rounding.
    # The last sum may still differ from 1, so u is scaled by it. `cumsum` with a dtype would hold
    # the float64 numbers twice, so they are summed in place.
    cdf = probs_BV.double().cumsum_(-1)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform_B[:, None] * total, right=True)
    # u · total can round up to total; the result is then the last token with probability above 0.
    last_possible = torch.searchsorted(cdf, total)
    return torch.minimum(token, last_possible)[:, 0]


# A micro-batch

Caches = kv_cache.SharedPrompts | kv_cache.RepeatedPrompts
Key = tuple[int, bytes]
"""Of a row: its seed and all its token ids, of prompt and response. By it a call finds the cache of
a row that was paused. The cache of a row that is not found is computed again."""


class CachedModel:
    """A model that continues sequences with a cache. With `routers` it records the experts of each
    token."""

    def __init__(
        self, module: PreTrainedModel, device: torch.device, routers: Routers | None = None
    ) -> None:
        self.module, self.routers = module, routers
        self.device = device
        self._parameters = set(inspect.signature(module.forward).parameters)
        self.shares_prompts = kv_cache.use_decode_attention(module)
        layers = kv_cache.growing_cache(module.config).layers
        mixes = architecture_of(module.config).prompts == "mixed lengths"
        self.joins_rows = mixes and {type(layer).__name__ for layer in layers} <= {*kv_cache.JOINED}
        """Whether rows of several caches can be continued together."""
        takes = self.shares_prompts or kv_cache.RepeatedPrompts(module).takes_bias
        self.adds_several = self.joins_rows and takes
        """Whether several tokens can be added to rows, of each row another number."""

    def new_cache(self) -> kv_cache.SharedPrompts | kv_cache.RepeatedPrompts:
        """Return an empty cache."""
        kind = kv_cache.SharedPrompts if self.shares_prompts else kv_cache.RepeatedPrompts
        return kind(self.module)

    def forward(
        self,
        cache: Cache,
        ids: Tensor,
        positions: Tensor | None = None,
        others: Mapping[str, object] | None = None,
    ) -> Tensor:
        """Run the model on new tokens [b, added] of each row; return the last logits [b, V].

        `positions` are [b, added], or [3, b, added] of tokens beside which there are images.
        `others` are further arguments of the model.
        """
        arguments: dict[str, object] = {
            "input_ids": ids,
            "position_ids": positions,
            "past_key_values": cache,
            "cache_params": cache,  # the name in models without attention
            "use_cache": True,
            "logits_to_keep": 1,
            # A config.json can ask for the loss of the routers, which a cache makes fail.
            "output_router_logits": False,
        }
        known = {name: value for name, value in arguments.items() if name in self._parameters}
        if self.routers is not None:
            self.routers.follow(None, record=True)
        logits: Tensor = self.module(**known, **(others or {})).logits
        return logits[:, -1]


# The columns of a micro-batch are the prompt columns in use, then one column for each new token.
# Three rows, of which 0 and 1 share a prompt; P = 4, max_new_tokens 3:
#
#             prompt_ids     columns in use    position of the first new token
#   row 0     ·  · 11 12       · 11 12                  2
#   row 1     ·  · 11 12       · 11 12                  2
#   row 2     · 13 14 15      13 14 15                  3
#
# Column 0 is padding in every row, so it is not computed. The prefill runs the distinct prompts
# (row 0 and row 2); the rows 0 1 2 continue the prompts 0 0 1.
#
# Compaction after row 0 ended: 2 of 3 rows are running, and 2 ≤ 0.9 · 3.
#
#              before     after
#   active      0 1 2      1 2      rows of the micro-batch to which the tensors below belong
#   uniform     u u u      u u      `uniform`, `positions` and the cache have one row for each
#   positions   3 3 4      3 4      active row; `ids`, `log_probs`, `lengths` and `stopped` keep all
#                                   rows and are indexed by `active`


@dataclass(frozen=True)
class KeptRows:
    """Rows between two calls. Their last tokens are not in the cache.

    Attributes:
        positions: [b] int64, of the last tokens.
        keys: seed and tokens of each row.
    """

    rows: Caches
    positions: Tensor
    keys: list[Key]

    def part(self, places: Sequence[int]) -> KeptRows:
        """Return some of the rows. A row may be repeated."""
        order = torch.tensor(places, device=self.positions.device)
        keys = [self.keys[place] for place in places]
        return KeptRows(self.rows.part(order), self.positions[order], keys)


class FoundRow(NamedTuple):
    """A row of a call of which the beginning is kept: at `place` in the part with this number.
    `added` of its tokens, the last kept one included, are to be computed."""

    size: int  # bits of this number: rows of one size are computed together
    number: int
    place: int
    row: int
    added: int


def _joined(caches: Sequence[Caches]) -> Caches:
    """Return the rows of caches of one model in one cache, the first of these."""
    first, *others = caches
    if others:
        first.join(others)  # type: ignore[arg-type]  # caches of one model have one class
    return first


class Generation:
    """The generation of one micro-batch: `begin`, `decode`, `collect`.

    Attributes:
        kept: the rows that a later call may continue.
        routes: [b, P + R, L, K], the experts of each token that was computed, else `UNKNOWN`; None:
            they are not recorded.
    """

    rows: Caches
    logits: Tensor
    positions: Tensor

    def __init__(
        self,
        model: CachedModel,
        sampling: SamplingParams,
        seeds: Tensor,
        stop_strings: StopStrings | None,
        continued: Continued,
        keys: Sequence[Key] = (),
    ) -> None:
        self.model, self.keys = model, keys
        self.device = model.device
        self.stop_strings = stop_strings
        self.sampling = sampling
        count, width = len(seeds), continued.at_most
        self.sampled = continued.sampled.to(self.device)  # of each active row, before
        self.width = width
        columns = torch.arange(width, device=self.device)
        self.uniform = uniform(seeds, self.sampled[:, None] + columns)
        self.ids = torch.full((count, width), sampling.pad_token_id, device=self.device)
        self.log_probs = torch.zeros(count, width, device=self.device)
        self.lengths = torch.full((count,), width, device=self.device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=self.device)
        self.end_tokens = torch.tensor(
            sampling.end_token_ids, dtype=torch.int64, device=self.device
        )
        self.kept: list[KeptRows] = []
        self.routes: Tensor | None = None
        self.keeps_ended = continued.keep_ended and model.adds_several and bool(keys)

    def begin(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        images: MultiModalRows | None = None,
        kept: Sequence[KeptRows] = (),
        found: Sequence[FoundRow] = (),
    ) -> None:
        """Run the model up to the first new token of each row.

        Args:
            kept: rows of earlier calls.
            found: the rows that are among them, in order. The other prompts are computed.
        """
        self.begun = begun_responses(prompt_ids, self.sampled)
        self.prompt_columns = prompt_ids.shape[1]
        parts: list[tuple[Caches, Tensor, Tensor]] = []
        for _, own in groupby(found, lambda one: one.size):
            parts.append(self._added(prompt_ids, kept, [*own]))
        old = [one.row for one in found]
        rows = torch.tensor([i for i in range(len(prompt_ids)) if i not in {*old}])
        if len(rows):
            of_rows = None if images is None else images.select(rows)
            parts.append(self._prefilled(rows, prompt_ids[rows], attention_mask[rows], of_rows))
        caches, logits, positions = zip(*parts, strict=True)
        self.rows = _joined(caches)
        self.logits, self.positions = torch.cat(logits), torch.cat(positions)
        self.active = torch.tensor([*old, *rows.tolist()], device=self.device)
        self.uniform, self.sampled = self.uniform[self.active], self.sampled[self.active]

    def _added(
        self, prompt_ids: Tensor, kept: Sequence[KeptRows], found: Sequence[FoundRow]
    ) -> tuple[Caches, Tensor, Tensor]:
        """Run the model on the tokens behind what is kept of rows.

        Row 0 has two more tokens, and row 1 has one; the last kept token is computed with them:

            prompt_ids            kept       added      position
            1 2 3 4 5 6 7 8       1 … 5      5 6 7 8    4 5 6 7
            · · 1 2 3 4 5 6       1 … 5      · · 5 6    · · 4 5
        """
        parts = list[KeptRows]()
        for number, own in groupby(found, lambda one: one.number):
            parts.append(kept[number].part([one.place for one in own]))
        rows = _joined([part.rows for part in parts])
        added = torch.tensor([one.added for one in found], device=self.device)
        most = int(added.max())
        offsets = torch.arange(most, device=self.device) - (most - added)[:, None]
        new, first = offsets >= 0, torch.cat([part.positions for part in parts])
        ids = prompt_ids[[one.row for one in found], -most:].to(self.device).masked_fill(~new, 0)
        positions = first[:, None] + offsets.clamp(min=0)
        logits = self.model.forward(rows.cache, ids, positions, rows.arguments(new))
        self._note_routes(torch.tensor([one.row for one in found]), new, self.prompt_columns - most)
        return rows, logits, first + added

    def _prefilled(
        self,
        rows: Tensor,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        images: MultiModalRows | None = None,
    ) -> tuple[Caches, Tensor, Tensor]:
        """Run the model on the distinct prompts, which the rows with these numbers continue.

        Prompts with equal tokens and different images are distinct.
        """
        valid = attention_mask.bool()
        first_column = int(valid.any(0).long().argmax())
        valid = valid[:, first_column:]
        # Padding may have any id, also one that the embedding does not have.
        prompts = prompt_ids[:, first_column:].masked_fill(~valid, 0)
        if images is None:
            owner = first_row_with_same_prompt(prompts, valid)
        else:
            # The number of the images is one more column, as if it were a token before the prompt.
            numbered = torch.cat([images.image_numbers()[:, None], prompts], 1)
            with_number = torch.cat([valid.new_ones(len(valid), 1), valid], 1)
            owner = first_row_with_same_prompt(numbered, with_number)
        distinct, prompt_of_row = torch.unique(owner, return_inverse=True)
        prompt_of_row = prompt_of_row.to(self.device)
        prompt_mask = valid[distinct].to(self.device)
        padded = not bool(valid.all())
        positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
        others: dict[str, object] = {"attention_mask": prompt_mask} if padded else {}
        following = prompt_mask.sum(1)
        if images is not None:
            owners = images.select(distinct)
            others |= {name: t.to(self.device) for name, t in owners.joined().items()}
            positions = owners.position_ids[..., first_column:].transpose(0, 1).to(self.device)
            # The first new token is behind the largest number of the prompt in any dimension.
            following = positions.amax((0, 2)) + 1
        cache = self.model.new_cache()
        ids = prompts[distinct].to(self.device)
        logits = self.model.forward(cache.cache, ids, positions, others)
        self._note_routes(rows, prompt_mask, first_column, prompt_of_row)
        cache.begin_rows(prompt_of_row, prompt_mask if padded else None)
        logits, following = (x.index_select(0, prompt_of_row) for x in (logits, following))
        return cache, logits, following

    def decode(self) -> None:
        """Sample a token for each active row and run the model on it, until every row has ended."""
        self.running = torch.ones_like(self.active, dtype=torch.bool)
        running_count = len(self.running)
        last = self.width - 1
        for self.t in range(last + 1):
            t = self.t
            places = self.sampled + t
            self.token, log_prob = draw(self.logits, self.sampling, self.uniform[:, t], places)
            # Rows that ended but were not removed yet are written too; `collect` masks them.
            self.ids[self.active, t] = self.token
            self.log_probs[self.active, t] = log_prob
            stopped = self.running & self._ends(self.token, t)
            # A row that began earlier has its last token earlier.
            ended = stopped | self.running & (places + 1 >= self.sampling.max_new_tokens)
            ended_count = int(ended.sum())
            if ended_count:
                self.lengths[self.active[ended]] = t + 1
                self.stopped[self.active[stopped]] = True
                self.running = self.running & ~ended
                running_count -= ended_count
            if running_count == 0 or t == last:
                return
            if running_count <= COMPACT_BELOW * len(self.running):
                if self.keeps_ended:
                    self.set_aside((~self.running).nonzero()[:, 0])
                self.keep(self.running.nonzero()[:, 0])
            self.step()

    def _ends(self, token: Tensor, t: int) -> Tensor:
        """Return [b] bool: whether token t of each active row ends it."""
        ends = torch.isin(token, self.end_tokens)
        if self.stop_strings is None:
            return ends
        new, least = self.ids[self.active, : t + 1].tolist(), self.sampling.min_new_tokens
        rows = [[*self.begun[i], *row] for i, row in zip(self.active.tolist(), new, strict=True)]
        text = self.stop_strings
        complete = [len(row) >= least and text.completed_by_last(row) for row in rows]
        return ends | torch.tensor(complete, device=self.device)

    def keep(self, order: Tensor) -> None:
        """Keep only some rows in the batch, in their order. A row may be repeated."""
        if order.tolist() == list(range(len(self.active))):
            return
        self.active, self.token = self.active[order], self.token[order]
        self.running, self.uniform = self.running[order], self.uniform[order]
        self.positions, self.sampled = self.positions[order], self.sampled[order]
        self.rows.keep_rows(order)

    def step(self) -> None:
        """Run the model on the last token of each active row."""
        ids, positions = self.token[:, None], self.positions[:, None]
        others = self.rows.arguments(torch.ones_like(ids, dtype=torch.bool))
        self.logits = self.model.forward(self.rows.cache, ids, positions, others)
        self._note_routes(self.active, self.running[:, None], self.prompt_columns + self.t)
        self.positions = self.positions + 1

    def _note_routes(
        self, rows: Tensor, computed: Tensor, first: int, source: Tensor | None = None
    ) -> None:
        """Keep the experts of the pass that the model has just made, if they are recorded.

        Args:
            rows: [b], whose tokens it has computed.
            computed: [p, t] bool: where there is a token.
            first: the column of the first one, in prompts and responses.
            source: [b], the row of `computed` that each row has; None: its own.
        """
        if self.model.routers is None:
            return
        chosen = self.model.routers.chosen()
        if self.routes is None:
            columns = self.prompt_columns + self.width
            shape = (len(self.ids), columns, *chosen.shape[1:])
            self.routes = chosen.new_full(shape, UNKNOWN)
        found = chosen.view(*computed.shape, *chosen.shape[1:])
        found = found.masked_fill(~computed[:, :, None, None], UNKNOWN)
        found = found if source is None else found[source]
        self.routes[rows.to(self.device), first : first + found.shape[1]] = found

    def pause(self) -> None:
        """Set the rows aside that have not ended, and with `keeps_ended` the other ones, too."""
        self.set_aside((self.running | self.keeps_ended).nonzero()[:, 0])

    def set_aside(self, order: Tensor) -> None:
        """Add the rows `order` of the batch to `kept`, without tokens behind the end of a row."""
        if not len(order):
            return
        active = self.active[order]
        behind = self.t + 1 - self.lengths[active]
        rows = self.rows.part(order)
        if rows.padded or bool(behind.any()):
            rows.drop_hidden(behind)
        keys, new = list[Key](), self.ids.cpu().numpy()
        for row, length in zip(active.tolist(), self.lengths[active].tolist(), strict=True):
            seed, tokens = self.keys[row]
            keys.append((seed, tokens + new[row, :length].tobytes()))
        self.kept.append(KeptRows(rows, self.positions[order] - behind, keys))

    def collect(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask, log-probabilities and `stopped` on the CPU, masked behind the end."""
        mask = torch.arange(self.ids.shape[1], device=self.device) < self.lengths[:, None]
        ids = self.ids.masked_fill(~mask, self.sampling.pad_token_id)
        log_probs = self.log_probs.masked_fill(~mask, 0.0)
        return ids.cpu(), mask.long().cpu(), log_probs.cpu(), self.stopped.cpu()


# Models whose architecture was never compared with the naive loop (`models/architectures.py` lists
# the others): one with its own code, or one that a newer version of transformers added. Eight
# tokens show whether the model is causal, and whether its cache gives the same numbers as no cache
# when rows are repeated and removed.

# Largest difference of a log-probability, in nats. Correct models differ by rounding, incorrect
# ones by about the size of a log-probability.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-2, 0.5
_TOKENS, _PREFIX = 8, 4


def check_generation(cached: CachedModel) -> None:
    """Compare a model that continues a sequence with a forward pass over all its tokens.

    Raises:
        ModelError: the logits differ, or the model cannot use a cache of transformers.
    """
    model = cached.module
    vocabulary: int = model.config.get_text_config().vocab_size
    ids = ((torch.arange(_TOKENS) * 7 + 5) % vocabulary)[None].to(cached.device)
    with torch.inference_mode():
        whole = model(input_ids=ids).logits[0]
        prefix = model(input_ids=ids[:, :_PREFIX]).logits[0]
        _compare(model, prefix, whole[:_PREFIX], "its tokens attend to later tokens")
        try:
            steps = _generate(cached, ids)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            text = str(error).strip() or repr(error)
            raise _error(model, f"it cannot generate with a cache: {text}") from error
        _compare(model, steps, whole[_PREFIX - 1 :], "it generates other numbers with a cache")


def _generate(cached: CachedModel, ids: Tensor) -> Tensor:
    """Return logits [tokens, V] of a row that is repeated, and then removed again."""
    cache = kv_cache.growing_cache(cached.module.config)
    logits = [cached.forward(cache, ids[:, :_PREFIX])]
    kv_cache.reorder_cache(cache, torch.tensor([0, 0], device=ids.device))
    for t in range(_PREFIX, _TOKENS):
        rows = 1 if t > _PREFIX else 2
        logits.append(cached.forward(cache, ids[:, t : t + 1].expand(rows, 1))[-1:])
        if rows == 2:
            kv_cache.reorder_cache(cache, torch.tensor([1], device=ids.device))
    return torch.cat(logits)


def _compare(model: PreTrainedModel, found: Tensor, expected: Tensor, problem: str) -> None:
    """Raise `ModelError` if log-probabilities differ by more than rounding."""
    differences = found.float().log_softmax(-1) - expected.float().log_softmax(-1)
    largest = float(differences.abs().max())
    if not largest <= (_TOLERANCE if model.dtype.itemsize > 2 else _TOLERANCE_16_BIT):
        raise _error(model, f"{problem}: log-probabilities differ by {largest:.2g} nats")


def _error(model: PreTrainedModel, problem: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} (model_type {model.config.model_type!r}) is not in "
        f"docs/concepts/architectures.md, and {problem}; use a model of a listed architecture",
        path=model.config.name_or_path,
    )
