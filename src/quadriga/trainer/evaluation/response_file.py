"""A file of responses that a second run of the same command continues.

    answers.jsonl               one JSON object for each prompt, in the order of the data
    answers.jsonl.inputs.json   what the responses depend on (`inputs.inputs_of`)

A `.parquet` file cannot be extended, so its rows are first in `answers.parquet.rows.jsonl`.

Rows are written batch by batch. A run that was killed within a batch leaves some rows of it; the
next run removes them and generates the whole batch again, with the batch that an undisturbed run
has. Both files are then equal byte for byte.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import yaml

from quadriga.checkpoint.files import digest_file, digest_json, read_json, write_json
from quadriga.config.commands import GenerateConfig, GenerationConfig
from quadriga.config.loading import setting_leaves, to_yaml
from quadriga.errors import ConfigError, InputError
from quadriga.files import cannot_write, replacing
from quadriga.models.folder import local_folder
from quadriga.observability.jsonl import JsonlFile, JsonObject, read_jsonl
from quadriga.observability.run_folder import RunLock
from quadriga.trainer.checkpoints import (
    changed_words,
    contents_digest,
)


class ResponseFile:
    """The rows of one command. Only `open` creates one.

    Attributes:
        path: the output, `.jsonl` or `.parquet`.
        done: rows that are complete, of the `total` that the command has.
    """

    def __init__(self, path: Path, inputs: Inputs, total: int) -> None:
        self.path, self.total, self.done = path, total, 0
        self._inputs = inputs
        is_lines = path.suffix == ".jsonl"
        self._rows = path if is_lines else path.with_name(path.name + ".rows.jsonl")
        self._described = path.with_name(path.name + ".inputs.json")
        self._file: JsonlFile | None = None

    @classmethod
    @contextmanager
    def open(
        cls,
        path: str | Path,
        inputs: Inputs,
        *,
        total: int,
        batch_size: int,
        overwrite: bool,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[ResponseFile]:
        """Open the output, and begin after the last complete batch that is in it.

        Args:
            total: rows that the command writes.
            batch_size: rows that are written together.
            overwrite: replace an output of other settings or data.
            check: called if rows are missing, before anything is changed; what it raises leaves the
                output as it is.

        Raises:
            ConfigError: the output is of another command, or another process writes it now.
            InputError: it cannot be written.
        """
        file = cls(path := Path(path), inputs, total)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = RunLock.acquire(path.with_name(f".{path.name}.lock"), path, "output")
        except OSError as error:
            raise cannot_write(path, error) from error
        try:
            file._begin(batch_size, overwrite=overwrite, check=check)
            yield file
        finally:
            if file._file is not None:
                file._file.close()
            lock.release()

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append the rows of one batch.

        Raises:
            InputError: the disk is full, for example. The rows before it are kept.
        """
        if self._file is None:
            # Not masked: a response is data, also if it holds a word that looks like a secret.
            self._file = JsonlFile(self._rows, masked=False)
        for row in rows:
            self._file.write(row)
            self.done += 1

    def finish(self) -> None:
        """Make the `.parquet` file of the rows, if that is the output and it is not there."""
        if self.path == self._rows or not self._rows.exists():
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pa.Table.from_pylist(list(read_jsonl(self._rows)))
            with replacing(self.path) as fresh:
                pq.write_table(table, fresh)
            self._rows.unlink()
        except pa.ArrowException as error:  # a column with values of different types
            raise InputError(
                f"the rows of {self._rows} cannot be written as parquet: {error}; choose an "
                "output that ends in .jsonl",
                path=str(self._rows),
            ) from error

    def _begin(self, batch_size: int, *, overwrite: bool, check: Callable[[], None]) -> None:
        existing = sorted({file for file in (self.path, self._rows) if file.exists()})
        own = bool(existing) and self._matches(overwrite=overwrite)
        if own and not self._rows.exists():
            self.done = self.total  # the `.parquet` file is written when all rows are there
            return
        # The position behind each row that is there.
        ends = _ends_of_lines(self._rows) if own else []
        if not own or len(ends) != self.total:
            check()
            ends = ends[: len(ends) - len(ends) % batch_size]
        try:
            if own:
                os.truncate(self._rows, ends[-1] if ends else 0)
            for file in () if own else existing:
                file.unlink()
        except OSError as error:  # a folder, for example
            raise cannot_write(self.path, error) from error
        if not own:
            write_json(self._described, self._inputs)
        self.done = len(ends)

    def _matches(self, *, overwrite: bool) -> bool:
        """Return whether the output is of this command; raise if it is not and must stay."""
        if not self._described.is_file():
            problem = f"{self.path} exists, and no {self._described.name} says what has made it"
        else:
            differences = changes(read_json(self._described), self._inputs)
            if not differences:
                return True
            problem = f"{self.path} was made with other inputs: {differences}"
        if not overwrite:
            raise ConfigError(
                f"{problem}; choose another output, or set overwrite=true to replace it",
                key="output",
            )
        return False


