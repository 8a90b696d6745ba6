"""Batches of items, in a seeded order that can be saved and continued at any batch.

The order of an epoch depends only on the seed, the number of the epoch and the size of the dataset,
so the state of a loader is two numbers, the epoch and the batches of it that were returned:

    12 rows, batch_size 4, so 3 batches per epoch

    epoch            0        0        0        1        1
    batches_done     1        2        3        1        2      in the state after this batch
    rows of batch    [0, 4)   [4, 8)   [8, 12)  [0, 4)   [4, 8) of the permutation of the epoch

A run that resumes with the state (epoch 0, batches_done 2) computes the permutation of epoch 0
again and continues with its rows [8, 12). The items are in memory and were tokenised once, so
batches are made in the calling thread: there are no loader processes whose state must be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.data.chat import EncodedAnswer
from quadriga.data.user_classes import PromptItem, RowSampler, called, sampled_rows, sampler_state
from quadriga.errors import CheckpointError, ConfigError, DataError, LengthError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.values import object_array

ItemT = TypeVar("ItemT")


class BatchDataset(Protocol[ItemT]):
    """The interface of a dataset: items by number, and a method that combines them to a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> ItemT: ...
    def collate(self, items: Sequence[ItemT], /) -> DataProto: ...


def items_of(dataset: BatchDataset[ItemT]) -> Iterator[ItemT]:
    """Yield all items in order, in the dataset's own way if it has one."""
    if isinstance(dataset, Iterable):
        yield from dataset
    else:
        yield from (dataset[index] for index in range(len(dataset)))


class LoaderState(TypedDict):
    """The position of a loader; JSON values."""

    epoch: int
    batches_done: int
    rows: int
    batch_size: int
    seed: int
    weights: list[float] | None
    sampler: dict[str, object] | None


