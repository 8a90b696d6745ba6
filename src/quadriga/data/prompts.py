"""Prompts for generation: the rows of data files, checked and tokenised once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quadriga.config.paths import expand_home
from quadriga.data.chat import NO_ARGUMENTS, TemplateArguments
from quadriga.data.collate import PromptItem, collate_prompts
from quadriga.data.images.prompts import ImageRules
from quadriga.data.prompt_parts import CachedPrompts, PromptPart, PromptRules, PromptsInMemory
from quadriga.data.rows import Row, check_files, rows_of_file
from quadriga.data.token_cache import is_large
from quadriga.errors import DataError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptDataset:
    """The prompts of parquet or JSON-lines files, as `PromptItem`s.

    Args:
        max_prompt_length: in tokens; None: no limit.
        filter_overlong_prompts: leave longer prompts out; False: a longer prompt is an error.
        chat_template_kwargs: arguments of the chat template, such as `enable_thinking`.
        image_key: column of the images of the prompts; None: the rows have none.
        images: how images become tokens; None: the model takes text only, and a row with images is
            an error.
        cache_dir: folder in which the token ids of large files are kept (see `token_cache`); the
            rows of such a file stay on disk. None: all rows are in memory.

    Attributes:
        filtered: number of prompts that were left out.
        file_sizes: number of prompts of each file.
        longest: tokens of the longest prompt.
        largest_id: the largest token id.
        same_width: pad every batch to `longest`, so that batches can be concatenated; False: pad
            to the longest prompt of the batch.

    Raises:
        DataError: a file or a row cannot be used; the message names it.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
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
        chat_template_kwargs: TemplateArguments = NO_ARGUMENTS,
        image_key: str | None = "images",
        images: ImageRules | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        rules = PromptRules(
            tokenizer,
            prompt_key,
            max_prompt_length,
            filter_overlong_prompts,
            chat_template_kwargs,
            image_key,
            images,
        )
        parts: list[PromptPart] = []
        rows = 0
        for path in check_files(files):
            part: PromptPart | None = None
            if cache_dir is not None and is_large(path):
                part = CachedPrompts.open(path, Path(expand_home(cache_dir)), rules, rows)
            parts.append(part or PromptsInMemory(rows_of_file(path), rules, rows))
            rows += parts[-1].rows
        self._join(parts, rules, ", ".join(map(str, files)))

    @classmethod
    def from_rows(
        cls,
        values: Sequence[Mapping[str, object]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        max_prompt_length: int | None = None,
        filter_overlong_prompts: bool = True,
        chat_template_kwargs: TemplateArguments = NO_ARGUMENTS,
        image_key: str | None = "images",
        images: ImageRules | None = None,
    ) -> PromptDataset:
        """Return the dataset of rows in memory. Error messages name them "given, row <number>"."""
        rows = [Row(dict(row), "given", number) for number, row in enumerate(values)]
        rules = PromptRules(
            tokenizer,
            prompt_key,
            max_prompt_length,
            filter_overlong_prompts,
            chat_template_kwargs,
            image_key,
            images,
        )
        dataset = cls.__new__(cls)
        dataset._join([PromptsInMemory(rows, rules, 0)], rules, "given")
        return dataset

    def _join(self, parts: Sequence[PromptPart], rules: PromptRules, names: str) -> None:
        self.pad_token_id: int = rules.tokenizer.pad_token_id
        self.file_sizes = [len(part) for part in parts]
        self.filtered = sum(part.rows for part in parts) - sum(self.file_sizes)
        self._parts, self._starts = list(parts), np.cumsum([0, *self.file_sizes])
        self._size = sum(self.file_sizes)
        if not self._size:
            raise DataError(
                f"all {self.filtered} prompts of {names} have more than "
                f"{rules.max_prompt_length} tokens; increase max_prompt_length"
            )
        self.longest = max(part.longest for part in parts)
        self.largest_id = max(part.largest_id for part in parts)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> PromptItem:
        if not -self._size <= index < self._size:
            raise IndexError(f"prompt {index} of {self._size}")
        index %= self._size
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._parts[part][index - int(self._starts[part])]

    def __iter__(self) -> Iterator[PromptItem]:
        """Yield all prompts in order, which is faster than one by one."""
        if type(self).__getitem__ is not PromptDataset.__getitem__:  # of a subclass
            return (self[index] for index in range(len(self)))
        return islice(chain.from_iterable(self._parts), self._size)

    def head(self, count: int) -> PromptDataset:
        """Return a dataset of the first `count` prompts, or of all if there are fewer."""
        part = copy.copy(self)
        part._size = min(count, self._size)
        before = self._starts[:-1].tolist()
        part.file_sizes = [
            max(0, min(size, count - start))
            for size, start in zip(self.file_sizes, before, strict=True)
        ]
        return part

    def collate(self, items: Sequence[PromptItem]) -> DataProto:
        """Return a batch of `items`, padded to the longest of them (see `same_width`)."""
        width = self.longest if self.same_width else None
        return collate_prompts(items, pad_token_id=self.pad_token_id, length=width)
