"""Prompts for generation: the rows of data files, checked and tokenised once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

import numpy as np

from quadriga.config.paths import expand_home
from quadriga.data.chat import (
    Chat,
    TemplateArguments,
    TemplateChat,
    characters,
    chat_of,
    encode_chats,
    most_characters,
)
from quadriga.data.collate import PromptItem, collate_prompts
from quadriga.data.images import ImageRules, PromptImages, check_no_images, image_stamp
from quadriga.data.rows import Row, check_files, rows_of_file
from quadriga.data.token_cache import TokenCache, is_large, open_cache, tokenizer_digest
from quadriga.errors import DataError
from quadriga.protocol import DataProto, fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptOptions(TypedDict, total=False):
    """Which rows become prompts, and how. See `PromptDataset`."""

    prompt_key: str
    max_prompt_length: int | None
    filter_overlong_prompts: bool
    chat_template_kwargs: TemplateArguments
    image_key: str | None
    images: ImageRules | None


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
        cache_dir: str | Path | None = None,
        **options: Unpack[PromptOptions],
    ) -> None:
        rules = PromptRules(tokenizer, **options)
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
        **options: Unpack[PromptOptions],
    ) -> PromptDataset:
        """Return the dataset of rows in memory. Error messages name them "given, row <number>"."""
        rows = [Row(dict(row), "given", number) for number, row in enumerate(values)]
        rules = PromptRules(tokenizer, **options)
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


@dataclass(frozen=True)
class PromptRules:
    """How rows become prompts. See `PromptDataset` for the meaning of the fields."""

    tokenizer: PreTrainedTokenizerBase
    prompt_key: str = "prompt"
    max_prompt_length: int | None = None
    filter_overlong_prompts: bool = True
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    image_key: str | None = "images"
    images: ImageRules | None = None

    def encode(self, rows: Sequence[Row]) -> list[list[int] | None]:
        """Return the token ids of each row; None for a row that has too many characters.

        Raises `DataError` for such a row, unless long prompts are left out, and for images that
        cannot be used.
        """
        chats = [chat_of(row, self.prompt_key) for row in rows]
        most = most_characters(self.max_prompt_length)
        for row, chat in zip(rows, chats, strict=True):
            if characters(chat) > most:
                self.check(row, None)
        short = [i for i, chat in enumerate(chats) if characters(chat) <= most]
        found: list[list[int] | None] = [None] * len(chats)
        for i, ids in zip(short, self._encode_short(rows, chats, short), strict=True):
            found[i] = ids if self.images is None else self.images.expand(rows[i], ids)
        return found

    def _encode_short(
        self, rows: Sequence[Row], chats: Sequence[Chat], short: Sequence[int]
    ) -> list[list[int]]:
        """Return the token ids of the chats with the numbers `short`, as the template writes them:
        one token for each image."""
        used: list[TemplateChat] = [chats[i] for i in short]
        if self.images is not None:
            used = [self.images.template_chat(rows[i], chats[i]) for i in short]
        else:
            for i in short:
                check_no_images(rows[i], self.image_key)
        if not used:
            return []
        first = rows[0].number
        return encode_chats(self.tokenizer, used, first=first, arguments=self.chat_template_kwargs)

    def keeps(self, tokens: int | None) -> bool:
        """Return whether a prompt of `tokens` tokens (None: too many characters) is used."""
        limit = self.max_prompt_length
        return tokens is not None and (limit is None or tokens <= limit)

    def check(self, row: Row, tokens: int | None) -> None:
        """Raise `DataError` for a prompt without tokens, and for one that is too long, unless such
        prompts are left out."""
        if tokens == 0:
            raise row.error(
                "the prompt has no tokens, since its text is empty and the chat template adds "
                "nothing; remove the row, or use a template that begins a turn"
            )
        left_out = self.filter_overlong_prompts and self.max_prompt_length is not None
        if left_out or self.keeps(tokens):
            return
        if tokens is None:
            size = characters(chat_of(row, self.prompt_key))
            raise row.error(
                f"the prompt has {size} characters, more than "
                f"{most_characters(self.max_prompt_length)}; shorten it, or set max_prompt_length "
                "and filter_overlong_prompts=true"
            )
        raise row.error(
            f"the prompt has {tokens} tokens, more than max_prompt_length="
            f"{self.max_prompt_length}; increase it, or set filter_overlong_prompts=true"
        )

    def item(self, row: Row, ids: list[int], index: int) -> PromptItem:
        """Return the prompt of a row. `index` counts the rows of all files before filtering, so it
        identifies a row of the data for any limit."""
        chat: Chat = chat_of(row, self.prompt_key)
        item: PromptItem = {
            fields.INPUT_IDS: ids,
            fields.RAW_PROMPT: chat,
            fields.INDEX: index,
            fields.DATA_SOURCE: row.values.get(fields.DATA_SOURCE),
            fields.REWARD_MODEL: row.values.get(fields.REWARD_MODEL),
            fields.EXTRA_INFO: row.values.get(fields.EXTRA_INFO),
        }
        if self.images is not None:
            item[fields.MULTI_MODAL_INPUTS] = PromptImages(row, ids, self.images)
        return item


class PromptPart(Protocol):
    """The prompts of one file that are used. `rows` counts those that are left out too."""

    rows: int
    longest: int
    largest_id: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> PromptItem: ...
    def __iter__(self) -> Iterator[PromptItem]: ...


class PromptsInMemory:
    """Prompts of rows that are in memory. `first` is the index of the first row."""

    def __init__(self, rows: Sequence[Row], rules: PromptRules, first: int) -> None:
        self.rows = len(rows)
        self._items: list[PromptItem] = []
        for index, (row, ids) in enumerate(zip(rows, rules.encode(rows), strict=True), start=first):
            tokens = None if ids is None else len(ids)
            rules.check(row, tokens)
            if ids is not None and rules.keeps(tokens):
                self._items.append(rules.item(row, ids, index))
        sizes = [len(item["input_ids"]) for item in self._items]
        self.longest = max(sizes, default=0)
        self.largest_id = max((max(item["input_ids"]) for item in self._items), default=-1)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> PromptItem:
        return self._items[index]

    def __iter__(self) -> Iterator[PromptItem]:
        return iter(self._items)


class CachedPrompts:
    """Prompts of a file whose rows and token ids stay on disk. `first` is the index of row 0."""

    def __init__(self, cache: TokenCache, rules: PromptRules, first: int) -> None:
        self.rows, self._cache, self._rules, self._first = len(cache), cache, rules, first
        limit = rules.max_prompt_length
        used = (cache.lengths >= 0) & (cache.lengths <= (np.inf if limit is None else limit))
        for number in np.flatnonzero(~used)[:1]:
            row, ids = cache[int(number)]
            rules.check(row, len(ids) if cache.lengths[number] >= 0 else None)
        for number in np.flatnonzero(cache.lengths == 0)[:1]:
            rules.check(cache[int(number)][0], 0)
        self._numbers = np.flatnonzero(used)
        self.longest = int(cache.lengths[used].max(initial=0))
        self.largest_id = cache.largest_id(self._numbers)

    @classmethod
    def open(cls, path: Path, folder: Path, rules: PromptRules, first: int) -> CachedPrompts | None:
        """Open the cache of a file, or make it. None for a tokenizer that has no digest.

        Raises:
            DataError: the file cannot be used, or the cache cannot be written.
        """
        digest = tokenizer_digest(rules.tokenizer)
        if digest is None:
            return None
        arguments = json.dumps(dict(rules.chat_template_kwargs), sort_keys=True)
        most = most_characters(rules.max_prompt_length)
        settings = f"{digest} {rules.prompt_key} {most} {arguments}"
        if rules.images is not None or rules.image_key is not None:
            settings += f" {rules.image_key} {rules.images and rules.images.settings}"
        if rules.images is not None and rules.image_key is not None:
            # The number of tokens of an image depends on its size, which a change of its file can
            # change. Its content is not read for this.
            settings += f" {image_stamp(path, rules.image_key)}"
        cache = open_cache(path, folder, settings=settings, encode=rules.encode)
        return cls(cache, rules, first)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> PromptItem:
        number = int(self._numbers[index])
        return self._rules.item(*self._cache[number], self._first + number)

    def __iter__(self) -> Iterator[PromptItem]:
        read = self._cache.read(self._numbers)
        for number, (row, ids) in zip(self._numbers.tolist(), read, strict=True):
            yield self._rules.item(row, ids, self._first + number)
