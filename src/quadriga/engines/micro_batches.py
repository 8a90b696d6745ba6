"""Which rows go together in a micro-batch, and which of their tokens a rank computes.

The split into micro-batches changes time and memory, but no gradient (`engines.base.LossFn`). Rows
with the same prompt are in one micro-batch where they fit, so that the packed forward pass computes
the prompt once.

Ranks of a model-parallel group split the tokens of a packed micro-batch (`TokenSlice`). Example: 11
packed tokens and 2 ranks. One padding token makes 12, so a rank has 6:

    packed index    0  1  2  3  4  5 │ 6  7  8  9 10 ·
    predictors         1  1        5 │    7     9          of the K = 5 targets
    rank 0             1  1        5                        three outputs
    rank 1                              7 − 6  9 − 6        two outputs

The outputs of all ranks are joined, so that each rank has all of them and computes the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.parallel.balancing import RowCosts, Rows, token_budget_micro_batches
from quadriga.parallel.costs import TOKENS, CostModel
from quadriga.parallel.device import on_device
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.parallel.packing import (
    PackedBatch,
    first_row_with_same_prompt,
    in_equal_slices,
    pack_rows,
    pack_with_routes,
)
from quadriga.parallel.token_exchange import join_outputs
from quadriga.protocol import fields

Batch = Mapping[str, Tensor]
"""Tensors with the same first dimension. Required: `input_ids`, `attention_mask` [B, P + R]
(left-padded prompts, then right-padded responses) and `response_mask` [B, R]. A loss may read any
other field."""

REQUIRED_FIELDS = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSE_MASK)


def check_fields(batch: Batch) -> None:
    """Raise `FieldError` if the batch lacks a field that every forward pass needs."""
    for name in REQUIRED_FIELDS:
        if name not in batch:
            raise FieldError(
                f"a training engine needs the field {name!r}; the batch has {sorted(batch)}",
                field=name,
            )
    if (routes := batch.get(fields.ROUTED_EXPERTS)) is None:
        return
    # All tokens before the last target of a row have a part in its log-probabilities, but for the
    # last one of a context: what is behind it has another number in the mask, and does not see it.
    mask, targets = batch[fields.ATTENTION_MASK], batch[fields.RESPONSE_MASK]
    behind = torch.nn.functional.pad(targets, (mask.shape[1] - targets.shape[1] - 1, 0))
    needed = behind.flip(1).cumsum(1).flip(1).bool() & mask[:, :-1].bool()
    needed &= mask[:, 1:] == mask[:, :-1]
    lacking = (needed & (routes[:, :-1] < 0).flatten(2).any(-1)).sum(1)
    if lacking.any():
        raise FieldError(
            f"{fields.ROUTED_EXPERTS} needs the experts of each token before a response token; row "
            f"{int(lacking.argmax())} lacks them at {int(lacking.max())} tokens; generate it again "
            "with rollout.replay_routes=true",
            field=fields.ROUTED_EXPERTS,
        )


def plan_micro_batches(
    batch: Batch,
    *,
    size: int | None,
    max_tokens: int | None,
    share_prompts: bool,
    cost: CostModel = TOKENS,
    least: int = 1,
    stages: int = 1,
) -> list[Tensor]:
    """Return the row indices of each micro-batch, the most expensive micro-batch first.

    Every row with a target is in exactly one micro-batch. Rows whose `response_mask` is all 0
    (prompt groups without an advantage, padding rows) need no computation and are left out.

    With `share_prompts`, rows with the same prompt are in one micro-batch where they fit. If they
    do not, they are split, and each part computes the prompt again.

    Args:
        size: a micro-batch has at most this number of rows. None: any number.
        max_tokens: a micro-batch has at most this number of computed tokens. A row that is longer
            is a micro-batch of its own. None: any number.
        share_prompts: whether the forward pass packs rows and computes equal prompts once.
            Otherwise it pads each row to the longest of its micro-batch.
        cost: what sequences cost. Micro-batches that are split by tokens have about equal costs.
        least: make at least this number of micro-batches, if packed rows are split by tokens and no
            further prompt is computed twice.
        stages: make at least this number of micro-batches, if packed rows are split by tokens and
            there are as many rows. A stage of a pipeline that waits costs more than a prompt.
    """
    rows = batch[fields.RESPONSE_MASK].any(1).nonzero()[:, 0].cpu()
    if not len(rows):
        return []
    valid = batch[fields.ATTENTION_MASK][rows].bool().cpu()
    if not share_prompts:
        return _padded_micro_batches(rows, valid.sum(1), size, max_tokens)
    width = valid.shape[1] - batch[fields.RESPONSE_MASK].shape[1]
    prompts = batch[fields.INPUT_IDS][rows, :width].cpu()
    owner = first_row_with_same_prompt(prompts, valid[:, :width]).numpy()
    lengths = valid[:, :width].sum(1).numpy(), valid[:, width:].sum(1).numpy()
    costs, tokens = (RowCosts.of(model, owner, *lengths) for model in (cost, TOKENS))
    every = range(len(costs))
    parts = _groups_within_rows(costs, every, size or len(costs))
    if max_tokens is not None and (
        size is None or any(tokens.total(part) > max_tokens for part in parts)
    ):
        parts = _groups_within_tokens(costs, tokens, max_tokens, max(least, stages), stages)
        if size is not None:
            parts = [piece for part in parts for piece in _groups_within_rows(costs, part, size)]
    # All ranks compute their first micro-batch together, then their second one. Sorted by cost,
    # micro-batches of about equal cost meet.
    return [rows[torch.tensor(part)] for part in sorted(parts, key=costs.total, reverse=True)]


def _padded_micro_batches(
    rows: Tensor, length: Tensor, size: int | None, max_tokens: int | None
) -> list[Tensor]:
    size = size or len(rows)
    if max_tokens is None:
        return list(torch.split(rows, size))
    order = torch.argsort(length, descending=True, stable=True)
    counts = _rows_that_fit_padded(length[order].tolist(), size, max_tokens)
    return list(torch.split(rows[order], counts))


def _groups_within_tokens(
    costs: RowCosts, tokens: RowCosts, max_tokens: int, least: int, stages: int
) -> list[Rows]:
    """Put whole prompt groups into micro-batches of at most `max_tokens` computed tokens.

    Groups are split too if there would be fewer micro-batches than `stages`.
    """
    # Four rows with the prompts A A B A of 4 tokens, responses of 3, 2, 1 and 4 tokens, and
    # max_tokens 12. Group A computes 4 + 3 + 2 + 4 = 13 tokens, so it is split; its responses may
    # have 12 − 4 = 8 tokens in each part:
    #
    #   parts          A 3 + 2     A 4     B 1
    #   tokens         4 + 5       4 + 4   4 + 1      no two of them have at most 12
    #
    # Result: three micro-batches of 9, 8 and 5 tokens.
    alone: list[Rows] = []
    units: list[Rows] = []
    for group in tokens.groups(range(len(tokens))):
        if tokens.total(group) <= max_tokens:
            units.append(group)
            continue
        fitting = [row for row in group if tokens.total([row]) <= max_tokens]
        alone += [[row] for row in group if row not in fitting]
        left = max_tokens - int(tokens.shared[group[0]])
        for part in token_budget_micro_batches(tokens.own[fitting], left):
            units.append([fitting[i] for i in part])
    while len(alone) + len(units) < min(stages, len(costs)):
        unit = max((u for u in units if len(u) > 1), key=costs.total)
        units.remove(unit)
        units += [unit[: len(unit) // 2], unit[len(unit) // 2 :]]
    if not units:
        return alone
    chosen = token_budget_micro_batches(
        [tokens.total(unit) for unit in units],
        max_tokens,
        min_batches=min(max(1, least - len(alone)), len(units)),
        costs=[costs.total(unit) for unit in units],
    )
    return alone + [[row for unit in part for row in units[unit]] for part in chosen]


def _groups_within_rows(costs: RowCosts, rows: Sequence[int], size: int) -> list[Rows]:
    """Put `rows` into as few micro-batches of at most `size` rows as there can be.

    Groups stay whole where that needs no more micro-batches.
    """
    # Groups of 3, 2, 2 and 1 rows, size 4: {3 1} and {2 2} keep all groups whole. Groups of 3 and 3
    # rows, size 4: two micro-batches of 3 rows. Three groups of 3, size 4: whole groups need three
    # micro-batches, and 9 rows do as well. Four groups of 3: whole groups need four, 12 rows need
    # three, so rows are cut in order: {3 1}, {2 2}, {1 3}.
    groups = sorted(costs.groups(rows), key=costs.total, reverse=True)
    pieces = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    whole = token_budget_micro_batches([len(piece) for piece in pieces], size)
    if len(whole) <= -(-len(rows) // size):
        return [[row for piece in part for row in pieces[piece]] for part in whole]
    in_order = [row for group in groups for row in group]
    return [in_order[i : i + size] for i in range(0, len(in_order), size)]


def _rows_that_fit_padded(lengths: Iterable[int], size: int, max_tokens: int) -> list[int]:
    """Return the number of rows of each micro-batch of padded rows, given in descending length."""
    # Lengths 6 5 2 2 1 with max_tokens 12. The first row of a micro-batch is its longest, and the
    # others are padded to its length: {6 5} computes 2 × 6 = 12 tokens, {2 2 1} 3 × 2 = 6.
    counts: list[int] = []
    longest = 0
    for length in lengths:
        if not counts or counts[-1] == size or (counts[-1] + 1) * longest > max_tokens:
            counts.append(0)
            longest = length
        counts[-1] += 1
    return counts


def select_rows(batch: Batch, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the rows of every tensor of `batch`, in the order of `rows`, on `device`."""
    return {name: field[rows].to(device, non_blocking=True) for name, field in batch.items()}


