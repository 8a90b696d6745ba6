"""Encoded rows of files: token ids in Arrow's format, in memory or mapped from a cache file.

A row has token ids, borders (positions in them, whose meaning the dataset knows) and one number:

    a prompt         ids p p p            the row of the file is kept beside it
    a conversation   ids p p a a u a      borders 2 4 5: not trained, trained, not, trained; 3 of
                                          the tokens are trained
    a pair           ids p c c p r        borders 1 3 4: prompt, chosen, prompt, rejected; margin

The rows of a large file are kept in a cache file, which is mapped into memory: a row costs memory
only while it is used, and processes on one node share it. Nothing in it is executed or unpickled.

The name of a cache file contains a digest of everything that the rows depend on: the content of the
data file, the tokenizer with its template, and the settings. A change of one of these makes a new
cache file. A file appears complete or not at all. It ends with the SHA-256 of its content, which is
compared when it is mapped: a damaged file is made again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields as fields_of
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, get_args

import numpy as np

from quadriga.config.convert import with_texts
from quadriga.config.paths import Dataclass, local_path
from quadriga.config.schema import SpecialTokens
from quadriga.data.chat import (
    Chat,
    TemplateArguments,
    TemplateChat,
    characters,
    chat_of,
    encode_chats,
    most_characters,
    neutraliser,
)
from quadriga.data.images import TAG, ImageRules, PromptImages, check_no_images, image_stamp
from quadriga.data.loader import collate_prompts
from quadriga.data.rows import Piece, Row, check_files, count_rows, read_pieces, rows_of_columns
from quadriga.data.user_classes import PromptItem
from quadriga.errors import DataError, unknown_name
from quadriga.files import replacing
from quadriga.observability.console import progress
from quadriga.protocol import DataProto, fields

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")

LARGE_FILE = 64 << 20  # bytes of a file whose rows are kept in a cache file
LARGE_COUNT = 50_000  # or rows of it
_BLOCK = 256  # rows that are encoded at once, which bounds the memory for their texts
_FORMAT = "rows 5"  # of cache files; another text makes new ones
_OWN = tuple(f"quadriga: {name}" for name in ("ids", "borders", "value", "row"))
_IDS, _BORDERS, _VALUE, _NUMBER = _OWN
_DIGEST = 32  # bytes of SHA-256 at the end of a cache file

_log = logging.getLogger("quadriga")


@dataclass(frozen=True)
class EncodedRow:
    """One row: token ids, positions in them in ascending order, and a number."""

    ids: Sequence[int]
    borders: Sequence[int] = ()
    value: float = 0.0


@dataclass(frozen=True)
class _Part:
    """Some encoded rows of a file; `first` counts the rows of all files before it."""

    batch: pa.RecordBatch
    path: Path
    first: int
    rows: Sequence[Row] | None

    def sources(self, start: int, stop: int) -> Sequence[Row]:
        """Return the rows of the file behind encoded rows."""
        if self.rows is not None:
            return self.rows[start:stop]
        batch = self.batch.slice(start, stop - start)
        own = [name for name in batch.schema.names if name not in _OWN]
        numbers = batch.column(_NUMBER).to_pylist()
        return rows_of_columns(batch.select(own), self.path, numbers)


@dataclass(repr=False, eq=False)
class EncodedDataset(Generic[ItemT]):
    """Rows of data files as items: the common part of prompts, conversations and pairs.

    A subclass is a dataclass, whose fields are all that its rows depend on beside the files.

    Args:
        prompt_key: column of the prompts.
        chat_template_kwargs: arguments of the chat template, such as `enable_thinking`.
        special_tokens: of the tokenizer, in the texts of messages: "keep" them, "neutralise" them
            by a space (see `neutraliser`), or "refuse" the row.
        cache_dir: folder in which the token ids of large files are kept; None: all are in memory.

    Attributes:
        filtered: number of rows left out because they are too long.
        file_sizes: number of rows of each file that are used.
        largest_id: the largest token id.
    """

    NOUN: ClassVar[str]
    KEEPS_ROWS: ClassVar[bool] = False  # whether items need the rows of the file

    files: Sequence[str | Path | Row]
    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    prompt_key: str = "prompt"
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)
    special_tokens: SpecialTokens = "keep"
    cache_dir: str | Path | None = None

    @classmethod
    def from_settings(
        cls,
        files: Sequence[str | Row],
        tokenizer: PreTrainedTokenizerBase,
        settings: Dataclass,
        **more: Any,  # fields that the settings do not have
    ) -> Self:
        """Return the dataset of files, with each field that settings have under its name."""
        names = [f.name for f in fields_of(cls) if hasattr(settings, f.name)]
        own: dict[str, Any] = {name: getattr(settings, name) for name in names}
        return cls(**{**own, **more, "files": files, "tokenizer": tokenizer})

    def encode(self, rows: Sequence[Row]) -> Sequence[EncodedRow | None]:
        """Return each row encoded; None for one that is left out."""
        raise NotImplementedError

    def item(self, row: EncodedRow, source: Row | None, index: int) -> ItemT:
        """Return the item of a row; `index` counts the rows of all files, also those left out."""
        raise NotImplementedError

    @cached_property
    def _neutral(self) -> Callable[[str], str]:
        return neutraliser(self.tokenizer, (TAG,) if getattr(self, "images", None) else ())

    def own_texts(self, row: Row, chat: Chat) -> Chat:
        """Return a chat of a row, with the special tokens in its texts as `special_tokens` says.

        The texts are all that a template may write: also a name, or a thought.
        """
        if self.special_tokens == "keep":
            return chat
        written: Chat = with_texts(chat, self._neutral)
        if self.special_tokens == "refuse" and written != chat:
            found = next(new for new, old in zip(written, chat, strict=True) if new != old)
            raise row.error(
                f"a message has a special token of the tokenizer in its text, which neutralised is "
                f"{found!r:.200}; remove it, or set special_tokens to neutralise or keep"
            )
        return written

    def settings(self, path: Path) -> str:
        """Return what the encoded rows of a file depend on beside its content and the tokenizer."""
        own = {f.name: getattr(self, f.name) for f in fields_of(self)}
        for name in ("files", "tokenizer", "cache_dir"):
            own.pop(name)
        return json.dumps(own, sort_keys=True, default=_plain)

    def load(self, files: Sequence[str | Path | Row], limit: int | None, key: str) -> None:
        """Encode the rows of the files, or map what an earlier run has kept of large ones.

        Args:
            limit: tokens of the longest row, from the setting `key`.
        """
        if self.special_tokens not in (known := get_args(SpecialTokens)):
            raise unknown_name("value of special_tokens", self.special_tokens, known)
        self._parts: list[_Part] = []
        self.file_sizes: list[int] = []
        count = 0
        given = [row for row in files if isinstance(row, Row)]
        named = [file for file in files if not isinstance(file, Row)]
        paths = [Path("given")] if given else check_files(named)
        for path in paths:
            size, parts = self._parts_of(path, given, count)
            self._parts += [part for part in parts if part.batch.num_rows]
            self.file_sizes.append(sum(part.batch.num_rows for part in parts))
            count += size
        self._size = sum(self.file_sizes)
        self.filtered = count - self._size
        if not self._size:
            names = ", ".join(map(str, paths))
            raise DataError(
                f"all {self.filtered} {self.NOUN} of {names} have more than {limit} tokens; "
                f"increase {key}"
            )
        self._starts = np.cumsum([0, *(part.batch.num_rows for part in self._parts)])
        self.largest_id = max(int(ids.flatten().to_numpy().max()) for ids, *_ in self.columns())

    def _parts_of(self, path: Path, given: list[Row], first: int) -> tuple[int, list[_Part]]:
        """Return the number of rows of a file, and those that are used."""
        if self.cache_dir is not None and not given and _is_large(path):
            digest = _tokenizer_digest(self.tokenizer)
            if digest is not None:
                key = f"{_FORMAT} {digest} {self.settings(path)}"
                batches = _cached(path, Path(local_path(self.cache_dir)), key, self._write)
                return count_rows(path), [_Part(batch, path, first, None) for batch in batches]
        size, parts = 0, []
        for piece in [Piece(given, None)] if given else read_pieces(path):
            batch, kept = self._encoded(piece, with_columns=False)
            parts.append(_Part(batch, path, first, kept if self.KEEPS_ROWS else None))
            size += len(piece.rows)
        return size, parts

    def _encoded(self, piece: Piece, *, with_columns: bool) -> tuple[pa.RecordBatch, list[Row]]:
        """Return the rows of a piece that are used, encoded and as they are in the file."""
        import pyarrow as pa

        found: list[EncodedRow | None] = []
        for start in range(0, len(piece.rows), _BLOCK):
            found += self.encode(piece.rows[start : start + _BLOCK])
        kept = [i for i, row in enumerate(found) if row is not None]
        rows = [row for row in found if row is not None]
        lists = pa.list_(pa.int32())
        columns = {
            _IDS: pa.array([row.ids for row in rows], lists),
            _BORDERS: pa.array([row.borders for row in rows], lists),
            _VALUE: pa.array([row.value for row in rows], pa.float64()),
        }
        if self.KEEPS_ROWS and with_columns:
            assert piece.columns is not None
            source = piece.columns.take(pa.array(kept, pa.int32()))
            columns[_NUMBER] = pa.array([piece.rows[i].number for i in kept], pa.int32())
            columns |= dict(zip(source.schema.names, source.columns, strict=True))
        return pa.RecordBatch.from_pydict(columns), [piece.rows[i] for i in kept]

    def _write(self, source: Path, path: Path) -> None:
        """Write the cache file of a data file, and show the progress."""
        import pyarrow as pa

        with contextlib.ExitStack() as stack:
            show = stack.enter_context(progress(f"tokenising {source.name}", count_rows(source)))
            writer: pa.RecordBatchStreamWriter | None = None
            for piece in read_pieces(source):
                batch, _ = self._encoded(piece, with_columns=True)
                if writer is None:
                    file = stack.enter_context(pa.OSFile(str(path), "wb"))
                    writer = stack.enter_context(pa.ipc.new_stream(file, batch.schema))
                writer.write_batch(batch)
                show(len(piece.rows))

    def columns(self) -> Iterator[tuple[pa.ListArray, pa.ListArray, pa.DoubleArray]]:
        """Yield token ids, borders and numbers of some thousand rows at a time."""
        for part in self._parts:
            ids, borders, value = (part.batch.column(name) for name in (_IDS, _BORDERS, _VALUE))
            yield ids, borders, value

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> ItemT:
        if not -self._size <= index < self._size:
            raise IndexError(f"row {index} of {self._size} {self.NOUN}")
        index %= self._size
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        start = index - int(self._starts[part])
        return next(self._items(self._parts[part], start, start + 1))

    def __iter__(self) -> Iterator[ItemT]:
        """Yield all items in order, which is faster than one by one."""
        if type(self).__getitem__ is not EncodedDataset.__getitem__:  # of a subclass
            yield from (self[index] for index in range(self._size))
            return
        for part, start in zip(self._parts, self._starts.tolist(), strict=False):
            yield from self._items(part, 0, min(part.batch.num_rows, max(0, self._size - start)))

    def _items(self, part: _Part, start: int, stop: int) -> Iterator[ItemT]:
        batch = part.batch.slice(start, stop - start)
        ids, borders, values = (batch.column(name).to_pylist() for name in (_IDS, _BORDERS, _VALUE))
        sources = part.sources(start, stop) if self.KEEPS_ROWS else [None] * len(ids)
        for row, source in zip(map(EncodedRow, ids, borders, values), sources, strict=True):
            yield self.item(row, source, part.first + (source.number if source else 0))

    def head(self, count: int) -> Self:
        """Return a dataset of the first `count` rows, or of all if there are fewer."""
        part = copy.copy(self)
        part._size = min(count, self._size)
        ends = np.minimum(np.cumsum([0, *self.file_sizes]), count)
        part.file_sizes = np.diff(ends).tolist()
        return part


def _plain(value: object) -> object:
    """Return a setting as a JSON value; `ImageRules` have a text for digests."""
    return dict(value) if isinstance(value, Mapping) else str(getattr(value, "settings", value))


def _is_large(path: Path) -> bool:
    """Return whether the rows of a file are kept in a cache file."""
    large = path.stat().st_size >= LARGE_FILE
    return large or (path.suffix == ".parquet" and count_rows(path) >= LARGE_COUNT)


def _read(path: Path) -> list[pa.RecordBatch]:
    """Map a cache file. Raises `ArrowException` or `OSError` for a damaged one."""
    import pyarrow as pa

    mapped = pa.memory_map(str(path)).read_buffer()
    content = memoryview(mapped)[:-_DIGEST]
    if hashlib.sha256(content).digest() != mapped[-_DIGEST:].to_pybytes():
        raise OSError("its content does not have the digest at its end")
    batches = list(pa.ipc.open_stream(mapped))
    for batch in batches:
        batch.select([_IDS, _BORDERS, _VALUE]).validate(full=True)
    return batches


def _cached(
    source: Path, folder: Path, key: str, write: Callable[[Path, Path], None]
) -> list[pa.RecordBatch]:
    """Map the cache file of a data file. It is written if there is none that can be used.

    Args:
        key: all that the content depends on beside the content of `source`.
        write: writes the rows of a data file under a path.
    """
    import pyarrow as pa

    digest = hashlib.sha256("\0".join((source.suffix, key)).encode())
    with source.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    path = folder / f"{source.stem:.60}-{digest.hexdigest()[:32]}.arrow"
    if path.exists():
        try:
            return _read(path)
        except (pa.ArrowException, OSError) as error:
            _log.warning("%s is damaged and is made again: %s", path, error)
    with replacing(path) as fresh:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write(source, fresh)
            with fresh.open("r+b") as file:
                file.write(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"the token ids of {source} cannot be kept in {folder}: {error.strerror or error}; "
                "set data.cache_dir to a folder with free space, or to null to keep them in memory",
                path=str(folder),
            ) from error
    return _read(path)


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a digest of a tokenizer and its template; None for one that cannot be compared.

    Only a tokenizer of the library `tokenizers` has its whole behaviour in one text.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    parts = (inner.to_str(), str(tokenizer.chat_template), special, type(tokenizer).__qualname__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(repr=False, eq=False, kw_only=True)
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
        keeps_columns: give items all columns of their rows but the images, for reward functions.

    Raises:
        DataError: a file or a row cannot be used; the message names it.
        ModelError: the tokenizer has no chat template.
        ConfigError: the chat template does not read one of its arguments.
    """

    NOUN = "prompts"
    KEEPS_ROWS = True

    max_prompt_length: int | None = None
    filter_overlong_prompts: bool = True
    image_key: str | None = "images"
    images: ImageRules | None = None

    def __post_init__(self) -> None:
        self.same_width = self.keeps_columns = False
        self.pad_token_id: int = self.tokenizer.pad_token_id
        self.load(self.files, self.max_prompt_length, "max_prompt_length")
        self.longest = max(int(ids.value_lengths().to_numpy().max()) for ids, *_ in self.columns())

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
        limit = self.max_prompt_length
        most = most_characters(limit)
        leaves_out = self.filter_overlong_prompts and limit is not None
        short: list[int] = []
        used: list[TemplateChat] = []
        for i, row in enumerate(rows):
            chat = chat_of(row, self.prompt_key)
            if characters(chat) > most:
                if leaves_out:
                    continue
                raise row.error(
                    f"the prompt has {characters(chat)} characters, more than {most}; shorten it, "
                    "or set max_prompt_length and filter_overlong_prompts=true"
                )
            chat = self.own_texts(row, chat)
            short.append(i)
            if self.images is None:
                check_no_images(row, self.image_key)
            used.append(chat if self.images is None else self.images.template_chat(row, chat))
        first, arguments = rows[0].number if rows else 0, self.chat_template_kwargs
        encoded = encode_chats(self.tokenizer, used, first=first, arguments=arguments)
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
        if self.keeps_columns:
            images = () if self.images is None else (self.image_key,)
            item[fields.COLUMNS] = {k: v for k, v in source.values.items() if k not in images}
        if self.images is not None:
            item[fields.MULTI_MODAL_INPUTS] = PromptImages(source, row.ids, self.images)
        return item
