"""Read parquet and JSON-lines files into rows that know their file and row number.

`read_rows` returns all rows. `read_pieces` yields some rows at a time, with their values as Arrow
columns, from which `rows_of_columns` makes the same rows again.

A file of kilobytes can stand for gigabytes: parquet stores a value that is repeated ten million
times once. Files are therefore read piece by piece, and within the limits of `MAX_…`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quadriga.config.stores import local_file
from quadriga.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".jsonl", ".json")

MAX_ROWS = 5_000_000  # rows of one file
MAX_ROW = 16 << 20  # bytes of one row
MAX_FILE = 2 << 30  # bytes of all rows of one parquet file, uncompressed
MAX_DEPTH = 100  # nested lists and objects of a row
_PIECE = 512 << 20  # bytes of the rows of a parquet file that are read at a time
_FEWEST_ROWS, _MOST_ROWS = 8, 4096  # rows that are read at a time
_LINES, _LINES_SIZE = 1024, 64 << 20  # lines of a JSON-lines file, and their bytes, read at a time
_LINE = "quadriga: line of a JSON-lines file"  # name of the column that holds such lines


@dataclass(frozen=True)
class Row:
    """One row: its values, its file, and its number in the file, from 0."""

    values: dict[str, object]
    path: str
    number: int

    def error(self, problem: str) -> DataError:
        """Return a `DataError` whose message begins with the file and the row."""
        return DataError(
            f"{self.path}, row {self.number}: {problem}", path=self.path, row=self.number
        )

    def at(self, dotted: str) -> object:
        """Return the value at a dotted path such as `extra_info.answer`.

        Raises `DataError`, naming the keys that exist, if a part is missing or null.
        """
        value: object = self.values
        for depth, part in enumerate(parts := dotted.split(".")):
            if not isinstance(value, dict) or value.get(part) is None:
                inside = f" in {'.'.join(parts[:depth])!r}" if depth else ""
                found = f"keys {sorted(value)}" if isinstance(value, dict) else type(value).__name__
                null = "value of " if isinstance(value, dict) and part in value else ""
                raise self.error(f"no {null}{part!r}{inside}; found {found:.500}")
            value = value[part]
        return value


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a file, and the same values as Arrow columns; None: of no file."""

    rows: list[Row]
    columns: pa.RecordBatch | None


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """Return the files as paths.

    Raises `DataError` if there are none, if one is missing, or if one has an unknown suffix.
    """
    if isinstance(files, str | Path):
        files = [files]
    if not files:
        raise DataError("no data files were given; expected at least one")
    paths = [local_file(file) for file in files]
    for path in paths:
        if not path.is_file():
            what = "is a folder, expected a file" if path.is_dir() else "does not exist"
            raise DataError(f"data file {path} {what}", path=str(path))
        if path.suffix not in SUFFIXES:
            raise DataError(
                f"data file {path} must end in one of {', '.join(SUFFIXES)}", path=str(path)
            )
    return paths


def read_rows(files: Sequence[str | Path]) -> list[Row]:
    """Return all rows of all files, in order. A `.json` file holds JSON lines, as `.jsonl` does.

    Raises `DataError` that names the file, and the row if one row is invalid or too large.
    """
    return [row for path in check_files(files) for piece in read_pieces(path) for row in piece.rows]


def read_pieces(path: Path) -> Iterator[Piece]:
    """Yield the rows of one file, up to some thousand at a time.

    Raises `DataError` as `read_rows` does.
    """
    empty = True
    for piece in _parquet(path) if path.suffix == ".parquet" else _json_lines(path):
        empty = False
        yield piece
    if empty:
        raise DataError(f"data file {path} has no rows", path=str(path))


def rows_of_columns(columns: pa.RecordBatch, path: Path, numbers: Iterable[int]) -> list[Row]:
    """Return the rows of `Piece.columns`, which have these numbers in the file."""
    if columns.schema.names == [_LINE]:
        lines = zip(columns.column(0).to_pylist(), numbers, strict=False)
        return [_json_row(line, str(path), number) for line, number in lines]
    values = zip(columns.to_pylist(), numbers, strict=False)
    return [Row(row, str(path), number) for row, number in values]


