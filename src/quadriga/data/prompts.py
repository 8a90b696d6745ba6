"""Prompts for generation: the rows of data files, checked and tokenised once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quadriga.data.chat import (
    TemplateArguments,
    TemplateChat,
    characters,
    chat_of,
    encode_chats,
    most_characters,
)
from quadriga.data.collate import PromptItem, collate_prompts
from quadriga.data.encoded import EncodedDataset, EncodedRow
from quadriga.data.images import ImageRules, PromptImages, check_no_images, image_stamp
from quadriga.data.rows import Row
from quadriga.protocol import DataProto, fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(repr=False, eq=False)
class PromptDataset(EncodedDataset[PromptItem]):
    """The prompts of parquet or JSON-lines files, as `PromptItem`s.

    Args:
        max_prompt_length: in tokens; None: no limit.
        filter_overlong_prompts: leave longer prompts out; False: a longer prompt is an error.
        chat_template_kwargs: arguments of the chat template, such as `enable_thinking`.
        image_key: column of the images of the prompts; None: the rows have none.
        images: how images become tokens; None: the model takes text only, and a row with images is
            an error.
        cache_dir: folder in which the token ids of large files are kept (see `encoded`); the rows
            of such a file stay on disk. None: all rows are in memory.

    Attributes:
        longest: tokens of the longest prompt.
        same_width: pad every batch to `longest`, so that batches can be concatenated; False: pad
            to the longest prompt of the batch.

    Raises:
        DataError: a file or a row cannot be used; the message names it.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
    """

    NOUN = "prompts"
    KEEPS_ROWS = True

    files: Sequence[str | Path | Row]
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    prompt_key: str = "prompt"
    max_prompt_length: int | None = None
    filter_overlong_prompts: bool = True
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    image_key: str | None = "images"
    images: ImageRules | None = None
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        self.same_width = False
        self.pad_token_id: int = self.tokenizer.pad_token_id
        self.load(self.files, self.max_prompt_length, "max_prompt_length")
        self.longest = max(int(ids.value_lengths().to_numpy().max()) for ids, _ in self.columns())

    @classmethod
    def from_rows(
        cls,
        values: Sequence[Mapping[str, object]],
        tokenizer: PreTrainedTokenizerBase,
        **options: Any,  # those of the class
    ) -> Self:
        """Return the dataset of rows in memory. Error messages name them "given, row <number>"."""
        rows = [Row(dict(row), "given", number) for number, row in enumerate(values)]
        return cls(rows, tokenizer, **options)

    def collate(self, items: Sequence[PromptItem]) -> DataProto:
        """Return a batch of `items`, padded to the longest of them (see `same_width`)."""
        width = self.longest if self.same_width else None
        return collate_prompts(items, pad_token_id=self.pad_token_id, length=width)

    def settings(self, path: Path) -> str:
        """See `EncodedDataset`. The number of tokens of an image depends on its size, which a
        change of its file can change. Its content is not read for this."""
        stamp = "" if not (self.images and self.image_key) else image_stamp(path, self.image_key)
        return f"{super().settings(path)} {stamp}"

    def encode(self, rows: Sequence[Row]) -> list[EncodedRow | None]:
        """Return the token ids of each row; None for one that is too long.

        Raises `DataError` for such a row, unless long prompts are left out, and for images that
        cannot be used.
        """
        chats = [chat_of(row, self.prompt_key) for row in rows]
        most = most_characters(self.max_prompt_length)
        short = [i for i, chat in enumerate(chats) if characters(chat) <= most]
        limit = self.max_prompt_length
        leaves_out = self.filter_overlong_prompts and limit is not None
        for row, chat in zip(rows, chats, strict=True):
            if not leaves_out and characters(chat) > most:
                raise row.error(
                    f"the prompt has {characters(chat)} characters, more than {most}; shorten it, "
                    "or set max_prompt_length and filter_overlong_prompts=true"
                )
        used: list[TemplateChat] = []
        for i in short:
            if self.images is not None:
                used.append(self.images.template_chat(rows[i], chats[i]))
            else:
                check_no_images(rows[i], self.image_key)
                used.append(chats[i])
        first = rows[0].number if rows else 0
        encoded = encode_chats(
            self.tokenizer, used, first=first, arguments=self.chat_template_kwargs
        )
        found: list[EncodedRow | None] = [None] * len(rows)
        for i, ids in zip(short, encoded, strict=True):
            expanded = ids if self.images is None else self.images.expand(rows[i], ids)
            if not expanded:
                raise rows[i].error(
                    "the prompt has no tokens, since its text is empty and the chat template adds "
                    "nothing; remove the row, or use a template that begins a turn"
                )
            if limit is None or len(expanded) <= limit:
                found[i] = EncodedRow(expanded)
            elif not leaves_out:
                raise rows[i].error(
                    f"the prompt has {len(expanded)} tokens, more than max_prompt_length={limit}; "
                    "increase it, or set filter_overlong_prompts=true"
                )
        return found

    def item(self, row: EncodedRow, source: Row | None, index: int) -> PromptItem:
        """Return the prompt of a row. `index` counts the rows of all files before filtering, so it
        identifies a row of the data for any limit."""
        assert source is not None
        item: PromptItem = {
            fields.INPUT_IDS: list(row.ids),
            fields.RAW_PROMPT: chat_of(source, self.prompt_key),
            fields.INDEX: index,
            fields.DATA_SOURCE: source.values.get(fields.DATA_SOURCE),
            fields.REWARD_MODEL: source.values.get(fields.REWARD_MODEL),
            fields.EXTRA_INFO: source.values.get(fields.EXTRA_INFO),
        }
        if self.images is not None:
            item[fields.MULTI_MODAL_INPUTS] = PromptImages(source, row.ids, self.images)
        return item
