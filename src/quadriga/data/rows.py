"""Reading data files: parquet and JSON lines, each row with the place it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True)
class Row:
    """One row: its values, the file, and its number there, from 0."""

    values: dict[str, Any]
    path: str
    number: int

    def error(self, problem: str) -> DataError:
        """A `DataError` that says where the row is."""
        return DataError(
            f"{self.path}, row {self.number}: {problem}", path=self.path, row=self.number
        )

    def at(self, dotted: str) -> Any:
        """The value at a dotted path (`extra_info.answer`); raises `DataError` when absent."""
        value: Any = self.values
        for depth, part in enumerate(parts := dotted.split(".")):
            if not isinstance(value, dict) or value.get(part) is None:
                inside = f" in {'.'.join(parts[:depth])!r}" if depth else ""
                there = sorted(value) if isinstance(value, dict) else type(value).__name__
                raise self.error(f"no {part!r}{inside}; there is {there}")
            value = value[part]
        return value


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """The files as paths. Raises `DataError` when there are none, or one is missing or unknown."""
    if isinstance(files, str | Path):
        files = [files]
    if not files:
        raise DataError("no data files were given")
    paths = [Path(file).expanduser() for file in files]
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"data file {path} {what}", path=str(path))
        if path.suffix not in SUFFIXES:
            raise DataError(f"data file {path} is neither of {', '.join(SUFFIXES)}", path=str(path))
    return paths


def read_rows(files: Sequence[str | Path]) -> list[Row]:
    """All rows of all files, in order. A `.json` file holds JSON lines, as `.jsonl` does.

    Raises `DataError` naming the file, and the row where one is at fault.
    """
    rows: list[Row] = []
    for path in check_files(files):
        before = len(rows)
        rows.extend(_parquet(path) if path.suffix == ".parquet" else _json_lines(path))
        if len(rows) == before:
            raise DataError(f"data file {path} has no rows", path=str(path))
    return rows


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        values = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"data file {path} is not parquet: {error}", path=str(path)) from error
    return (Row(row, str(path), number) for number, row in enumerate(values))


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(line for line in lines if line.strip()):
            row = Row({}, str(path), number)
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise row.error(f"not JSON: {error}") from error
            if not isinstance(values, dict):
                raise row.error(f"expected a JSON object, got {type(values).__name__}")
            yield Row(values, str(path), number)
