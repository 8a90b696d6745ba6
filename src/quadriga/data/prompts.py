"""Prompts to be answered: rows of data files, checked, templated and measured once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quadriga.data.chat import chat_of, encode_chats
from quadriga.data.collate import collate_prompts
from quadriga.data.rows import Row, read_rows
from quadriga.errors import DataError
from quadriga.protocol import DataProto

CARRIED = ("data_source", "reward_model", "extra_info")


class PromptDataset:
    """The prompts of parquet or JSON-lines files.

    An item is a dict: `input_ids` (list of int, the templated prompt), `raw_prompt` (its messages),
    `index` (the row's place among the rows of all files) and, where the row has them,
    `data_source`, `reward_model`, `extra_info` (absent ones are None).

    `filtered` counts the prompts left out because they are longer than `max_prompt_length` tokens;
    with `filter_overlong_prompts=False` such a prompt is an error. `max_prompt_length=None`: no
    bound.

    Raises:
        DataError: names the file, and the row, that cannot be used.
        ModelError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int | None = None,
        filter_overlong_prompts: bool = True,
    ) -> None:
        self._fill(
            read_rows(files), tokenizer, prompt_key, max_prompt_length, filter_overlong_prompts
        )

    @classmethod
    def from_rows(
        cls,
        values: Sequence[dict[str, Any]],
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int | None = None,
        filter_overlong_prompts: bool = True,
    ) -> PromptDataset:
        """The same from rows that are here already; messages name them "given", row by row."""
        rows = [Row(row, "given", number) for number, row in enumerate(values)]
        dataset = cls.__new__(cls)
        dataset._fill(rows, tokenizer, prompt_key, max_prompt_length, filter_overlong_prompts)
        return dataset

    def _fill(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        prompt_key: str,
        max_prompt_length: int | None,
        filter_overlong_prompts: bool,
    ) -> None:
        chats = [chat_of(row, prompt_key) for row in rows]
        self.pad_token_id: int = tokenizer.pad_token_id
        self.filtered = 0
        self._items: list[dict[str, Any]] = []
        for index, (row, chat, ids) in enumerate(
            zip(rows, chats, encode_chats(tokenizer, chats), strict=True)
        ):
            if max_prompt_length is not None and len(ids) > max_prompt_length:
                if not filter_overlong_prompts:
                    raise row.error(
                        f"the prompt has {len(ids)} tokens, more than max_prompt_length "
                        f"{max_prompt_length}; raise it, or set filter_overlong_prompts=true"
                    )
                self.filtered += 1
                continue
            carried = {key: row.values.get(key) for key in CARRIED}
            self._items.append({"input_ids": ids, "raw_prompt": chat, "index": index, **carried})
        if not self._items:
            raise DataError(
                f"all {self.filtered} prompts of {_names(rows)} are longer than "
                f"max_prompt_length {max_prompt_length}"
            )
        self.longest = max(len(item["input_ids"]) for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._items[place]

    def head(self, count: int) -> PromptDataset:
        """The first `count` prompts (all, where there are fewer)."""
        part = copy.copy(self)
        part._items = self._items[:count]
        return part

    def collate(self, items: Sequence[dict[str, Any]]) -> DataProto:
        """A batch of `items`, as wide as the longest prompt of the dataset."""
        return collate_prompts(items, pad_token_id=self.pad_token_id, length=self.longest)


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.path for row in rows))
