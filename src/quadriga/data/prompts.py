"""Prompts for generation: the rows of data files, checked and tokenised once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.data.chat import characters, chat_of, encode_chats, most_characters
from quadriga.data.collate import PromptItem, collate_prompts
from quadriga.data.rows import Row, read_rows
from quadriga.errors import DataError
from quadriga.protocol import DataProto, fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataset:
    """The prompts of parquet or JSON-lines files, as `PromptItem`s.

    Args:
        max_prompt_length: in tokens; None: no limit.
        filter_overlong_prompts: leave longer prompts out; False: a longer prompt is an error.

    Attributes:
        filtered: number of prompts that were left out.
        longest: tokens of the longest prompt.
        same_width: pad every batch to `longest`, so that batches can be concatenated; False: pad
            to the longest prompt of the batch.

    Raises:
        DataError: a file or a row cannot be used; the message names it.
        ModelError: the tokenizer has no chat template.
    """

    same_width: bool = False

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
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
        values: Sequence[Mapping[str, object]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int | None = None,
        filter_overlong_prompts: bool = True,
    ) -> PromptDataset:
        """Return the dataset of rows in memory. Error messages name them "given, row <number>"."""
        rows = [Row(dict(row), "given", number) for number, row in enumerate(values)]
        dataset = cls.__new__(cls)
        dataset._fill(rows, tokenizer, prompt_key, max_prompt_length, filter_overlong_prompts)
        return dataset

    def _fill(
        self,
        rows: Sequence[Row],
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str,
        max_prompt_length: int | None,
        filter_overlong_prompts: bool,
    ) -> None:
        self.pad_token_id: int = tokenizer.pad_token_id
        self.filtered = 0
        self._items: list[PromptItem] = []
        most = most_characters(max_prompt_length)
        # `index` counts rows before filtering, so it identifies a row of the data for any limit.
        chosen = []
        for index, row in enumerate(rows):
            chat = chat_of(row, prompt_key)
            if characters(chat) <= most:
                chosen.append((index, row, chat))
            elif filter_overlong_prompts and max_prompt_length is not None:
                self.filtered += 1
            else:
                raise row.error(
                    f"the prompt has {characters(chat)} characters, more than {most}; shorten it, "
                    "or set max_prompt_length and filter_overlong_prompts=true"
                )
        encoded = encode_chats(tokenizer, [chat for _, _, chat in chosen])
        for (index, row, chat), ids in zip(chosen, encoded, strict=True):
            if max_prompt_length is not None and len(ids) > max_prompt_length:
                if not filter_overlong_prompts:
                    raise row.error(
                        f"the prompt has {len(ids)} tokens, more than max_prompt_length="
                        f"{max_prompt_length}; increase it, or set filter_overlong_prompts=true"
                    )
                self.filtered += 1
                continue
            self._items.append(
                {
                    fields.INPUT_IDS: ids,
                    fields.RAW_PROMPT: chat,
                    fields.INDEX: index,
                    fields.DATA_SOURCE: row.values.get(fields.DATA_SOURCE),
                    fields.REWARD_MODEL: row.values.get(fields.REWARD_MODEL),
                    fields.EXTRA_INFO: row.values.get(fields.EXTRA_INFO),
                }
            )
        if not self._items:
            raise DataError(
                f"all {self.filtered} prompts of {_names(rows)} have more than "
                f"{max_prompt_length} tokens; increase max_prompt_length"
            )
        self.longest = max(len(item["input_ids"]) for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PromptItem:
        return self._items[index]

    def head(self, count: int) -> PromptDataset:
        """Return a dataset of the first `count` prompts, or of all if there are fewer."""
        part = copy.copy(self)
        part._items = self._items[:count]
        return part

    def collate(self, items: Sequence[PromptItem]) -> DataProto:
        """Return a batch of `items`, padded to the longest of them (see `same_width`)."""
        width = self.longest if self.same_width else None
        return collate_prompts(items, pad_token_id=self.pad_token_id, length=width)


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(row.path for row in rows))
