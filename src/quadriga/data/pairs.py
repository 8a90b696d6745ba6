"""Pairs of a chosen and a rejected response to one prompt, for a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from quadriga.data.chat import (
    NO_ARGUMENTS,
    Chat,
    Conversation,
    TemplateArguments,
    characters,
    chat_of,
    encode_conversations,
    most_characters,
)
from quadriga.data.collate import scored_rows
from quadriga.data.encoded import EncodedRow, encode_files
from quadriga.data.images import check_text_alone
from quadriga.data.rows import Row
from quadriga.errors import DataError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

MARGINS = "margins"
"""Field of the batches: [B] float32, the margin of the pair of each row."""


class PairItem(TypedDict):
    """One pair: token ids of both conversations, and the least difference of their scores."""

    chosen: Conversation
    rejected: Conversation
    margin: float


@dataclass(frozen=True)
class PairLengths:
    """Bounds of the tokens of some pairs.

    Attributes:
        longest: tokens of the longest conversation.
        own: most tokens of a conversation that the other one of its pair does not have: its
            response, or all of it if the prompts of the pair differ in length. Not more than
            `longest`.
    """

    longest: int
    own: int

    def __or__(self, other: PairLengths) -> PairLengths:
        """Return the bounds of both."""
        return PairLengths(max(self.longest, other.longest), max(self.own, other.own))


class PairDataset:
    """Rows of data files as pairs. See `RMDataConfig` for the columns.

    Args:
        chat_template_kwargs: arguments of the chat template.
        cache_dir: folder in which the token ids of large files are kept; None: all are in memory.

    Attributes:
        filtered: number of pairs left out, because a conversation has more than `max_length`
            tokens (None: no limit).
        lengths: bounds of the tokens.
        largest_id: the largest token id.

    Raises:
        DataError: a row has no pair; the message names the file and the row.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
    """

    rows_per_item = 2
    """Rows of a batch for each pair."""

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        pad_token_id: int,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        margin_key: str | None = None,
        max_length: int | None = None,
        chat_template_kwargs: TemplateArguments = NO_ARGUMENTS,
        cache_dir: str | Path | None = None,
    ) -> None:
        rules = _Rules(
            tokenizer,
            prompt_key,
            chosen_key,
            rejected_key,
            margin_key,
            max_length,
            chat_template_kwargs,
        )
        self._rows = encode_files(files, rules, cache_dir)
        self.filtered = self._rows.left_out
        if not len(self._rows):
            raise DataError(
                f"all {self.filtered} pairs of {', '.join(map(str, files))} have more than "
                f"{max_length} tokens; increase max_length"
            )
        self.pad_token_id = pad_token_id
        self.lengths = reduce(or_, (_lengths(*columns) for columns in self._rows.columns()))
        self.largest_id = max(
            int(ids.flatten().to_numpy().max()) for ids, _ in self._rows.columns()
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PairItem:
        row = self._rows[index]
        first, second, third = row.borders
        return {
            "chosen": (row.ids[:first], row.ids[first:second]),
            "rejected": (row.ids[second:third], row.ids[third:]),
            "margin": row.value,
        }

    def collate(self, items: Sequence[PairItem]) -> DataProto:
        """Return a batch with two rows for each pair, the chosen response first.

        The rows are those of `scored_rows`, with `MARGINS`.
        """
        rows: list[Conversation] = []
        for item in items:
            rows += [item["chosen"], item["rejected"]]
        margins = torch.tensor([item["margin"] for item in items], dtype=torch.float32)
        tensors = scored_rows(rows, self.pad_token_id)
        return DataProto.from_dict({**tensors, MARGINS: margins.repeat_interleave(2)})


@dataclass(frozen=True)
class _Rules:
    """How rows become pairs. See `PairDataset` for the meaning of the fields."""

    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    chosen_key: str
    rejected_key: str
    margin_key: str | None
    max_length: int | None
    arguments: TemplateArguments

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | None]:
        """Return the pair of each row; None for one that is too long.

        Raises:
            As `PairDataset`.
        """
        for row in rows:
            check_text_alone(row)
        pairs = [self._pair(row) for row in rows]
        margins = [0.0 if self.margin_key is None else _margin(r, self.margin_key) for r in rows]
        most = most_characters(self.max_length)
        kept = [
            i
            for i, pair in enumerate(pairs)
            if all(characters(prompt) + len(response) <= most for prompt, response in pair)
        ]
        both = [one for i in kept for one in pairs[i]]
        tokens = iter(
            encode_conversations(
                self.tokenizer,
                [prompt for prompt, _ in both],
                [response for _, response in both],
                self.arguments,
            )
            if both
            else []
        )
        found: list[EncodedRow | None] = [None] * len(rows)
        for i in kept:
            chosen, rejected = next(tokens), next(tokens)
            if self.max_length is None or max(map(_length, (chosen, rejected))) <= self.max_length:
                found[i] = _joined(chosen, rejected, margins[i])
        return found

    def _pair(self, row: Row) -> tuple[tuple[Chat, str], tuple[Chat, str]]:
        chosen = _conversation(row, self.chosen_key, self.prompt_key)
        rejected = _conversation(row, self.rejected_key, self.prompt_key)
        if chosen == rejected:
            raise row.error(f"{self.chosen_key!r} and {self.rejected_key!r} are the same response")
        return chosen, rejected


def _joined(chosen: Conversation, rejected: Conversation, margin: float) -> EncodedRow:
    """Return a pair as one row: the four parts one after the other, and where each begins."""
    parts = [*chosen, *rejected]
    borders = list(accumulate(map(len, parts[:-1])))
    return EncodedRow([token for part in parts for token in part], borders, margin)


def _lengths(ids: pa.ListArray, borders: pa.ListArray) -> PairLengths:
    """Return the bounds of some pairs. Prompts of equal length are taken to be equal."""
    prompt, chosen, third = borders.flatten().to_numpy().reshape(-1, 3).T
    total = ids.value_lengths().to_numpy()
    longest = np.maximum(chosen, total - chosen)
    shared = np.where(third - chosen == prompt, prompt, 0)
    return PairLengths(int(longest.max()), int((longest - shared).max()))


def _conversation(row: Row, key: str, prompt_key: str) -> tuple[Chat, str]:
    """Return the prompt and the response under `key`."""
    value = row.at(key)
    if isinstance(value, str):
        return chat_of(row, prompt_key), value
    chat = chat_of(row, key)
    if len(chat) < 2 or chat[-1]["role"] != "assistant":
        raise row.error(
            f"{key!r} must be a response, or messages that end with one of the assistant, got "
            f"{len(chat)} messages, the last one of role {chat[-1]['role']!r}"
        )
    return chat[:-1], chat[-1]["content"]


def _margin(row: Row, key: str) -> float:
    value = row.at(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
        raise row.error(f"{key!r} must be a finite number, got {value!r:.80}")
    return float(value)


def _length(conversation: Conversation) -> int:
    return len(conversation[0]) + len(conversation[1])
