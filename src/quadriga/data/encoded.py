"""Encoded rows of files: token ids in Arrow's format, in memory or mapped from a cache file.

A row has token ids, borders (positions in them, whose meaning the dataset knows) and one number:

    a conversation   ids p p a a u a      borders 2 4 5: not trained, trained, not, trained
    a pair           ids p c c p r        borders 1 3 4: prompt, chosen, prompt, rejected; margin

The token ids of a large file are kept in a cache file (`token_cache`) and are mapped into memory,
so a row costs memory only while it is used. Those of a small file take four bytes for each token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quadriga.config.paths import expand_home
from quadriga.data.chat import TemplateArguments
from quadriga.data.rows import Row, check_files, count_rows, read_pieces
from quadriga.data.token_cache import cache_file, is_large, tokenizer_digest
from quadriga.observability.console import progress

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

_BLOCK = 256  # rows that are encoded at once, which bounds the memory for their texts
_FORMAT = "conversations 1"  # of cache files; another text makes new ones


@dataclass(frozen=True)
class EncodedRow:
    """One row: token ids, positions in them in ascending order, and a number."""

    ids: Sequence[int]
    borders: Sequence[int]
    value: float = 0.0


class RowRules(Protocol):
    """How rows become token ids: a dataclass whose fields are all that the result depends on beside
    the rows. They are JSON values, except the tokenizer and the arguments of its template."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def arguments(self) -> TemplateArguments: ...

    def encode(self, rows: Sequence[Row]) -> Sequence[EncodedRow | None]:
        """Return each row encoded; None for one that is left out."""


class EncodedRows:
    """The rows of files that are used, by number, in the order of the files.

    Attributes:
        left_out: number of rows that are left out.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], left_out: int) -> None:
        self.left_out = left_out
        self._batches = batches
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> EncodedRow:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        ids, borders, value = (
            column[number - int(self._starts[part])].as_py()
            for column in self._batches[part].columns
        )
        return EncodedRow(ids, borders, value)

    def columns(self) -> Iterator[tuple[pa.ListArray, pa.ListArray]]:
        """Yield the token ids and the borders of some thousand rows at a time."""
        for batch in self._batches:
            yield batch.column(0), batch.column(1)


def encode_files(
    files: Sequence[str | Path], rules: RowRules, cache_dir: str | Path | None
) -> EncodedRows:
    """Encode the rows of files, or map what an earlier call has kept of large ones.

    Args:
        cache_dir: folder of the cache files; None: all encoded rows are in memory.

    Raises:
        DataError: a file cannot be used, or a cache file cannot be written; or as `rules.encode`
            raises.
    """
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    rows = 0
    for path in check_files(files):
        large = cache_dir is not None and is_large(path)
        digest = tokenizer_digest(rules.tokenizer) if large else None
        if digest is None or cache_dir is None:
            memory = pa.BufferOutputStream()
            _write(path, memory, rules, nullcontext(lambda _: None))
            source = pa.BufferReader(memory.getvalue())
        else:
            key = f"{_FORMAT} {digest} {json.dumps(_settings(rules), sort_keys=True)}"
            kept = cache_file(
                path,
                Path(expand_home(cache_dir)),
                settings=key,
                write=partial(_write_file, path, rules),
            )
            source = pa.memory_map(str(kept))
        reader = pa.ipc.open_file(source)
        batches += [reader.get_batch(i) for i in range(reader.num_record_batches)]
        rows += count_rows(path)
    used = [batch for batch in batches if batch.num_rows]
    return EncodedRows(used, rows - sum(batch.num_rows for batch in used))


def _settings(rules: RowRules) -> dict[str, object]:
    """Return all that encoded rows depend on beside the rows and the tokenizer."""
    own = {key: value for key, value in vars(rules).items() if key != "tokenizer"}
    return {**own, "arguments": dict(rules.arguments)}


def _write_file(source: Path, rules: RowRules, path: Path) -> None:
    import pyarrow as pa

    shown = progress(f"tokenising {source.name}", count_rows(source))
    _write(source, pa.OSFile(str(path), "wb"), rules, shown)


def _write(
    source: Path,
    sink: pa.NativeFile,
    rules: RowRules,
    shown: AbstractContextManager[Callable[[int], None]],
) -> None:
    """Write the encoded rows of a file; `shown` is told how many rows are done."""
    import pyarrow as pa

    lists = pa.list_(pa.int32())
    schema = pa.schema([("ids", lists), ("borders", lists), ("value", pa.float64())])
    with sink, pa.ipc.new_file(sink, schema) as writer, shown as show:
        for piece in read_pieces(source):
            found: list[EncodedRow] = []
            for start in range(0, len(piece.rows), _BLOCK):
                block = rules.encode(piece.rows[start : start + _BLOCK])
                found += [row for row in block if row is not None]
            writer.write_batch(
                pa.record_batch(
                    [
                        pa.array([row.ids for row in found], lists),
                        pa.array([row.borders for row in found], lists),
                        pa.array([row.value for row in found], pa.float64()),
                    ],
                    schema=schema,
                )
            )
            show(len(piece.rows))