@dataclass(eq=False)
class PromptLoader:
    """Iterates over the batches of an epoch, from the current position to the end of the epoch.

    A new `for` loop continues where the last one stopped; after the end of an epoch it begins the
    next one. `state_dict` counts the batches that were returned, the current one included.

    Args:
        mixture: the shares of the files in each epoch; None: all rows once.
        sampler: chooses the rows of each batch, in place of the seeded order.

    Raises `ConfigError` if `drop_last` is set and the dataset has fewer rows than one batch.
    """

    dataset: BatchDataset[Any]  # the type of the items is known to the dataset alone
    batch_size: int
    _: KW_ONLY
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True
    mixture: Mixture | None = None
    sampler: RowSampler | None = None
    epoch: int = field(default=0, init=False)
    batches_done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.drop_last and len(self.dataset) < self.batch_size:
            raise ConfigError(
                f"one batch needs {self.batch_size} rows, but the data has {len(self.dataset)}; "
                "reduce the batch size or provide more data"
            )

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[DataProto]:
        own = (
            partial(epoch_order, len(self.dataset)) if self.mixture is None else self.mixture.order
        )
        order = own(seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        while self.batches_done < len(self):
            rows = self._rows(order)
            # Counted before `yield`: a state that is taken while the caller works on this batch
            # must continue with the next one.
            self.batches_done += 1
            batch = self.dataset.collate([self.dataset[int(row)] for row in rows])
            _check_batch(batch, len(rows), self.dataset)
            yield batch
        self.epoch += 1
        self.batches_done = 0

    def rewind(self) -> None:
        """Begin the epoch again, whatever was read of it."""
        self.batches_done = 0

    def update(self, data: DataProto) -> None:
        """Tell the sampler, if there is one, about a step."""
        if self.sampler is not None:
            called(self.sampler, "update", partial(self.sampler.update, data))

    def _rows(self, order: Order) -> Sequence[int]:
        """Return the rows of the next batch."""
        if self.sampler is not None:
            batch = self.epoch * len(self) + self.batches_done
            return sampled_rows(self.sampler, batch, self.batch_size, len(self.dataset))
        start = self.batches_done * self.batch_size
        return cast(list[int], order[start : start + self.batch_size].tolist())

    def state_dict(self) -> LoaderState:
        """Return the position of the loader, and what a loader that continues must agree on.

        Raises `DataError` if the sampler's state is not made of JSON values.
        """
        return {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "weights": None if self.mixture is None else list(self.mixture.weights),
            "sampler": None if self.sampler is None else sampler_state(self.sampler),
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue at the position of `state`.

        Raises `CheckpointError` if rows, batch size, seed or weights differ, because the order of
        the rows would differ too; or if only one of the two runs has a sampler.
        """
        saved, own = dict(state), dict(self.state_dict())
        for key in ("rows", "batch_size", "seed", "weights"):
            if saved.get(key) != own[key]:
                raise CheckpointError(
                    f"the position in the data was saved with {key}={saved.get(key)}, this run has "
                    f"{key}={own[key]}; resume with the same data and settings, or start a new run"
                )
        if (state.get("sampler") is None) != (self.sampler is None):
            which = "without" if self.sampler is not None else "with"
            raise CheckpointError(
                f"the position in the data was saved {which} a sampler; resume with the same "
                "data.sampler, or start a new run"
            )
        self.epoch = state["epoch"]
        self.batches_done = state["batches_done"]
        if self.sampler is not None:
            load = partial(self.sampler.load_state_dict, state["sampler"] or {})
            called(self.sampler, "load_state_dict", load)


def _check_batch(batch: object, items: int, dataset: object) -> None:
    """Check what the `collate` of a dataset, which can be one of the user, has returned."""
    rows = items * int(getattr(dataset, "rows_per_item", 1))
    if not isinstance(batch, DataProto) or len(batch) != rows:
        found = f"one of {len(batch)} rows" if isinstance(batch, DataProto) else repr(batch)[:100]
        raise DataError(
            f"{type(dataset).__name__}.collate must return a DataProto of {rows} rows for {items} "
            f"items, got {found}"
        )


def ordered_loader(dataset: BatchDataset[Any], batch_size: int) -> PromptLoader:
    """Return a loader of all rows in their order, whose last batch may be smaller."""
    return PromptLoader(dataset, batch_size, shuffle=False, drop_last=False)


class SFTLoader(PromptLoader):
    """The same loader for an `SFTDataset`."""


Order = npt.NDArray[np.int64]


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Return the order of the items in an epoch, a permutation [size] int64."""
    if not shuffle:
        return np.arange(size)
    # The pair and not `seed + epoch`, with which epoch 1 of seed 0 would equal epoch 0 of seed 1.
    return np.random.default_rng([seed, epoch]).permutation(size)


@dataclass(frozen=True)
class Mixture:
    """Epochs in which each file has the share of its weight.

    An epoch has as many rows as all files together. A file with a large weight gives some rows
    twice, and one with a small weight gives the rest of its rows in later epochs: all rows of a
    file are used equally often, within one.

    Sizes 4 and 2, weights 1 and 1, without shuffling (rows 0 to 3 and 4 to 5; 3 rows of each):

        epoch 0    0 1 2   4 5 4
        epoch 1    3 0 1   5 4 5

    Args:
        sizes: rows of each file.
        weights: one positive number per file; only their ratios count.

    Raises:
        ConfigError: there is not one positive weight per file, or a file without rows has one.
    """

    sizes: Sequence[int]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        key, given = "data.train_weights", list(self.weights)
        if len(given) != len(self.sizes) or not all(0 < weight < math.inf for weight in given):
            raise ConfigError(
                f"{key} must have one positive number for each of the {len(self.sizes)} training "
                f"files, got {given}",
                key=key,
            )
        if 0 in self.sizes:
            raise ConfigError(
                f"{key}: all prompts of training file {list(self.sizes).index(0)} (counted from 0) "
                "were left out, so it can have no share of the rows; remove the file and its "
                "weight, or increase data.max_prompt_length",
                key=key,
            )

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Return the rows of an epoch, [Σ sizes] int64. Without `shuffle` file follows file."""
        ends = shares(sum(self.sizes), self.weights, epoch + 1)
        starts = shares(sum(self.sizes), self.weights, epoch)
        rows, first = [], 0
        for file, (size, start, end) in enumerate(zip(self.sizes, starts, ends, strict=True)):
            passes, within = np.divmod(np.arange(start, end), size)
            chosen = np.empty(len(passes), dtype=np.int64)
            for number in np.unique(passes):
                # A number of this pass over this file, which no epoch and no other file has.
                of_file = (1 << 48) + (file << 32) + int(number)
                order = epoch_order(size, seed=seed, epoch=of_file, shuffle=shuffle)
                chosen[passes == number] = order[within[passes == number]]
            rows.append(chosen + first)
            first += size
        joined = np.concatenate(rows)
        return joined[epoch_order(len(joined), seed=seed, epoch=epoch, shuffle=shuffle)]


def shares(rows: int, weights: Sequence[float], epochs: int) -> list[int]:
    """Return how many rows each file gives in the first `epochs` epochs of `rows` rows.

    A share is rounded down over all epochs, not in each of them, so that a file with less than one
    row an epoch gives its rows too. The file with the largest weight gives what is missing. With 10
    rows and weights 1, 1 and 1:

        epochs   1         2         3
        rows     4 3 3     8 6 6     10 10 10
    """
    counts = [int(rows * epochs * weight / sum(weights)) for weight in weights]
    largest = max(range(len(weights)), key=lambda file: weights[file])
    counts[largest] += rows * epochs - sum(counts)
    return counts


# Items → a batch: padding, positions, object arrays


class SFTItem(TypedDict):
    """One conversation of an `SFTDataset`: the tokens before the first that the assistant wrote,
    those from there on, and which of the latter the assistant wrote (1)."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]


def pad_rows(
    rows: Sequence[Sequence[int]], value: int, length: int, side: Literal["left", "right"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad `rows` with `value` on `side`; return the rows and a mask, both [B, length] int64.

    Raises `LengthError` if a row is longer than `length`.
    """
    padded = np.full((len(rows), length), value, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise LengthError(f"row {i} has {len(row)} tokens, more than the length {length}")
        columns = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        padded[i, columns] = row
        mask[i, columns] = 1
    return torch.from_numpy(padded), torch.from_numpy(mask)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its context, [B, T] int64, counted from 0.

    Padding on the left has position 0; padding on the right repeats the last position:

        mask       0 0 1 1 1 2 2 0
        number     0 0 1 2 3 4 5 5       of the token in the row
        begins     0 0 0 0 0 3 3 3       tokens before its context
        position   0 0 0 1 2 0 1 1
    """
    number = attention_mask.bool().cumsum(-1)
    before = torch.nn.functional.pad(attention_mask[..., :-1], (1, 0))
    begins = torch.where((attention_mask > before) & (before > 0), number - 1, 0)
    return (number - 1 - begins.cummax(-1).values).clamp(min=0)


def collate_prompts(
    items: Sequence[PromptItem], *, pad_token_id: int, length: int | None = None
) -> DataProto:
    """Return a batch of prompts: `input_ids`, `attention_mask`, `position_ids` [B, P] int64.

    Prompts are padded on the left to P = `length`, or to the longest prompt. Every other key of the
    items becomes an object array. For a model that takes images, `position_ids` is [B, 3, P], and
    `multi_modal_inputs` has the patches of the images of each row, {} without images.

    Raises:
        LengthError: a prompt is longer than `length`.
        DataError: an image cannot be read any more.
    """
    rows = [item[fields.INPUT_IDS] for item in items]
    ids, mask = pad_rows(rows, pad_token_id, length or max(map(len, rows)), "left")
    tensors = {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: mask}
    tensors[fields.POSITION_IDS] = positions(mask)
    arrays = object_arrays(items, leave_out=(fields.INPUT_IDS, fields.MULTI_MODAL_INPUTS))
    images = [
        item[fields.MULTI_MODAL_INPUTS] for item in items if fields.MULTI_MODAL_INPUTS in item
    ]
    if images:
        inputs = [image.inputs() for image in images]
        arrays[fields.MULTI_MODAL_INPUTS] = object_array(inputs)
        padded = np.zeros((len(items), 3, ids.shape[1]), dtype=np.int64)
        for i, (image, entry) in enumerate(zip(images, inputs, strict=True)):
            padded[i, :, ids.shape[1] - len(rows[i]) :] = image.positions(entry)
        tensors[fields.POSITION_IDS] = torch.from_numpy(padded)
    return DataProto.from_dict(tensors, arrays)


def collate_answers(items: Sequence[SFTItem], *, pad_token_id: int) -> DataProto:
    """Return a batch of conversations, with the columns that a rollout produces.

    `prompts` [B, P] are padded on the left, `responses` and `response_mask` [B, R] on the right.
    `input_ids`, `attention_mask` and `position_ids` are [B, P + R]. All are int64. The loss is
    computed where `response_mask` is 1: at the tokens of the assistant.

    With P = 3, R = 4, and "." for padding; u is a token of the user between two answers:

        prompt p q, answer a               . p q a . . .       response_mask   1 0 0 0
        prompt r s t, answers b and c d    r s t b u c d                       1 0 1 1
    """
    prompts = [item["prompt_ids"] for item in items]
    answers = [item["response_ids"] for item in items]
    masks = [item["response_mask"] for item in items]
    prompt_ids, prompt_mask = pad_rows(prompts, pad_token_id, max(map(len, prompts)), "left")
    length = max(map(len, answers))
    response_ids, present = pad_rows(answers, pad_token_id, length, "right")
    response_mask, _ = pad_rows(masks, 0, length, "right")
    attention_mask = torch.cat([prompt_mask, present], dim=1)
    return DataProto.from_dict(
        {
            fields.PROMPTS: prompt_ids,
            fields.RESPONSES: response_ids,
            fields.RESPONSE_MASK: response_mask,
            fields.INPUT_IDS: torch.cat([prompt_ids, response_ids], dim=1),
            fields.ATTENTION_MASK: attention_mask,
            fields.POSITION_IDS: positions(attention_mask),
        },
        object_arrays(items, leave_out=("prompt_ids", "response_ids", "response_mask")),
    )


def object_arrays(
    items: Sequence[Mapping[str, object]], leave_out: Sequence[str]
) -> dict[str, npt.NDArray[np.object_]]:
    """Return one object array [B] per key of the items, except those in `leave_out`."""
    kept = [key for key in items[0] if key not in leave_out]
    return {key: object_array([item[key] for item in items]) for key in kept}


TARGET = 0
"""The token id of the target. It is an input of the model, so it must be in the vocabulary."""


def scored_rows(
    conversations: Sequence[EncodedAnswer], pad_token_id: int, longest: int | None = None
) -> dict[str, Tensor]:
    """Return the fields that an engine reads, [B, P + R] and [B, R] int64.

    Tokens at the end of a conversation that are `pad_token_id` are left out, as transformers does
    it (`models.loading`).

    Args:
        longest: tokens that the model can compute; None: any number.

    Raises:
        LengthError: a conversation is longer.
    """
    cut = [_without_padding(prompt, response, pad_token_id) for prompt, response in conversations]
    for row, (prompt, response) in enumerate(cut):
        if longest is not None and len(prompt) + len(response) + 1 > longest:
            raise LengthError(
                f"conversation {row} has {len(prompt)} + {len(response)} = "
                f"{len(prompt) + len(response)} tokens of the reward model, which can compute "
                f"{longest - 1}; lower data.max_prompt_length or data.max_response_length"
            )
    prompts = [prompt for prompt, _ in cut]
    responses = [[*response, TARGET] for _, response in cut]
    left = pad_rows(prompts, TARGET, max(map(len, prompts), default=1), "left")
    right = pad_rows(responses, TARGET, max(map(len, responses), default=1), "right")
    ids, attention = (torch.cat(pair, dim=1) for pair in zip(left, right, strict=True))
    last = right[1].sum(-1, keepdim=True) - 1
    mask = torch.zeros_like(right[1]).scatter_(1, last, 1)
    return {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: attention, fields.RESPONSE_MASK: mask}


def _without_padding(
    prompt: Sequence[int], response: Sequence[int], pad_token_id: int
) -> tuple[list[int], list[int]]:
    """Return the conversation up to its last token that is not padding, and a prompt of one token
    at least."""
    whole = [*prompt, *response]
    end = len(whole)
    while end > 1 and whole[end - 1] == pad_token_id:
        end -= 1
    border = max(1, min(len(prompt), end))
    return whole[:border], whole[border:end]
