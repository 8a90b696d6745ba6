"""Files of one JSON object a line that are never left with half a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quadriga.errors import DataError, InputError


class JsonlFile:
    """Appends objects, one write a line, straight to the file: a reader sees whole lines only.

    A line that did not fit (a full disk) is taken back. What a killed run left of a last line is
    dropped when the file is opened again. Raises `InputError` naming the path when the file
    cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._drop_torn_line()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object. NaN and infinities become the texts "NaN", "Infinity", "-Infinity"."""
        data = (json.dumps(_json_value(row), ensure_ascii=False) + "\n").encode()
        try:
            before = os.fstat(self._fd).st_size
            if os.write(self._fd, data) < len(data):
                os.ftruncate(self._fd, before)
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Close the file; again is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0 and os.pread(self._fd, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(self._fd, end)


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, in order; an unfinished last line is passed over.

    Raises `DataError` for a file that is missing and for a finished line that is no JSON object.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse_line(path, number, line)


def keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file with the rows that `keep` wants, in one step: old or new, never in between."""
    rows = [row for row in read_jsonl(path) if keep(row)]
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    file = JsonlFile(fresh)
    for row in rows:
        file.write(row)
    file.close()
    fresh.replace(path)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not JSON: {error}", path=str(path)) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number} is not a JSON object", path=str(path))
    return row


def cannot_write(path: Path, error: OSError) -> InputError:
    """The error for a file that cannot be written: names the path, the reason, what to do."""
    reason = error.strerror or str(error)
    return InputError(
        f"cannot write {path}: {reason}; free space there or choose another folder", path=str(path)
    )


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(v) for v in value]
    if isinstance(value, str | int | bool | None):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _json_value(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES[str(value)]
    return str(value)


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
