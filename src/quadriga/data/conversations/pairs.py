"""Pairs of a chosen and a rejected response to one prompt, for a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from quadriga.data.chat import Chat, characters, chat_of, encode_conversations, most_characters
from quadriga.data.conversations.scored_rows import Conversation, scored_rows
from quadriga.data.rows import Row, read_rows
from quadriga.errors import DataError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGINS = "margins"
"""Field of the batches: [B] float32, the margin of the pair of each row."""


class PairItem(TypedDict):
    """One pair: token ids of both conversations, and the least difference of their scores."""

    chosen: Conversation
    rejected: Conversation
    margin: float


class PairDataset:
    """Rows of data files as pairs. See `RMDataConfig` for the columns.

    Attributes:
        filtered: number of pairs left out, because a conversation has more than `max_length`
            tokens (None: no limit).

    Raises:
        DataError: a row has no pair; the message names the file and the row.
        ModelError: the tokenizer has no chat template.
    """

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
    ) -> None:
        prompts: list[Chat] = []
        responses: list[str] = []
        margins: list[float] = []
        self.filtered = 0
        most = most_characters(max_length)
        for row in read_rows(files):
            pair = [_conversation(row, key, prompt_key) for key in (chosen_key, rejected_key)]
            if pair[0] == pair[1]:
                raise row.error(f"{chosen_key!r} and {rejected_key!r} are the same response")
            if max(characters(prompt) + len(response) for prompt, response in pair) > most:
                self.filtered += 1
                continue
            prompts += [prompt for prompt, _ in pair]
            responses += [response for _, response in pair]
            margins.append(0.0 if margin_key is None else _margin(row, margin_key))
        tokens = encode_conversations(tokenizer, prompts, responses) if prompts else []
        self._items: list[PairItem] = []
        for number, margin in enumerate(margins):
            chosen, rejected = tokens[2 * number], tokens[2 * number + 1]
            if max_length is None or max(map(_length, (chosen, rejected))) <= max_length:
                self._items.append({"chosen": chosen, "rejected": rejected, "margin": margin})
            else:
                self.filtered += 1
        if not self._items:
            raise DataError(
                f"all {self.filtered} pairs of {', '.join(map(str, files))} have more than "
                f"{max_length} tokens; increase max_length"
            )
        self.pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PairItem:
        return self._items[index]

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(max(_length(item["chosen"]), _length(item["rejected"])) for item in self._items)

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
