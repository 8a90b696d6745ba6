"""Conversations for supervised fine-tuning: prompts with answers, or several turns."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quadriga.data.chat import Chat, characters, chat_of, most_characters
from quadriga.data.collate import SFTItem, collate_answers
from quadriga.data.conversations.turns import Conversation, assistant_turns, encode_turns
from quadriga.data.rows import Row, read_rows
from quadriga.errors import DataError, ModelError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 256  # conversations that are encoded at once, which bounds the memory for their texts


class SFTDataset:
    """Rows of data files as `SFTItem`s: conversations, with a mask of the assistant's tokens.

    A row has a prompt and an answer, or under `messages_key` a list of messages of several turns.
    See `conversations` for how the tokens of the assistant are found.

    Args:
        messages_key: column of the conversations; None: rows have a prompt and an answer.
        loss_turns: "all" turns of the assistant are trained, or the "last" of each conversation.

    Attributes:
        filtered: number of rows left out, because they have more than `max_length` tokens (None:
            no limit).
        ends: the tokens with which the last turns of the assistant end.
        largest_id: the largest token id.

    Raises:
        DataError: a row has no prompt, no answer or no turn of the assistant; the message names the
            file and the row.
        ModelError: the tokenizer has no chat template, or it is unknown what the assistant writes.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        response_key: str = "extra_info.answer",
        messages_key: str | None = None,
        loss_turns: Literal["all", "last"] = "all",
        max_length: int | None = None,
    ) -> None:
        chats, kept = [], []
        most = most_characters(max_length)
        rows = read_rows(files)
        for row in rows:
            chat = (
                _with_answer(row, prompt_key, response_key)
                if messages_key is None
                else _with_turns(row, messages_key)
            )
            size = characters(chat)
            if size <= most:
                chats.append(chat)
                kept.append(row)
            elif max_length is None:
                raise row.error(f"the conversation has {size} characters, more than {most}")
        encoded: list[Conversation] = []
        for start in range(0, len(chats), _BLOCK):
            block = slice(start, start + _BLOCK)
            encoded += _encoded(tokenizer, kept[block], chats[block], loss_turns == "last")
        used = [found for found in encoded if max_length is None or len(found.ids) <= max_length]
        self.filtered = len(rows) - len(used)
        if not used:
            raise DataError(
                f"all {self.filtered} rows of {', '.join(map(str, files))} have more than "
                f"{max_length} tokens; increase max_length"
            )
        self.ends = {found.ids[-1] for found in used}
        self.largest_id = max(max(found.ids) for found in used)
        self.pad_token_id: int = tokenizer.pad_token_id
        self._items = [_item(found) for found in used]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> SFTItem:
        return self._items[index]

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the prompt and of the response in the row with most tokens."""
        row = max(self._items, key=_tokens)
        return len(row["prompt_ids"]), len(row["response_ids"])

    def head(self, count: int) -> SFTDataset:
        """Return a dataset of the first `count` conversations, or of all if there are fewer."""
        part = copy.copy(self)
        part._items = self._items[:count]
        return part

    def collate(self, items: Sequence[SFTItem]) -> DataProto:
        """Return a batch of `items`, padded to its longest prompt and its longest answer."""
        return collate_answers(items, pad_token_id=self.pad_token_id)


def _encoded(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], chats: Sequence[Chat], last_only: bool
) -> list[Conversation]:
    """Encode chats. An error names the row of the first one that cannot be encoded."""
    try:
        return encode_turns(tokenizer, chats, last_only=last_only)
    except ModelError as error:
        if len(chats) == 1:
            row = rows[0]
            name = str(tokenizer.name_or_path)
            raise ModelError(f"{row.path}, row {row.number}: {error}", path=name) from error
        single = (slice(i, i + 1) for i in range(len(chats)))
        return [
            found
            for one in single
            for found in _encoded(tokenizer, rows[one], chats[one], last_only)
        ]


def _with_answer(row: Row, prompt_key: str, response_key: str) -> Chat:
    chat, answer = chat_of(row, prompt_key), row.at(response_key)
    if not isinstance(answer, str):
        raise row.error(f"{response_key!r} must be text, got {type(answer).__name__}")
    return [*chat, {"role": "assistant", "content": answer}]


def _with_turns(row: Row, messages_key: str) -> Chat:
    chat = chat_of(row, messages_key)
    if not assistant_turns(chat):
        roles = ", ".join(dict.fromkeys(message["role"] for message in chat))
        raise row.error(
            f"{messages_key!r} has no message of the role 'assistant', so nothing can be trained; "
            f"found {roles}"
        )
    return chat


def _item(conversation: Conversation) -> SFTItem:
    return {
        "prompt_ids": conversation.prompt_ids,
        "response_ids": conversation.response_ids,
        "response_mask": conversation.response_mask,
    }


def _tokens(item: SFTItem) -> int:
    return len(item["prompt_ids"]) + len(item["response_ids"])
