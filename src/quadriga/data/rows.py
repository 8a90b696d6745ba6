"""Read parquet and JSON-lines files into rows that know their file and row number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quadriga.errors import DataError

SUFFIXES = (".parquet", ".jsonl", ".json")


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
                raise self.error(f"no {part!r}{inside}; found {found}")
            value = value[part]
        return value


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """Return the files as paths.

    Raises `DataError` if there are none, if one is missing, or if one has an unknown suffix.
    """
    if isinstance(files, str | Path):
        files = [files]
    if not files:
        raise DataError("no data files were given; expected at least one")
    paths = [Path(file).expanduser() for file in files]
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

    Raises `DataError` that names the file, and the row if one row is invalid.
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
        raise DataError(
            f"data file {path} cannot be read as parquet: {error}", path=str(path)
        ) from error
    return (Row(row, str(path), number) for number, row in enumerate(values))


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        # Blank lines are not counted: row 1 is the second row with values.
        for number, line in enumerate(line for line in lines if line.strip()):
            row = Row({}, str(path), number)
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise row.error(f"not JSON: {error}") from error
            if not isinstance(values, dict):
                raise row.error(f"expected a JSON object, got {type(values).__name__}")
            yield Row(values, str(path), number)
