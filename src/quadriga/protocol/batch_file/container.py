"""The file around the values: a safetensors file with a digest, written as a whole or not at all.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, "structure": {"dtype": "U8", "shape": [640],
              "data_offsets": [0, 640]}, "0 x": {...}, ..., "nested": {...}, "sha256": {...}}
    data      the entries, one after the other and without gaps

The reader checks the header against the length of the file, and the digest against its bytes,
before anything else. Memory is allocated for bytes that the file has, and once for each of them: an
entry is read once, and `nested` from its beginning to its end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from quadriga.errors import DataError, InputError
from quadriga.protocol.batch_file.dtypes import ITEM_BYTES, Stored
from quadriga.protocol.batch_file.limits import (
    Json,
    MalformedError,
    brief,
    expect_int,
    expect_list,
    expect_object,
    expect_shape,
    expect_text,
)

METADATA = {"format": "quadriga batch", "version": "2"}
STRUCTURE, NESTED, DIGEST = "structure", "nested", "sha256"
_DIGEST_BYTES = hashlib.sha256().digest_size
_PICKLED = b"quadriga batch 1\n"
"""The first bytes of the former format, which was a pickle."""
_ALIGNED = 64
_CHUNK = 1 << 20
MAX_HEADER = 100_000_000
"""The limit of the safetensors library."""

Bytes = Callable[[], memoryview]
"""Returns the bytes of one value, contiguous. Called once, when they are written."""


class Entry(NamedTuple):
    """An entry of the header: its place in the data, its dtype in safetensors and its shape."""

    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The length of the entry in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Output:
    """The bytes of the values that will be written."""

    def __init__(self) -> None:
        self.fields: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}
        self.nested: list[Bytes] = []
        self.nested_bytes = 0

    def add_field(self, label: str, stored: Stored, shape: Sequence[int], data: Bytes) -> str:
        """Add an entry of its own for a value of a field. Return the name of the entry."""
        # The number makes the name unique. Readers of safetensors expect valid Unicode.
        name = f"{len(self.fields)} {label}".encode(errors="backslashreplace").decode()
        self.fields[name] = (stored.dtype, (*shape, *stored.tail), data)
        return name

    def add_nested(self, nbytes: int, data: Bytes) -> None:
        """Add bytes to the entry `nested`. The reader must ask for them in the same order."""
        self.nested.append(data)
        self.nested_bytes += nbytes


def write_file(path: Path, structure: Json, output: Output) -> None:
    """Write a batch file. It appears complete or not at all; an older file is replaced.

    Raises `InputError` with the path and the reason if it cannot be written.
    """
    text = json.dumps(structure, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    encoded = text.encode("utf-8", "surrogatepass")
    encoded += b" " * (-len(encoded) % _ALIGNED)
    # Wide items first, so that every entry begins at a multiple of its item size.
    names = sorted(output.fields, key=lambda name: -ITEM_BYTES[output.fields[name][0]])
    entries: list[tuple[str, str, tuple[int, ...]]] = [
        (STRUCTURE, "U8", (len(encoded),)),
        *((name, *output.fields[name][:2]) for name in names),
        (NESTED, "U8", (output.nested_bytes,)),
        (DIGEST, "U8", (_DIGEST_BYTES,)),
    ]
    pieces: list[Bytes] = [lambda: memoryview(encoded)]
    pieces += [output.fields[name][2] for name in names]
    pieces += output.nested
    header = _header(entries)
    with _replacing(path) as file:
        digest = hashlib.sha256()
        for piece in (lambda: memoryview(header), *pieces):
            data = piece()
            digest.update(data)
            _write_all(file, data)
        _write_all(file, memoryview(digest.digest()))


def _header(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    table: dict[str, object] = {"__metadata__": METADATA}
    start = 0
    for name, dtype, shape in entries:
        stop = start + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNED)
    return len(encoded).to_bytes(8, "little") + encoded


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:  # a file without a buffer may write a part
        data = data[file.write(data) :]


@contextmanager
def _replacing(path: Path) -> Iterator[FileIO]:
    """Yield a new file that takes the place of `path` after the block, if nothing is raised."""
    # Not longer than the longest name of a file, whatever the length of `path.name`.
    partial = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        if not _can_exist(path):
            raise OSError(errno.EINVAL, "no file can have this name")
        try:
            with FileIO(partial, "xb") as file:  # x: never through a link
                yield file
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)  # the rename is an entry of the folder
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; free some space there or choose "
            "another folder",
            path=str(path),
        ) from error


def _can_exist(path: Path) -> bool:
    try:
        return bool(path.name) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


@dataclass
class Input:
    """An open batch file whose header and digest are valid."""

    file: FileIO
    structure: Json
    entries: dict[str, Entry]
    """Entries of fields that were not read yet."""
    data: int
    """Where the data begins in the file."""
    at: int
    """Where the next bytes of `nested` begin in the file."""
    stop: int
    """Where `nested` ends."""

    def locate(self, name: str, stored: Stored, shape: tuple[int, ...]) -> int:
        """Return the place of an entry in the file. Every entry can be located once."""
        entry = self.entries.pop(name, None)
        if entry is None or entry[1:] != (stored.dtype, (*shape, *stored.tail)):
            raise MalformedError(f"no entry {brief(name)} of this dtype and shape, or read twice")
        return self.data + entry.start

    def locate_nested(self, nbytes: int) -> int:
        """Return the place in the file of the next `nbytes` of the entry `nested`."""
        start = self.at
        if not 0 <= nbytes <= self.stop - start:
            raise MalformedError(f"{nbytes} bytes expected, the file has {self.stop - start} more")
        self.at += nbytes
        return start

    def fill(self, target: memoryview, start: int) -> None:
        """Read the bytes at `start` of the file into `target`."""
        self.file.seek(start)
        read_all(self.file, target)

    def check_read(self) -> None:
        """Raise `MalformedError` if the file has bytes that no value uses."""
        if self.entries or self.at != self.stop:
            raise MalformedError("the file has bytes that belong to no value")


@contextmanager
def opened(path: Path) -> Iterator[Input]:
    """Yield the contents of a batch file.

    Raises `DataError` for a file of another format, and for one that is damaged, also within the
    block.
    """
    try:
        if not path.is_file():
            raise DataError(f"no batch file {path}", path=str(path))
        with FileIO(path, "rb") as file:
            yield _read_header(file, path)
    except (MalformedError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        # Python, numpy and torch raise these for values that they refuse.
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {_first_line(error)}", path=str(path)) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"{error}".partition("\n")[0][:200] or type(error).__name__


def _read_header(file: FileIO, path: Path) -> Input:
    status = os.fstat(file.fileno())
    size = status.st_size
    start = file.read(len(_PICKLED))
    if start == _PICKLED:
        raise DataError(
            f"{path} has the batch format of an earlier version, which is a pickle and can run "
            "code, so this version does not read it; create the batch again, or load the file "
            "with the version that wrote it and write its fields in a format without pickle",
            path=str(path),
        )
    length = int.from_bytes(start[:8], "little")
    if not stat.S_ISREG(status.st_mode) or start[8:9] != b"{":
        raise DataError(f"{path} is not a file of DataProto.save_to_disk", path=str(path))
    if not 0 < length <= min(MAX_HEADER, size - 8):
        raise MalformedError(f"a header of {length} bytes in a file of {size}: it is truncated")
    header = parse(_read(file, 8, length))
    if not isinstance(header, dict) or header.get("__metadata__") != METADATA:
        raise DataError(
            f"{path} is a safetensors file, but none of DataProto.save_to_disk with version "
            f"{METADATA['version']} of the format",
            path=str(path),
        )
    del header["__metadata__"]
    entries = _entries(header, size - 8 - length)
    _check_digest(file, size)
    begin = 8 + length
    structure = parse(_read(file, begin, entries.pop(STRUCTURE).nbytes))
    nested = entries.pop(NESTED)
    del entries[DIGEST]
    at = begin + nested.start
    return Input(file, structure, entries, begin, at, at + nested.nbytes)


def _entries(header: Mapping[str, Json], size: int) -> dict[str, Entry]:
    """Return the entries of a header, which must fill `size` bytes without gaps."""
    entries: dict[str, Entry] = {}
    at = 0
    for name, raw in header.items():
        dtype, shape, offsets = expect_object(raw, "dtype", "shape", "data_offsets")
        kind = expect_text(dtype)
        if kind not in ITEM_BYTES:
            raise MalformedError(f"entry {brief(name)} has the dtype {brief(kind)}")
        entry = Entry(at, kind, expect_shape(shape, ITEM_BYTES[kind]))
        stop = at + entry.nbytes
        if [expect_int(offset) for offset in expect_list(offsets, 2)] != [at, stop]:
            raise MalformedError(
                f"entry {brief(name)} should have the bytes from {at} to {stop} of the data"
            )
        entries[name], at = entry, stop
    fixed = [entries.get(name) for name in (STRUCTURE, NESTED, DIGEST)]
    if any(entry is None or entry.dtype != "U8" for entry in fixed) or [*entries][-1:] != [DIGEST]:
        raise MalformedError(f"the entries {STRUCTURE}, {NESTED} or {DIGEST} are missing")
    if at != size or entries[DIGEST].nbytes != _DIGEST_BYTES:
        raise MalformedError(f"the header describes {at} bytes of data, the file has {size}")
    return entries


def _check_digest(file: FileIO, size: int) -> None:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    file.seek(0)
    left = size - _DIGEST_BYTES
    while left:
        part = chunk[: min(left, _CHUNK)]
        read_all(file, part)
        digest.update(part)
        left -= len(part)
    if file.read(_DIGEST_BYTES) != digest.digest():
        raise MalformedError("its SHA-256 differs from the one that was written")


def parse(encoded: bytes | bytearray) -> Json:
    """Return the value of a JSON text in UTF-8. Keys twice, NaN and Infinity are refused."""
    return json.loads(
        encoded.decode("utf-8", "surrogatepass"),
        object_pairs_hook=_object,
        parse_constant=_no_constant,
    )


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise MalformedError("an object of its JSON has one key twice")
    return made


def _no_constant(text: str) -> Json:
    raise MalformedError(f"{text} is not JSON")


def _read(file: FileIO, start: int, length: int) -> bytearray:
    data = bytearray(length)
    file.seek(start)
    read_all(file, memoryview(data))
    return data


def read_all(file: FileIO, target: memoryview) -> None:
    """Fill `target` from the place of the file."""
    while target:
        count = file.readinto(target)
        if not count:
            raise MalformedError("it ends early")
        target = target[count:]
