"""Prompts with answers, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quadriga.data.chat import chat_of, encode_chats
from quadriga.data.collate import collate_answers
from quadriga.data.rows import read_rows
from quadriga.errors import DataError
from quadriga.protocol import DataProto


class SFTDataset:
    """Rows as `prompt_ids` (the templated prompt) and `response_ids` (the answer, then the end).

    The prompt is encoded just as for generation, and the answer apart from it, so that training
    sees the tokens that generation sees. `filtered` counts rows left out because prompt and answer
    together exceed `max_length` tokens (None: no bound).

    Raises:
        DataError: names the file and the row without prompt or answer.
        ModelError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        response_key: str = "extra_info.answer",
        max_length: int | None = None,
    ) -> None:
        rows = read_rows(files)
        chats = [chat_of(row, prompt_key) for row in rows]
        answers = []
        for row in rows:
            answer = row.at(response_key)
            if not isinstance(answer, str):
                raise row.error(f"{response_key!r} must be text, got {type(answer).__name__}")
            answers.append(answer)
        prompt_ids = encode_chats(tokenizer, chats)
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
        items = [
            {"prompt_ids": prompt, "response_ids": [*answer, tokenizer.eos_token_id]}
            for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
        ]
        self._items = [item for item in items if max_length is None or _tokens(item) <= max_length]
        self.filtered = len(items) - len(self._items)
        if not self._items:
            raise DataError(
                f"all {self.filtered} rows of {', '.join(map(str, files))} are longer than "
                f"max_length {max_length}"
            )
        self.pad_token_id: int = tokenizer.pad_token_id

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._items[place]

    def collate(self, items: Sequence[dict[str, Any]]) -> DataProto:
        """A batch of `items`, as wide as its own longest prompt and answer."""
        return collate_answers(items, pad_token_id=self.pad_token_id)


def _tokens(item: dict[str, Any]) -> int:
    return len(item["prompt_ids"]) + len(item["response_ids"])