def dummy_batch() -> dict[str, Tensor]:
    """Return one row of two tokens: a rank without rows computes it while other ranks have rows."""
    return {
        fields.INPUT_IDS: torch.zeros(1, 2, dtype=torch.int64),
        fields.ATTENTION_MASK: torch.ones(1, 2, dtype=torch.int64),
        fields.RESPONSE_MASK: torch.ones(1, 1, dtype=torch.int64),
    }


@dataclass(frozen=True)
class TokenSlice:
    """The tokens and the targets of one rank.

    Attributes:
        input_ids: [1, n] int64, the tokens of this rank.
        position_ids: [1, n · t] int64, of the tokens that t ranks of tensor parallelism have
            together: their attention computes the same tokens.
        predictors: [k] int64, the index in the slice of the token that predicts a target. At least
            one, so that every kernel has an input: without a target, the first token stands in.
        labels: [k] int64, the token ids of the targets.
        counts: the targets of each rank of the group.
        routes: [n · t, layers, K], the experts of the tokens of `position_ids`, if they are given.
        order: [K] int64, the target of each joined output.
        ranks: the group.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    labels: Tensor
    counts: tuple[int, ...]
    order: Tensor
    ranks: ModelRanks
    routes: Tensor | None = None

    @staticmethod
    def of(packed: PackedBatch, ranks: ModelRanks) -> TokenSlice:
        """Cut a micro-batch whose tokens divide over the ranks of the group."""
        count, own = ranks.all.size, ranks.all.index
        size = packed.input_ids.shape[1] // count
        slice_of_target = packed.predictors // size
        order = torch.argsort(slice_of_target, stable=True)
        counts = torch.bincount(slice_of_target, minlength=count).tolist()
        chosen = torch.split(order, counts)[own]
        predictors, labels = packed.predictors[chosen] - own * size, packed.targets.labels[chosen]
        if not len(chosen):
            predictors = labels = torch.zeros(1, dtype=torch.int64, device=order.device)
        wide = size * ranks.tensor.size
        first = own // ranks.tensor.size * wide
        return TokenSlice(
            packed.input_ids[:, own * size : (own + 1) * size],
            packed.position_ids[:, first : first + wide], predictors, labels, tuple(counts), order,
            ranks, None if packed.routes is None else packed.routes[first : first + wide],
        )  # fmt: skip

    def join(self, outputs: Tensor) -> Tensor:
        """Return the outputs of all targets, from those of the own: [k, C] -> [K, C]."""
        own = outputs[: self.counts[self.ranks.all.index]]
        if self.ranks.all.size == 1:
            return own
        joined = join_outputs(own, self.counts, self.ranks.all)
        return torch.empty_like(joined).index_copy(0, self.order, joined)


def sliced_rows(
    rows: Batch, slices: int, ranks: ModelRanks, device: torch.device
) -> tuple[PackedBatch, TokenSlice]:
    """Return rows packed, with tokens that divide into `slices`, and the part of this rank.

    Their tensors are on `device`, but for those of the rows.
    """
    given, routes = [rows[name] for name in REQUIRED_FIELDS], rows.get(fields.ROUTED_EXPERTS)
    packed = pack_rows(*given) if routes is None else pack_with_routes(*given, routes=routes)
    packed = in_equal_slices(packed, slices)
    own = on_device(TokenSlice.of(packed, ranks), device)
    return packed.to(device), own