def rows_of(output: str | Path) -> Iterator[JsonObject]:
    """Yield the rows of an output."""
    path = Path(output)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    from quadriga.data.rows import read_pieces

    return (row.values for piece in read_pieces(path) for row in piece.rows)


def _ends_of_lines(path: Path) -> list[int]:
    """Return the offset after each complete line of a file."""
    with path.open("rb") as file:
        return list(accumulate(len(line) for line in file if line.endswith(b"\n")))


Inputs = dict[str, object]
"""Settings by dotted key, and the contents of files as digests."""

_WITHOUT_EFFECT = (
    "trainer.", "cache_dir", "overwrite", "output", "data_files", "rollout.micro_batch_size",
    "rollout.replicas.", "model.path", "model.tokenizer_path", "model.use_shm",
)  # fmt: skip
"""Settings, or beginnings of their keys, that change no response."""
_OF_SCORES = ("reward.", "pass_at", "correct_at", "resamples", "confidence", "response_")
_LISTED = 8  # changes that a message names
_SAMPLES, _SAMPLE = 64, 64 << 10  # parts of a larger weight file that are digested, and their bytes


def inputs_of(config: GenerationConfig) -> Inputs:
    """Return what the responses of a command depend on.

    The number of ranks, their backend, replicas and the size of micro-batches are left out. In
    float32 a response of hf and vllm does not depend on them. One of sglang can
    (`Rollout.not_reproduced`), and a file that is continued with other ranks then holds responses
    of both.
    """
    settings = setting_leaves(yaml.safe_load(to_yaml(config)))
    left_out = (*_WITHOUT_EFFECT, *_OF_SCORES)
    kept: Inputs = {key: value for key, value in settings if not key.startswith(left_out)}
    model = config.model
    kept["content of data_files"] = contents_digest(config.data_files)
    if isinstance(config, GenerateConfig) and config.images:
        kept["content of images"] = contents_digest(config.images)
    for name, path in (("path", model.path), ("tokenizer_path", model.tokenizer_path)):
        if path is not None:
            kept[f"content of model.{name}"] = model_digest(path)
    return kept


def changes(saved: Mapping[str, object], own: Mapping[str, object]) -> str:
    """Return what differs between two results of `inputs_of`, "n: 2 → 4; seed: 0 → 1", or ""."""
    found = [
        changed_words(key, saved.get(key), own.get(key))
        for key in {**own, **saved}
        if saved.get(key) != own.get(key)
    ]
    more = [f"and {len(found) - _LISTED} others"] if len(found) > _LISTED else []
    return "; ".join([*found[:_LISTED], *more])


def model_digest(path: str) -> str:
    """Return a digest of all files of a model folder; its name and the times of files do not count.

    A file of more than 4 MiB is digested by its size and 64 parts of 64 KiB, evenly spaced.
    Training changes nearly every weight, so such a change is found.
    """
    files = sorted(file for file in local_folder(path).iterdir() if file.is_file())
    return digest_json({f.name: _sampled(f) for f in files if f.suffix not in (".md", ".lock")})


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    if size <= _SAMPLES * _SAMPLE:
        return digest_file(file)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for number in range(_SAMPLES):
            content.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE))
    return digest.hexdigest()
