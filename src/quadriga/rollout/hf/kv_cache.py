"""Key-value caches with spare columns, from which rows can be removed.

Appending a token writes in place. The dynamic cache of transformers copies the whole cache for
every token. `SharedPrompts` holds each prompt once, however many rows continue it.

Attention of one new token of each row reads keys and values of a prompt once for all its rows, and
then the row's own tokens. The two parts of the softmax are joined by the logarithms of their sums.
Transformers finds `decode_attention` under `ATTENTION_NAME`. It is `sdpa` unless the forward pass
carries a `prompt_cache`, as every pass after the prefill does.

Shapes: b rows, p distinct prompts of P columns, H heads, Hk key heads, `length` columns in use,
`seen` of them that the next query can see, D head size, Dv size of a value, t columns of generated
tokens. g = H / Hk heads share a key head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from quadriga.models.architectures import architecture_of

if TYPE_CHECKING:
    # transformers has DummyLayer since 5.20. The environments of vLLM and SGLang have 5.19.
    from transformers.cache_utils import DummyLayer

    CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
    """A layer with keys and values, with a recurrent state, or without either."""

# Growth for a prompt of 3 tokens and 64 spare columns:
#
#   after               length   columns of the buffer
#   prefill, 3 tokens      3      0 + 3 + 64 =  67
#   64 more tokens        67                    67     written in place
#   the next token        68     67 + 1 + 64 = 132     one copy
#
# Repeating rows, after the prefill of two distinct prompts that three rows use:
# reorder_cache([0, 0, 1]) gives a, a, b. It removes rows, too: [0, 2] keeps the first and third.
#
# Sliding window of 3 (a token and the two before it), 5 columns in use, one token is appended:
#
#   column            0  1  2  3  4  5
#   returned                   3  4  5      views of the buffer; the older columns stay in it
#   get_mask_sizes(1) = (3, 3): the mask has 3 columns, and its first is column 3

_SPARE_COLUMNS = 64


class GrowingCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # as a base class
    """Keys and values [b, H, length, D] of one layer, in buffers with spare columns.

    Args:
        window: the tokens that a query can see, itself included. None: all tokens before it.
        spare_columns: columns that a new buffer has beside those that it must hold.

    Attributes:
        prompt_keys, prompt_values: [p, Hk, P, D], after `share_prompts`.
    """

    is_compileable = False
    keys: Tensor
    values: Tensor
    prompt_keys: Tensor
    prompt_values: Tensor

    def __init__(self, window: int | None = None, spare_columns: int = _SPARE_COLUMNS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotations here
        self.length = 0
        self._shared = 0
        self.window = window
        self.is_sliding = window is not None
        self._spare_columns = spare_columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the first tokens, whose shape and dtype they take."""
        self.keys = self._resized(key_states[:, :, :0], key_states.shape[2])
        self.values = self._resized(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns [b, H, added, D]; return the columns that the added tokens can see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        start, end = self._first_seen(), self.length + added
        if end > self.keys.shape[2]:
            self.keys = self._resized(self.keys[:, :, : self.length], added)
            self.values = self._resized(self.values[:, :, : self.length], added)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def share_prompts(self, rows: int) -> None:
        """Set aside what was written as prompts. From now on hold the new tokens of each row."""
        self.prompt_keys, self.prompt_values = self.keys, self.values
        self._shared, self.length, self._spare_columns = self.length, 0, _SPARE_COLUMNS
        self.keys, self.values = (
            old.new_empty(rows, old.shape[1], 0, old.shape[3]) for old in (self.keys, self.values)
        )

    def join(self, others: Sequence[GrowingCacheLayer]) -> None:
        """Add the rows of other layers behind its own, and their prompts behind its prompts."""
        layers = [self, *others]
        for name in ("prompt_keys", "prompt_values"):
            if hasattr(self, name):
                setattr(self, name, right_aligned([getattr(x, name) for x in layers], 0))
        for name in ("keys", "values"):
            parts = [getattr(x, name)[:, :, : x.length] for x in layers]
            setattr(self, name, right_aligned(parts, _SPARE_COLUMNS))
        self.length = max(layer.length for layer in layers)
        self._shared = max(layer._shared for layer in layers)

    def _first_seen(self) -> int:
        """Return the first column that the next token can see."""
        return 0 if self.window is None else max(0, self.length + 1 - self.window)

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep only `rows`, in their order, in another buffer. A row may be repeated."""
        if self.is_initialized:
            self.keys = self._resized(self.keys[:, :, : self.length], 0, rows)
            self.values = self._resized(self.values[:, :, : self.length], 0, rows)

    def _resized(self, old: Tensor, added: int, rows: Tensor | None = None) -> Tensor:
        """Copy `old` [b, H, length, D], or some of its rows, to a buffer with space for `added`
        more columns and the spare ones."""
        count, heads, length, width = old.shape
        count = count if rows is None else len(rows)
        new = old.new_empty(count, heads, length + added + self._spare_columns, width)
        if rows is None:
            new[:, :, :length] = old
        else:
            torch.index_select(old, 0, rows, out=new[:, :, :length])
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns of the mask for `query_length` new tokens, offset of the first)."""
        start = self._first_seen()
        return self.get_seq_length() + query_length - start, start

    def get_seq_length(self) -> int:
        """Return the number of columns in use, with the columns of the prompt."""
        return self._shared + self.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows without limit."""
        return -1


def right_aligned(parts: Sequence[Tensor], spare: int) -> Tensor:
    """Join the rows of tensors [b, H, length, D], with `spare` columns behind them."""
    # Two rows of 3 columns and one of 1, one spare column:   a a a ·
    #                                                         b b b ·
    #                                                         0 0 c ·
    (_, heads, _, width), columns = parts[0].shape, max(part.shape[2] for part in parts)
    new = parts[0].new_zeros(sum(map(len, parts)), heads, columns + spare, width)
    for rows, part in zip(torch.split(new, [*map(len, parts)]), parts, strict=True):
        rows[:, :, columns - part.shape[2] : columns] = part
    return new


def columns_at_end(first: int, tokens: int) -> int:
    """Return the columns of a buffer of `first` columns after it has grown, one token at a time, to
    hold `tokens`."""
    columns = first
    while columns < tokens:
        columns += 1 + _SPARE_COLUMNS
    return columns


def columns_before(columns: int) -> int:
    """Return the columns of the buffer that was full when one of `columns` took its place."""
    return columns - 1 - _SPARE_COLUMNS


def reorder_cache(cache: Cache, rows: Tensor) -> None:
    """Keep only `rows` in every layer, in their order. A row may be repeated."""
    for layer in cache.layers:
        layer.reorder_cache(rows)  # type: ignore[arg-type]  # LongTensor


JOINED = ("GrowingCacheLayer", "LinearAttentionLayer", "DummyLayer")
"""The kinds of layers whose rows can be joined to the rows of another cache."""


def growing_cache(config: PreTrainedConfig, spare_columns: int = _SPARE_COLUMNS) -> Cache:
    """Return an empty cache for a model of this config.

    Transformers chooses the kind of each layer. Growing layers take the place of its full and
    sliding-window layers; layers with a recurrent state stay as they are.
    """
    layers = DynamicCache(config=config).layers
    return Cache(layers=[_growing_layer(layer, spare_columns) for layer in layers])


def _growing_layer(layer: CacheLayer, spare_columns: int) -> CacheLayer:
    if type(layer) is DynamicLayer:
        return GrowingCacheLayer(None, spare_columns)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingCacheLayer(layer.sliding_window, spare_columns)
    return layer


def sees_all_tokens(cache: Cache) -> bool:
    """Return whether every layer holds keys and values and sees all tokens before the query."""
    return all(
        isinstance(layer, GrowingCacheLayer) and layer.window is None for layer in cache.layers
    )


# Prompts that rows share
#
# Five rows with the prompts A A A B B. The queries of a prompt's rows are computed together, in as
# many slots as the prompt with most rows has:
#
#                     A         B
#   row of slot     0 1 2     3 4 ·       · holds row 0, and its result is not read
#   slot of row     0 1 2 3 4
#
# Rows 1 and 4 end. The rows 0 1 2 have the prompts A A B then:
#
#                     A         B
#   row of slot     0 1       2 ·
#   slot of row     0 1 2


@dataclass(frozen=True)
class PromptRows:
    """Which rows continue each prompt.

    Attributes:
        prompts: p.
        prompt_of_row: [b] int64.
        row_of_slot: [p × rows of the prompt with most rows] int64.
        slot_of_row: [b] int64.
        bias: [p, 1, P], a large negative number at padding. None: there is no padding.
    """

    prompts: int
    prompt_of_row: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    bias: Tensor | None

    @staticmethod
    def of(prompt_of_row: Tensor, prompts: int, bias: Tensor | None) -> PromptRows:
        """Return the slots of rows. `prompts` is p, of which each has a row."""
        order = torch.argsort(prompt_of_row, stable=True)
        counts = torch.bincount(prompt_of_row, minlength=prompts)
        slots = int(counts.max())
        starts = counts.cumsum(0) - counts
        rows = torch.arange(len(order), device=order.device)
        slot_of_row = torch.empty_like(order)
        of_sorted = prompt_of_row[order]
        slot_of_row[order] = of_sorted * slots + rows - starts[of_sorted]
        row_of_slot = order.new_zeros(prompts * slots)
        row_of_slot[slot_of_row] = rows
        return PromptRows(prompts, prompt_of_row, row_of_slot, slot_of_row, bias)


class CachedRows:
    """The cache of one micro-batch, in which rows continue prompts. `cache` is what the model
    takes; the prefill writes p distinct prompts to it.

    Attributes:
        visible: [b, columns] bool, the columns in use that each row has, without the columns of
            prompts that are held once.
        padded: whether a row may not have all.
    """

    visible: Tensor

    def __init__(self, module: PreTrainedModel, spare_columns: int = _SPARE_COLUMNS) -> None:
        self.cache = growing_cache(module.config, spare_columns)
        self.growing = [x for x in self.cache.layers if isinstance(x, GrowingCacheLayer)]
        """The layers, to which new tokens are appended."""
        self.padded = False
        self._module = module

    def _seen(self, new: Tensor) -> Tensor | None:
        """Add columns for new tokens [b, t] bool, where False is padding before them. Return what
        each of them sees, [b, t, columns] bool; None: all columns."""
        before = self.visible.shape[1]
        self.visible = torch.cat([self.visible, new], 1)
        if new.shape[1] == 1:
            return self.visible[:, None] if self.padded else None
        self.padded = True
        causal = self.visible.new_ones(new.shape[1], self.visible.shape[1]).tril(before)
        return self.visible[:, None] & causal

    def keep_rows(self, order: Tensor) -> None:
        """Keep only the rows `order`, and the prompts that they continue."""
        self.visible = self.visible[order]
        reorder_cache(self.cache, order)

    def part(self, order: Tensor) -> Self:
        """Return a cache of the rows `order`: this one if they are all rows."""
        if order.tolist() == [*range(len(self.visible))]:
            return self
        other = copy.copy(self)
        layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in layers:  # the states of layers with a recurrence are in dicts
            vars(layer).update({k: dict(v) for k, v in vars(layer).items() if isinstance(v, dict)})
        other.cache = Cache(layers=layers)
        other.growing = [layer for layer in layers if isinstance(layer, GrowingCacheLayer)]
        other.keep_rows(order)
        return other

    def drop_hidden(self, last: Tensor) -> None:
        """Drop the hidden columns of each row, and the last ones, `last` [b] of them."""
        # The last column of row 1 is dropped:   a · b c       a b c
        #                                        d · · e   →   · · d
        columns = self.visible.shape[1]
        shown = torch.arange(columns, device=last.device) < columns - last[:, None]
        visible, self.padded = self.visible & shown, True
        # The hidden columns come first then, in front of which rows have different lengths.
        order = visible.long().argsort(dim=1, stable=True)[:, columns - int(visible.sum(1).max()) :]
        self.visible = visible.gather(1, order)
        for layer in self.growing:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                places = order[:, None, :, None].expand(-1, old.shape[1], -1, old.shape[3])
                setattr(layer, name, old.gather(2, places))
            layer.length = order.shape[1]

    def join(self, others: Sequence[Self]) -> None:
        """Add the rows of other caches, which are empty then, behind its own."""
        parts = [self, *others]
        for part in parts:
            unused = int(part.visible.any(0).long().argmax()) if part.padded else 0
            for layer in part.growing:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
                layer.length -= unused
            part.visible = part.visible[:, unused:]
        sizes = {part.visible.shape[1] for part in parts}
        self.padded = len(sizes) > 1 or any(part.padded for part in parts)
        masks = [pad(part.visible, (max(sizes) - part.visible.shape[1], 0)) for part in parts]
        self.visible = torch.cat(masks)
        for own, *more in zip(*(part.cache.layers for part in parts), strict=True):
            if isinstance(own, GrowingCacheLayer):
                own.join(more)
            elif isinstance(own, LinearAttentionCacheLayerMixin):
                for name in ("conv_states", "recurrent_states"):
                    first, *states = [getattr(layer, name) for layer in (own, *more)]
                    held = [i for i, state in first.items() if state is not None]
                    first.update({i: torch.cat([first[i], *(x[i] for x in states)]) for i in held})
            for layer in more:
                vars(layer).clear()


class SharedPrompts(CachedRows):
    """A cache that holds every prompt once, for models that can attend to shared prompts
    (`decode_attention`).

    Attributes:
        bias: [b, t, columns], a large negative number where one of t new tokens sees nothing. None:
            it sees all columns.
    """

    rows: PromptRows
    bias: Tensor | None = None

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(module, spare_columns=0)

    def begin_rows(self, prompt_of_row: Tensor, visible: Tensor | None) -> None:
        prompts = self.growing[0].keys.shape[0]
        bias = None if visible is None else _bias(visible, self._module.dtype)[:, None]
        self.share(PromptRows.of(prompt_of_row, prompts, bias))

    def share(self, rows: PromptRows) -> None:
        """Append to the rows from now on. The prefill has written the prompts."""
        self.rows = rows
        self.visible = rows.prompt_of_row.new_ones(len(rows.prompt_of_row), 0).bool()
        for layer in self.growing:
            layer.share_prompts(len(rows.prompt_of_row))

    def arguments(self, new: Tensor) -> dict[str, object]:
        seen = self._seen(new)
        self.bias = None if seen is None else _bias(seen, self._module.dtype)
        return {"prompt_cache": self}

    def keep_rows(self, order: Tensor) -> None:
        rows = self.rows
        used, prompt_of_row = torch.unique(rows.prompt_of_row[order], return_inverse=True)
        bias = rows.bias
        if len(used) < rows.prompts:
            bias = None if bias is None else bias[used]
            for layer in self.growing:
                layer.prompt_keys = layer.prompt_keys.index_select(0, used)
                layer.prompt_values = layer.prompt_values.index_select(0, used)
        self.rows = PromptRows.of(prompt_of_row, len(used), bias)
        super().keep_rows(order)

    def join(self, others: Sequence[Self]) -> None:
        biases, of_row, prompts, parts = [], list[Tensor](), 0, [self, *others]
        columns = max(part.growing[0].prompt_keys.shape[2] for part in parts)
        for part in parts:
            bias, keys = part.rows.bias, part.growing[0].prompt_keys
            if bias is None:
                bias = keys.new_zeros(len(keys), 1, keys.shape[2])
            least = torch.finfo(bias.dtype).min
            biases.append(pad(bias, (columns - keys.shape[2], 0), value=least))
            of_row.append(part.rows.prompt_of_row + prompts)
            prompts += part.rows.prompts
        super().join(others)
        self.rows = PromptRows.of(torch.cat(of_row), prompts, torch.cat(biases))


# `RepeatedPrompts` copies the prompts to every row after the prefill. Its columns are the prompt
# columns, then one for each new token. Three rows, of which 0 and 1 share a prompt; P = 3:
#
#             prompt      position of the first new token
#   row 0     · 11 12             2
#   row 1     · 11 12             2
#   row 2    13 14 15             3
#
# `visible` is 0 1 1, 0 1 1, 1 1 1. The model is told which columns to hide, the columns of new
# tokens included, in a form that depends on the layers of the model:
#
# - None: no row has padding.
# - a bias [b, 1, t, columns], a large negative number where one of t new tokens sees nothing: every
#   layer attends to all tokens before the query. Layers use it as it is.
# - `visible` [b, columns], for one new token: some layers have windows, chunks, ALiBi or recurrent
#   states. For every token the model makes the mask of each kind of layer from it.


class RepeatedPrompts(CachedRows):
    """A cache that holds the prompt of every row, for every model."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__(module)
        self.takes_bias = takes_bias(module, self.cache)

    def begin_rows(self, prompt_of_row: Tensor, visible: Tensor | None) -> None:
        reorder_cache(self.cache, prompt_of_row)
        self.padded = visible is not None
        if visible is None:
            columns = self.growing[0].length if self.growing else 0
            self.visible = prompt_of_row.new_ones(len(prompt_of_row), columns).bool()
        else:
            self.visible = visible.index_select(0, prompt_of_row)

    def arguments(self, new: Tensor) -> dict[str, object]:
        if (seen := self._seen(new)) is None:
            return {}
        bias = _bias(seen, self._module.dtype)[:, None] if self.takes_bias else None
        return {"attention_mask": self.visible if bias is None else bias}


def takes_bias(module: PreTrainedModel, cache: Cache) -> bool:
    """Return whether every layer takes a bias [b, 1, t, columns] as mask, and uses it as it is."""
    return (
        bool(getattr(module, "_supports_attention_backend", False))
        and module.config._attn_implementation in ("eager", "sdpa")
        and sees_all_tokens(cache)
    )


def cache_tensors(cache: Cache) -> Iterator[Tensor]:
    """Yield the tensors of all layers."""
    values = (value for layer in cache.layers for value in vars(layer).values())
    return (value for value in values if isinstance(value, Tensor))


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where `visible` is True, else a large negative number."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)


# Attention to shared prompts

ATTENTION_NAME = "quadriga_decode"
"""Name under which transformers finds `decode_attention`."""

CHANGED_AFTER_THE_CACHE = (
    "axk1", "deepseek_v2", "deepseek_v3", "diffllama", "glm4_moe_lite", "hrm_text", "jetmoe",
    "longcat_flash", "minicpm3", "youtu",
)  # fmt: skip
"""Architectures that attend to other keys or values than the cache returns for their layer."""

_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prompt_cache: SharedPrompts | None = None,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: query [b, H, t, D] -> ([b, t, H, Dv], None)."""
    if prompt_cache is None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    # Of several new tokens the model makes a mask, which knows neither padding nor prompts.
    assert (attention_mask is None or query.shape[2] > 1) and isinstance(module.layer_idx, int)
    assert others.get("softcap") is None and others.get("s_aux") is None
    layer = prompt_cache.growing[module.layer_idx]
    count, heads, new, size = query.shape
    key_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    scaled = (query * scale).reshape(count, key_heads, -1, size)  # g · t queries of a key head
    bias = prompt_cache.bias
    if bias is not None:
        bias = bias[:, None].expand(-1, key_heads, -1, -1).flatten(0, 1)
    own, own_sum = _attend(scaled.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), bias)
    prompt, prompt_sum = _attend_to_prompts(
        scaled, layer.prompt_keys, layer.prompt_values, prompt_cache.rows
    )
    # softmax over both parts is σ · prompt + (1 − σ) · own, where σ = e^p / (e^p + e^o) for the
    # logarithms p and o of the sums of exponentials.
    share = torch.sigmoid(prompt_sum - own_sum)
    joined = torch.lerp(own, prompt, share)
    return joined.view(count, heads, new, -1).transpose(1, 2), None


def _attend_to_prompts(
    scaled: Tensor, keys: Tensor, values: Tensor, rows: PromptRows
) -> tuple[Tensor, Tensor]:
    """Attend to prompts [p, Hk, P, D]; see `_attend`. The results are in the order of the rows."""
    prompts, key_heads = keys.shape[:2]
    group = scaled.shape[2]

    def by_prompt(x: Tensor) -> Tensor:
        """[b, Hk, g, D] -> [p · Hk, slots · g, D]"""
        slots = x.index_select(0, rows.row_of_slot).view(prompts, -1, *x.shape[1:])
        return slots.transpose(1, 2).reshape(prompts * key_heads, -1, x.shape[-1])

    def by_row(x: Tensor) -> Tensor:
        """[p · Hk, slots · g, D] -> [b · Hk, g, D]"""
        slots = x.view(prompts, key_heads, -1, group, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return slots.index_select(0, rows.slot_of_row).flatten(0, 1)

    bias = rows.bias
    if bias is not None:
        bias = bias[:, None].expand(-1, key_heads, -1, -1).flatten(0, 1)
    out, log_sum = _attend(by_prompt(scaled), keys.flatten(0, 1), values.flatten(0, 1), bias)
    return by_row(out), by_row(log_sum)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ + bias) v and the logarithm of the sum of exponentials.

    [n, m, D], [n, L, D], [n, L, Dv], [n, t, L] -> [n, m, Dv], [n, m, 1]; the m queries are t tokens
    of each of m / t heads.
    """
    scores = torch.bmm(query, keys.transpose(1, 2))
    if bias is not None:
        scores.view(len(query), -1, *bias.shape[1:]).add_(bias[:, None])
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.bmm(weights, values).div_(total), total.log_().add_(largest)


def use_decode_attention(module: PreTrainedModel) -> bool:
    """Switch `module` to `decode_attention` if it can, and return whether it has.

    It can if rows of the architecture are packed in training (each layer then takes its attention
    from transformers by name), every layer sees all tokens before the query, and attention receives
    what the cache returns. Scores of 16 bits would be rounded, so the model must compute in 32 or
    64. `tests/architectures` compares the numbers with a naive loop.
    """
    suitable = (
        architecture_of(module.config).rows == "packed"
        and module.config.model_type not in CHANGED_AFTER_THE_CACHE
        and module.config._attn_implementation == "sdpa"
        and module.dtype in (torch.float32, torch.float64)
        and sees_all_tokens(growing_cache(module.config))
    )
    if suitable:
        AttentionInterface.register(ATTENTION_NAME, decode_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        module.set_attn_implementation(ATTENTION_NAME)
    return suitable