def count_rows(path: Path) -> int:
    """Return the number of rows of a file without reading their values.

    Raises `DataError` if the file cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            with _open_parquet(path) as file:
                return int(file.metadata.num_rows)
        with path.open("rb") as lines:
            return sum(1 for line in _bounded_lines(path, lines) if line.strip())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from None


def _too_large(path: Path, what: str, limit: str) -> DataError:
    return DataError(
        f"data file {path} has {what}; the limit is {limit}. Split it into several files",
        path=str(path),
    )


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"data file {path} cannot be read as parquet: {reason:.500}", path=str(path))


def _parquet(path: Path) -> Iterator[Piece]:
    import pyarrow as pa

    number = total = 0
    with _open_parquet(path) as file:
        _check_footer(path, file)
        try:
            for piece in _pieces(file):
                size = sum(_size(column) for column in piece.columns)
                total += size
                if size > MAX_ROW * piece.num_rows or total > MAX_FILE:
                    what = f"{size} bytes in {piece.num_rows} rows"
                    limit = f"{MAX_ROW} bytes for one row and {MAX_FILE} for all"
                    raise _too_large(path, what, limit)
                if piece.num_rows:
                    yield Piece(rows_of_columns(piece, path, count(number)), piece)
                number += piece.num_rows
        except DataError:
            raise
        # ValueError: text that is no UTF-8, or a date that Python cannot hold.
        except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            raise _unreadable(path, error) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, memory_map=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _check_footer(path: Path, file: pq.ParquetFile) -> None:
    """Raise `DataError` if the footer of a file announces more than the limits allow."""
    footer = file.metadata
    if footer.num_rows > MAX_ROWS:
        raise _too_large(path, f"{footer.num_rows} rows", f"{MAX_ROWS} rows")
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    if size > MAX_FILE:
        raise _too_large(path, f"{size} bytes of values", f"{MAX_FILE} bytes")
    # The values of the lists of all rows, of which each takes at least a byte once it is read.
    values = sum(
        max(group.column(column).num_values for column in range(group.num_columns))
        for group in groups
        if group.num_columns
    )
    if values > MAX_FILE // 8:
        raise _too_large(path, f"{values} values in a column", f"{MAX_FILE // 8}")


def _pieces(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, few at a time where they may be large.

    How large rows are is known only after they are read. A row holds at most all values of its row
    group, each of which is stored at least once; with 64 MB of stored values, 8 rows at a time take
    at most 512 MB:

        stored values of the group    64 MB    8 MB    1 MB
        rows at a time                8        64      512
    """
    for number in range(file.metadata.num_row_groups):
        stored = max(1, file.metadata.row_group(number).total_byte_size)
        rows = min(max(_PIECE // stored, _FEWEST_ROWS), _MOST_ROWS)
        yield from file.iter_batches(batch_size=rows, row_groups=[number])


def _size(array: pa.Array) -> int:
    """Return the bytes of an array whose repeated values are each stored again."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_struct(kind):
        return sum(_size(array.field(number)) for number in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _size(array.flatten()) + 8 * len(array)
    if not pa.types.is_dictionary(kind):
        return int(array.nbytes)
    if kind.value_type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        return int(array.dictionary_decode().nbytes)
    # Indices [0 0 0] into ["abcd"]: 3 × 4 bytes.
    lengths = pc.binary_length(array.dictionary)
    return int(pc.sum(lengths.take(array.indices)).as_py() or 0)


def _json_lines(path: Path) -> Iterator[Piece]:
    import pyarrow as pa

    number = 0
    try:
        with path.open("rb") as file:
            # Blank lines are not counted: row 1 is the second row with values.
            lines = (line for line in _bounded_lines(path, file) if line.strip())
            while some := _some(lines):
                if number + len(some) > MAX_ROWS:
                    raise _too_large(path, "more rows", f"{MAX_ROWS} rows")
                columns = pa.record_batch([pa.array(some, pa.large_binary())], names=[_LINE])
                yield Piece(rows_of_columns(columns, path, count(number)), columns)
                number += len(some)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from None


def _some(lines: Iterator[bytes]) -> list[bytes]:
    """Return the next lines, up to `_LINES` or `_LINES_SIZE`; [] at the end."""
    some: list[bytes] = []
    size = 0
    for line in lines:
        some.append(line)
        size += len(line)
        if len(some) == _LINES or size >= _LINES_SIZE:
            break
    return some


def _json_row(line: bytes, path: str, number: int) -> Row:
    row = Row({}, path, number)
    try:
        text = line.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        values = json.loads(text)
        # Half of a surrogate pair ("\\ud83d") is JSON, but no tokenizer accepts it.
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise row.error(f"not text in UTF-8: {error}"[:300]) from error
    except RecursionError as error:
        raise row.error(f"nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise row.error(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise row.error(f"expected a JSON object, got {type(values).__name__}")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(values) > MAX_DEPTH:
        raise row.error(f"nested more than {MAX_DEPTH} deep")
    return Row(values, path, number)


def _depth(value: object) -> int:
    """Return how deep lists and objects are nested: 1 for `{}`, 2 for `{"a": []}`."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
    return depth


def _bounded_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file. Raises `DataError` for one that is longer than `MAX_ROW`."""
    number = 0
    while line := file.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise DataError(
                f"{path}, line {number + 1}: longer than the limit of {MAX_ROW} bytes",
                path=str(path),
            )
        number += 1
        yield line
