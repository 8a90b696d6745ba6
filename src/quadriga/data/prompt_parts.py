"""The prompts of one file: in memory, or on disk with a cache of their token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quadriga.data.chat import (
    Chat,
    TemplateArguments,
    TemplateChat,
    characters,
    chat_of,
    encode_chats,
    most_characters,
)
from quadriga.data.collate import PromptItem
from quadriga.data.images.prompts import ImageRules, PromptImages
from quadriga.data.images.reading import check_no_images, image_stamp
from quadriga.data.rows import Row
from quadriga.data.token_cache import TokenCache, open_cache, tokenizer_digest
from quadriga.protocol import fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptRules:
    """How rows become prompts. See `PromptDataset` for the meaning of the fields."""

    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    max_prompt_length: int | None
    filter_overlong_prompts: bool
    arguments: TemplateArguments = field(default_factory=dict)
    image_key: str | None = None
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
        return encode_chats(self.tokenizer, used, first=first, arguments=self.arguments)

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
        arguments = json.dumps(dict(rules.arguments), sort_keys=True)
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
