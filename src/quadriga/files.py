"""Write files so that they are complete or absent, whenever the process is killed.

A file is written under another name in the same folder, flushed to disk and then renamed. A rename
within a file system is atomic, and the content is on disk before it. The final name therefore never
refers to incomplete content, not even after a power failure.

    with atomic_write(path) as file:     bytes, with their digest
        file.write(data)
    with replacing(path) as fresh:       for a library that writes to a path
        table.write(fresh)
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quadriga.errors import InputError, QuadrigaError


class HashedFile:
    """A file that is being written. It counts and digests what is written to it.

    The digest is computed from the bytes that the process writes, and not from the file: it also
    shows damage that happens while they are written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._digest.update(data)
        self._file.write(data)
        self.size += len(data)

    def digest(self) -> bytes:
        """Return the SHA-256 of what was written so far."""
        return self._digest.digest()


@contextmanager
def atomic_write(path: Path) -> Iterator[HashedFile]:
    """Yield a file to write that becomes `path` after the block, if the block raises nothing.

    Raises `InputError` with the path and the reason if it cannot be written.
    """
    # x: never through a link, which could let the bytes go to another folder.
    with replacing(path) as fresh, fresh.open("xb") as file:
        yield HashedFile(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write that becomes `path` after the block, see `atomic_write`."""
    # Not made of `path.name`, which may have the greatest length that the file system allows.
    fresh = path.parent / f".{secrets.token_hex(8)}.partial"
    with writing(path):
        if not _is_possible(path):
            raise OSError("no file can have this name")
        try:
            yield fresh
            flush(fresh)
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
        flush(path.parent)  # the rename is an entry of the folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `InputError` with the path and the reason for an error of the system in the block."""
    try:
        yield
    except Exception as error:
        found = system_error(error)
        if found is None:
            raise
        raise cannot_write(path, found) from error


def _is_possible(path: Path) -> bool:
    try:
        return bool(path.name) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def flush(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, if it exists. What a link refers to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of errors of a disk without space: all of it, or what one user or one file may have."""


def system_error(error: BaseException) -> OSError | None:
    """Return the error of the system that a library has raised; None for other errors.

    Libraries written in Rust (safetensors, tokenizers) raise errors of their own, with the number
    in the text: "I/O error: No space left on device (os error 28)".
    """
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None or isinstance(error, QuadrigaError):
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])))


def refusal_in(error: BaseException | None) -> InputError | None:
    """Return the `InputError` that a rank has raised, or that of a full disk, if one of them is the
    cause of an error."""
    while error is not None:
        found, cause = system_error(error), getattr(error, "cause", None)
        if found is not None and found.errno in FULL:
            return cannot_write(Path(str(found.filename or "a file")), found)
        if isinstance(cause, InputError):
            return cause
        error = cause if isinstance(cause, BaseException) else error.__cause__
    return None


def cannot_write(path: Path, error: OSError) -> InputError:
    """Return the error for a file that cannot be written: the path, the reason and what to do."""
    reason = error.strerror or str(error)
    remedy = "free some space there or choose" if error.errno in FULL else "choose"
    return InputError(f"cannot write {path}: {reason}; {remedy} another folder", path=str(path))
