"""Pairs of a chosen and a rejected response to one prompt, for a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from quadriga.data.chat import (
    Chat,
    Conversation,
    TemplateArguments,
    characters,
    chat_of,
    encode_conversations,
    most_characters,
)
from quadriga.data.collate import scored_rows
from quadriga.data.encoded import EncodedDataset, EncodedRow
from quadriga.data.images import check_text_alone
from quadriga.data.rows import Row
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


@dataclass(repr=False, eq=False)
class PairDataset(EncodedDataset[PairItem]):
    """Rows of data files as pairs. See `RMDataConfig` for the columns.

    Args:
        max_length: tokens of a conversation; longer pairs are left out. None: no limit.
        chat_template_kwargs: arguments of the chat template.
        cache_dir: folder in which the token ids of large files are kept; None: all are in memory.

    Attributes:
        lengths: bounds of the tokens.

    Raises:
        DataError: a row has no pair; the message names the file and the row.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
    """

    NOUN = "pairs"
    rows_per_item = 2
    """Rows of a batch for each pair."""

    files: Sequence[str | Path]
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    pad_token_id: int
    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    max_length: int | None = None
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        self.load(self.files, self.max_length, "max_length")
        found = [_lengths(*columns) for columns in self.columns()]
        self.lengths = PairLengths(max(f.longest for f in found), max(f.own for f in found))

    def item(self, row: EncodedRow, source: Row | None, index: int) -> PairItem:
        """Return the pair of a row."""
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
        rows = [row for item in items for row in (item["chosen"], item["rejected"])]
        margins = torch.tensor([item["margin"] for item in items], dtype=torch.float32)
        tensors = scored_rows(rows, self.pad_token_id)
        return DataProto.from_dict({**tensors, MARGINS: margins.repeat_interleave(2)})

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | None]:
        """Return the pair of each row, its four parts one after the other; None for a pair that is
        too long."""
        pairs = [self._pair(row) for row in rows]
        most = most_characters(self.max_length)
        kept = [i for i, (*both, _) in enumerate(pairs) if max(map(_characters, both)) <= most]
        both = [one for i in kept for one in pairs[i][:2]]
        prompts, responses = [prompt for prompt, _ in both], [response for _, response in both]
        arguments = self.chat_template_kwargs
        tokens = iter(encode_conversations(self.tokenizer, prompts, responses, arguments))
        found: list[EncodedRow | None] = [None] * len(rows)
        for i in kept:
            parts = [*next(tokens), *next(tokens)]
            sizes = [len(part) for part in parts]
            longest = max(sizes[0] + sizes[1], sizes[2] + sizes[3])
            if self.max_length is None or longest <= self.max_length:
                ids = [token for part in parts for token in part]
                found[i] = EncodedRow(ids, list(accumulate(sizes[:3])), pairs[i][2])
        return found

    def _pair(self, row: Row) -> tuple[Answered, Answered, float]:
        """Return both conversations and the margin of a row."""
        check_text_alone(row)
        chosen = _conversation(row, self.chosen_key, self.prompt_key)
        rejected = _conversation(row, self.rejected_key, self.prompt_key)
        if chosen == rejected:
            raise row.error(f"{self.chosen_key!r} and {self.rejected_key!r} are the same response")
        return chosen, rejected, 0.0 if self.margin_key is None else _margin(row, self.margin_key)


Answered = tuple[Chat, str]
"""A prompt and the response to it."""


def _characters(conversation: Answered) -> int:
    return characters(conversation[0]) + len(conversation[1])


def _lengths(ids: pa.ListArray, borders: pa.ListArray) -> PairLengths:
    """Return the bounds of some pairs. Prompts of equal length are taken to be equal."""
    prompt, chosen, third = borders.flatten().to_numpy().reshape(-1, 3).T
    total = ids.value_lengths().to_numpy()
    longest = np.maximum(chosen, total - chosen)
    shared = np.where(third - chosen == prompt, prompt, 0)
    return PairLengths(int(longest.max()), int((longest - shared).max()))


def _conversation(row: Row, key: str, prompt_key: str) -> Answered:
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
