"""Read and write JSON-lines files: one JSON object per line, and never half a line."""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from quadriga.config.convert import checked, field_types
from quadriga.config.paths import local_path
from quadriga.config.secrets import masker
from quadriga.errors import ConfigError, DataError
from quadriga.files import replacing, writing

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
# An object as read from a file. Its values are untyped: the reader of a row knows what it expects.
JsonObject = dict[str, Any]
_log = logging.getLogger("quadriga")


class JsonlFile:
    """A file to which JSON objects are appended.

    Each object is one unbuffered `write` call, so another process can read whole lines while the
    run goes on. Two things can leave half a line, and both are undone:

        the disk is full    `write` accepted 4 of 12 bytes → the file is truncated to its old size
        the run was killed  {"step": 1}\\n{"st → the next run opens the file and removes `{"st`

    A file that is removed while it is written is written again, with the rows that it had.

    `masked`: mask secrets in texts.

    Raises `InputError` with the path if the file cannot be written.
    """

    def __init__(self, path: str | Path, *, masked: bool = True) -> None:
        self.path = Path(local_path(path))
        self._masked = masked
        with writing(self.path):
            self._fd = self._open()
            self._drop_torn_line()

    def write(self, row: Mapping[str, object]) -> None:
        """Append one object.

        NaN and infinities are written as "NaN", "Infinity", "-Infinity".
        """
        value = json_value(row, masker() if self._masked else str)
        data = (json.dumps(value, ensure_ascii=False) + "\n").encode()
        with writing(self.path):
            if not self._is_at_path():
                self._write_again()
            before = os.fstat(self._fd).st_size
            if os.write(self._fd, data) < len(data):
                os.ftruncate(self._fd, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), self.path.stat())
        except FileNotFoundError:
            return False

    def _write_again(self) -> None:
        """Open the file anew. If there is none, write the earlier rows to it again."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        removed = not self.path.exists()
        with open(self._fd, "rb") as old, open(self._open(), "ab", closefd=False) as new:
            self._fd = new.fileno()
            if removed:
                old.seek(0)
                shutil.copyfileobj(old, new)
        # The last thing: a warning may be written to this file (`report.events`).
        _log.warning("%s was removed or replaced by another process", self.path)

    def _drop_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        end = size
        while end > 0 and os.pread(self._fd, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(self._fd, end)


def read_jsonl(path: str | Path) -> Iterator[JsonObject]:
    """Yield the objects of a file in order; an incomplete last line is skipped.

    Raises `DataError` if the file is missing or a complete line is not a JSON object.
    """
    path = Path(local_path(path))
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse_line(path, number, line)


def step_of(row: JsonObject) -> int:
    """Return the step of a row; 0 if it names none."""
    step = row.get("step")
    return step if isinstance(step, int) else 0


def check_row(path: Path, line: int, row: JsonObject, kinds: Mapping[str, object]) -> None:
    """Check the types of the fields of a row.

    Raises:
        DataError: names the line and the field that is missing or has another type.
    """
    for key, kind in kinds.items():
        try:
            checked(kind, row.get(key), key, f"{path}:{line}: field ")
        except ConfigError as error:
            raise DataError(f"{error}; the file is damaged", path=str(path)) from None


def keep_rows(path: Path, keep: Callable[[JsonObject], bool]) -> None:
    """Rewrite a file with the rows for which `keep` returns true.

    A process that is killed leaves either the old file or the new one.
    """
    rows = [row for row in read_jsonl(path) if keep(row)]
    with replacing(path) as fresh, closing(JsonlFile(fresh)) as file:
        for row in rows:
            file.write(row)


def _parse_line(path: Path, number: int, line: bytes) -> JsonObject:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}:{number} is not JSON: {error}", path=str(path)) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number} is not a JSON object", path=str(path))
    return row


def json_value(value: object, masked: Callable[[str], str] = str) -> JsonValue:
    """Convert containers, numpy and torch values to JSON; other objects become their text."""
    if isinstance(value, Mapping):
        return {str(k): json_value(v, masked) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(v, masked) for v in value]
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, int | None):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return json_value(value.tolist(), masked)
    if isinstance(value, float):
        # JSON has no NaN: `json.dumps` would write a bare NaN, which other readers refuse.
        return value if math.isfinite(value) else _NON_FINITE[str(value)]
    return masked(str(value))


_NON_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Turn(TypedDict):
    """A turn of an episode, and what was observed behind it. Texts have special tokens.

    Attributes:
        tokens: numbers of sampled and of observed tokens.
        reward: of the turn.
        seconds: until the turn was written, with what it waited for, and until its environment
            had answered. None: the environment was not asked, or it was before a resumption.
        source: the roles of the observed messages, with the names of tools, and whether a context
            begins with them, in which the policy does not see what was before.
    """

    sampled: str
    observed: str
    tokens: tuple[int, int]
    reward: float
    seconds: tuple[float, float] | None
    source: str


@dataclass(frozen=True)
class Sample:
    """One response. `reward` is the sum over its tokens; `split` is "train" or "val".

    Attributes:
        weight_versions: with `trainer.max_staleness`, (version, tokens that it sampled) in order.
        group: the same for all responses of one step to one prompt.
        components: numbers that the reward function returned beside the score, by name.
        advantage: the mean over the tokens.
        turns: of an episode; see `Turn`.
        tokens: of the first `trainer.tokens_per_sample` tokens: text, log-probability in the
            rollout, and that of the actor before the update minus it; None where there is none.
    """

    step: int
    split: str
    prompt: str
    response: str
    reward: float
    ground_truth: object = None
    data_source: str | None = None
    response_tokens: int | None = None
    weight_versions: list[tuple[int, int]] | None = None
    group: str | None = None
    components: dict[str, float] | None = None
    advantage: float | None = None
    turns: list[Turn] | None = None
    tokens: list[tuple[str, float | None, float | None]] | None = None


_NESTED = ("weight_versions", "turns", "tokens")
"""Their tuples are lists in a file."""


def read_samples(path: str | Path) -> list[Sample]:
    """Return the samples of a file. Raises `DataError` as `check_row`."""
    found, kinds = list[Sample](), field_types(Sample)
    checked_kinds = {key: kinds[key] for key in kinds if key not in _NESTED}
    for line, row in enumerate(read_jsonl(path), 1):
        check_row(Path(path), line, row, checked_kinds)
        found.append(Sample(**{key: row[key] for key in kinds if key in row}))
    return found


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step. Raises `DataError` as `check_row`."""
    for line, row in enumerate(read_jsonl(path), 1):
        finite = [key for key, value in row.items() if value not in _NON_FINITE.values()]
        check_row(path, line, row, dict.fromkeys(finite, float))
        yield {key: float(value) for key, value in row.items()}
