"""Token ids of the rows of a large file, made once and then read from disk.

A cache file is an Arrow file: the columns of the data file, unchanged, and one column of token ids.
It is mapped into memory, so a row costs memory only while it is used, and processes on one node
share it. Nothing in it is executed or unpickled.

The name of a cache file contains a digest of everything that the token ids depend on: the content
of the data file, the tokenizer with its template, and the settings. A change of one of these makes
a new cache file. A file appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import psutil

from quadriga.data.rows import Row, count_rows, read_pieces, rows_of_columns
from quadriga.errors import DataError
from quadriga.observability.console import progress

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

LARGE_FILE = 64 << 20  # bytes of a file whose token ids are kept in a cache file
LARGE_COUNT = 50_000  # or rows of it
_FORMAT = "2"  # of cache files; another number makes new ones
_IDS = "quadriga: token ids"  # name of the column
_OLD_S = 7 * 86400  # age of an unfinished file that no process writes any more
_TOO_LONG = -1  # length of a row that was not tokenised

Encode = Callable[[Sequence[Row]], Sequence[Sequence[int] | None]]
"""Rows → the token ids of each; None for a row that is too long to be tokenised."""


class TokenCache:
    """A cache file that is open. Rows are those of the data file, in order.

    Attributes:
        lengths: [rows] int32, number of token ids of each row; -1 for a row without token ids.
    """

    def __init__(self, path: Path, source: Path) -> None:
        import pyarrow as pa

        self._source = source
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        lengths = [_lengths(self._ids(part)) for part in range(self._reader.num_record_batches)]
        self._starts = np.cumsum([0, *map(len, lengths)])
        self.lengths = np.concatenate([np.empty(0, np.int32), *lengths])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[Row, list[int]]:
        """Return row `number` of the data file, and its token ids ([] if it has none)."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        start = int(self._starts[part])
        return next(self._rows(part, number - start, number - start + 1))

    def read(self, numbers: npt.NDArray[np.int64]) -> Iterator[tuple[Row, list[int]]]:
        """Yield many rows, given in rising order. It is faster than one row at a time."""
        for part, within in self._by_part(numbers):
            rows = list(self._rows(part, 0, int(within[-1]) + 1))
            yield from (rows[number] for number in within.tolist())

    def largest_id(self, numbers: npt.NDArray[np.int64]) -> int:
        """Return the largest token id of some rows, given in rising order; -1 if they have none."""
        import pyarrow.compute as pc

        largest = -1
        for part, within in self._by_part(numbers):
            found = pc.max(self._ids(part).take(within).flatten()).as_py()
            largest = max(largest, -1 if found is None else found)
        return largest

    def _by_part(
        self, numbers: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield each part of the file that holds some rows, and their numbers within it."""
        for part in range(self._reader.num_record_batches):
            first, end = self._starts[part : part + 2]
            own = numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, end)]
            if len(own):
                yield part, own - first

    def _ids(self, part: int) -> pa.ListArray:
        return self._reader.get_batch(part).column(_IDS)

    def _rows(self, part: int, start: int, end: int) -> Iterator[tuple[Row, list[int]]]:
        batch = self._reader.get_batch(part).slice(start, end - start)
        columns = batch.select([name for name in batch.schema.names if name != _IDS])
        rows = rows_of_columns(columns, self._source, int(self._starts[part]) + start)
        for row, ids in zip(rows, batch.column(_IDS).to_pylist(), strict=True):
            yield row, ids or []


def is_large(path: Path) -> bool:
    """Return whether the token ids of a file are kept in a cache file."""
    if path.stat().st_size >= LARGE_FILE:
        return True
    return path.suffix == ".parquet" and count_rows(path) >= LARGE_COUNT


def open_cache(source: Path, folder: Path, *, settings: str, encode: Encode) -> TokenCache:
    """Open the cache file of a data file. It is made if there is none, which shows progress.

    Args:
        folder: the folder of cache files.
        settings: all that the token ids depend on beside the content of `source`.

    Raises:
        DataError: the data file cannot be used, or the cache file cannot be written.
    """
    import pyarrow as pa

    def opens(path: Path) -> bool:
        try:
            TokenCache(path, source)
        except (pa.ArrowException, OSError):
            return False
        return True

    path = cache_file(
        source,
        folder,
        settings=f"{_FORMAT} {settings}",
        write=lambda part: _write(source, part, encode),
        opens=opens,
    )
    return TokenCache(path, source)


def is_arrow_file(path: Path) -> bool:
    """Return whether a file is an Arrow file whose columns have the lengths that it says."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        for part in range(reader.num_record_batches):
            reader.get_batch(part).validate(full=True)
    except (pa.ArrowException, OSError):
        return False
    return True


def cache_file(
    source: Path,
    folder: Path,
    *,
    settings: str,
    write: Callable[[Path], None],
    opens: Callable[[Path], bool] = is_arrow_file,
) -> Path:
    """Return the cache file of a data file. It is written if there is none that can be opened.

    Args:
        folder: the folder of cache files.
        settings: all that the content depends on beside the content of `source`.
        write: writes the file under a path.
        opens: whether a file can be used.

    Raises:
        DataError: the data file cannot be used, or the cache file cannot be written.
    """
    path = folder / f"{source.stem:.60}-{_digest(source, settings)}.arrow"
    try:
        if path.exists() and opens(path):  # a damaged one is made again
            return path
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_unfinished(folder)
        # The folder may be shared by nodes and containers, whose processes have equal numbers.
        owner = f"{secrets.token_hex(4)}.{socket.gethostname()}.{os.getpid()}"
        part = folder / f"{path.name}.{owner}.part"
        try:
            write(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the token ids of {source} cannot be kept in {folder}: {error.strerror or error}; "
            "set data.cache_dir to a folder with free space, or to null to keep them in memory",
            path=str(folder),
        ) from error
    return path


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a digest of a tokenizer and its template; None for one that cannot be compared.

    Only a tokenizer of the library `tokenizers` has its whole behaviour in one text.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return None
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    parts = (inner.to_str(), str(tokenizer.chat_template), special, type(tokenizer).__qualname__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest(source: Path, settings: str) -> str:
    digest = hashlib.sha256("\0".join((source.suffix, settings)).encode())
    with source.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    digest.update(content.digest())
    return digest.hexdigest()[:32]


def _write(source: Path, path: Path, encode: Encode) -> None:
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        writer: pa.RecordBatchFileWriter | None = None
        show = stack.enter_context(progress(f"tokenising {source.name}", count_rows(source)))
        for piece in read_pieces(source):
            ids = pa.array(encode(piece.rows), pa.list_(pa.int32()))
            columns = [_plain(column) for column in piece.columns.columns]
            names = [*piece.columns.schema.names, _IDS]
            batch = pa.record_batch([*columns, ids], names=names)
            if writer is None:
                file = stack.enter_context(pa.OSFile(str(path), "wb"))
                writer = stack.enter_context(pa.ipc.new_file(file, batch.schema))
            writer.write_batch(batch)
            show(len(piece.rows))


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionaries: an Arrow file holds one dictionary for all batches."""
    return column.cast(_plain_type(column.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_plain_type(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


def _lengths(ids: pa.ListArray) -> npt.NDArray[np.int32]:
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(ids), _TOO_LONG)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), dtype=np.int32)


def _remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of ended processes of this host, and those of last week."""
    own = f".{socket.gethostname()}."
    for part in folder.glob("*.part"):
        process = part.name.split(".")[-2]
        ended = own in part.name and process.isdecimal() and not psutil.pid_exists(int(process))
        with contextlib.suppress(FileNotFoundError):
            if ended or time.time() - part.stat().st_mtime > _OLD_S:
                part.unlink()
