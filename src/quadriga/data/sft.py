"""Prompts with reference answers, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.data.chat import characters, chat_of, encode_chats, most_characters
from quadriga.data.collate import SFTItem, collate_answers
from quadriga.data.rows import read_rows
from quadriga.errors import DataError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset:
    """Rows of data files as `SFTItem`s: `prompt_ids` and `response_ids` (the answer, then EOS).

    The prompt is tokenised as for generation, and the answer separately. Tokenising them as one
    text could merge characters at the border into a token that generation never sees.

    Attributes:
        filtered: number of rows left out, because prompt and answer together have more than
            `max_length` tokens (None: no limit).

    Raises:
        DataError: a row has no prompt or no answer; the message names the file and the row.
        ModelError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        response_key: str = "extra_info.answer",
        max_length: int | None = None,
    ) -> None:
        chats, answers = [], []
        too_long = 0
        most = most_characters(max_length)
        for row in read_rows(files):
            chat, answer = chat_of(row, prompt_key), row.at(response_key)
            if not isinstance(answer, str):
                raise row.error(f"{response_key!r} must be text, got {type(answer).__name__}")
            size = characters(chat) + len(answer)
            if size <= most:
                chats.append(chat)
                answers.append(answer)
            elif max_length is not None:
                too_long += 1
            else:
                raise row.error(f"prompt and answer have {size} characters, more than {most}")
        prompt_ids = encode_chats(tokenizer, chats)
        # A tokenizer does not accept an empty list.
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"] if answers else []
        items: list[SFTItem] = [
            {"prompt_ids": prompt, "response_ids": [*answer, tokenizer.eos_token_id]}
            for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
        ]
        self._items = [item for item in items if max_length is None or _tokens(item) <= max_length]
        self.filtered = too_long + len(items) - len(self._items)
        if not self._items:
            raise DataError(
                f"all {self.filtered} rows of {', '.join(map(str, files))} have more than "
                f"{max_length} tokens; increase max_length"
            )
        self.pad_token_id: int = tokenizer.pad_token_id

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> SFTItem:
        return self._items[index]

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the prompt and of the response in the row with most tokens."""
        row = max(self._items, key=_tokens)
        return len(row["prompt_ids"]), len(row["response_ids"])

    def collate(self, items: Sequence[SFTItem]) -> DataProto:
        """Return a batch of `items`, padded to its longest prompt and its longest answer."""
        return collate_answers(items, pad_token_id=self.pad_token_id)


def _tokens(item: SFTItem) -> int:
    return len(item["prompt_ids"]) + len(item["response_ids"])
