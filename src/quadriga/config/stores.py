"""Remote files and folders, such as s3://bucket/run, through fsspec.

    store = Store("s3://bucket/run")            a folder: files are sent, read, listed, compared
    fetched("s3://bucket/data/train.parquet")   a remote file or folder as one of this machine;
                                                a file of the hub is in the hub's own cache
    local_file(path)                            a file of this machine; a remote one is fetched

A call that fails is repeated, `ATTEMPTS` times in all. A file that was sent is compared with what
the store has: by its size, and by the MD5 that the store reports (S3, Google Cloud Storage), or
else by reading it back. Credentials come from the environment, as the packages of
`config.paths.STORES` document. Their values are masked in messages.
"""

import base64
import fcntl
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from quadriga.config.hub import HUB_PREFIX, data_file
from quadriga.config.paths import is_remote, local_path
from quadriga.config.secrets import mask_secrets
from quadriga.errors import StoreError, first_line
from quadriga.files import atomic_write, replacing, writing

MARKER = "COMPLETE.json"
"""The file of a folder that is written last: it lists the others, with sizes and digests."""
ATTEMPTS = 4
BACKOFF_S = 0.5  # before the second attempt; twice as long before each one after it
AT_ONCE = 8  # files of a folder that are sent or read at the same time
CACHE = "~/.cache/quadriga/remote"

_PART = 50 << 20  # bytes of a part in an upload of s3fs
_VERSION = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
_fetched: dict[str, Path] = {}

T = TypeVar("T")
Infos = dict[str, dict[str, Any]]
"""Name of a file in a folder → what the store knows of it: `size` and others."""
Listed = dict[str, tuple[int, str | None]]
"""Name of a file → its size and its SHA-256, where it is known."""


class _OtherContentError(Exception):
    """A file does not have the content that was sent, or that a marker lists."""


class Store:
    """A remote folder.

    Raises `StoreError` where a file cannot be read or written after `ATTEMPTS` attempts, or has
    another content: its attribute `damaged` is then true, and also for a file that is missing.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        options = {} if is_remote(self.url) else {"auto_mkdir": True}
        opened = self._call("open", "", partial(url_to_fs, self.url, **options))
        self._fs, self._root = opened

    def send(self, path: Path, name: str, sha256: str | None = None) -> None:
        """Write a file of this machine to the folder, and compare it.

        `sha256`: the digest that it must have.
        """
        size, digest, md5s = digests(path)
        if sha256 not in (None, digest):
            text = "has another content than was written; it is damaged, and not uploaded"
            raise StoreError(f"{path} {text}", path=str(path), damaged=True)

        def attempt() -> None:
            self._fs.put_file(str(path), self._path(name))
            self._compare(name, size, digest, md5s)

        self._call("write", name, attempt)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""

        def attempt() -> None:
            self._fs.pipe_file(self._path(name), content)
            self._compare(name, len(content), hashlib.sha256(content).hexdigest(), ())

        self._call("write", name, attempt)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""

        def attempt() -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(self._fs.cat_file(self._path(name)))
            return None

        return self._call("read", name, attempt)

    def get(self, name: str, target: Path, size: int, sha256: str | None = None) -> str:
        """Read a file into one of this machine, which appears when it is complete and has this
        size and digest. Return its SHA-256."""

        def attempt() -> str:
            self._fs.get_file(self._path(name), str(fresh))
            found, digest, _ = digests(fresh)
            if found != size:
                raise _OtherContentError(f"it has {found} bytes, expected {size}")
            if sha256 not in (None, digest):
                raise _OtherContentError("its SHA-256 is another one than was written")
            return digest

        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as fresh:
            return self._call("read", name, attempt)

    def files(self, folder: str = "") -> Infos:
        """Return all files below a folder, by their names relative to it. A store that is a file
        has one file with the name "".

        Raises `StoreError` for a name that leads out of the folder: objects can have any name.
        """
        path = self._path(folder)

        def attempt() -> Infos:
            self._fs.invalidate_cache()
            found = self._fs.find(path, detail=True)
            return {file[len(path) :].strip("/"): info for file, info in found.items()}

        return _inside(self._call("list", folder, attempt), self.url)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files, where they exist."""

        def attempt(name: str) -> None:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._fs.rm_file(self._path(name))

        for name in names:
            self._call("delete", name, partial(attempt, name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _compare(self, name: str, size: int, sha256: str, md5s: Iterable[str]) -> None:
        self._fs.invalidate_cache()
        info = self._fs.info(self._path(name))
        if info["size"] != size:
            raise _OtherContentError(f"it has {info['size']} bytes, {size} were sent")
        if _reported_md5(info) in md5s:
            return
        digest = hashlib.sha256()
        with self._fs.open(self._path(name), "rb") as file:
            while data := file.read(_PART):
                digest.update(data)
        if digest.hexdigest() != sha256:
            raise _OtherContentError("it has another content than was sent")

    def _call(self, verb: str, name: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds."""
        said = dict[str, None]()
        for number in range(ATTEMPTS):
            time.sleep(BACKOFF_S * 2 ** (number - 1) if number else 0)
            try:
                return attempt()
            except Exception as error:  # each package has errors of its own for a server
                failed = error
                said[first_line(error)[:300]] = None  # the later ones may not say why
                if isinstance(error, FileNotFoundError | PermissionError):
                    break
        missing = isinstance(failed, FileNotFoundError)
        reason = "; ".join(said) if str(failed) else type(failed).__name__
        reason = f"it does not exist ({reason})" if missing else reason
        where = mask_secrets(f"{self.url}/{name}".rstrip("/"))
        damaged = missing or isinstance(failed, _OtherContentError)
        text = mask_secrets(f"cannot {verb} {where}: {reason}")
        raise StoreError(text, path=where, damaged=damaged) from failed


def digests(path: Path) -> tuple[int, str, tuple[str, str]]:
    """Return the size and the SHA-256 of a file, and the MD5s that a store may report for it."""
    size, sha, whole, parts = 0, hashlib.sha256(), hashlib.md5(usedforsecurity=False), b""
    with path.open("rb") as file:
        while data := file.read(_PART):
            size += len(data)
            sha.update(data)
            whole.update(data)
            parts += hashlib.md5(data, usedforsecurity=False).digest()
    # S3 names a file of two parts by the MD5 of both MD5s, and "-2".
    joined = f"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(parts) // 16}"
    return size, sha.hexdigest(), (whole.hexdigest(), joined)


def _reported_md5(info: Mapping[str, Any]) -> str:
    """Return the MD5 that a store reports, in hexadecimal digits, or other text."""
    if "md5Hash" in info:
        return base64.b64decode(info["md5Hash"]).hex()
    return str(info.get("ETag", "")).strip('"')


def listed(marker: bytes, where: str) -> Listed:
    """Return the files that a marker lists.

    Raises `StoreError` if it is no marker, or a name leads out of its folder.
    """
    try:
        files = json.loads(marker)["files"]
        found: Listed = {n: (int(file["size"]), str(file["digest"])) for n, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{mask_secrets(where)}/{MARKER} is damaged: {type(error).__name__}"
        raise StoreError(text, path=where, damaged=True) from error
    return _inside(found, where)


def _inside(files: dict[str, T], where: str) -> dict[str, T]:
    """Return files. Raises `StoreError` for a name that leads out of its folder."""
    for name in files:
        if name.startswith("/") or "\\" in name or {"..", "."} & {*name.split("/")}:
            text = f"{mask_secrets(where)} has a file named {name!r}, which leads out of the folder"
            raise StoreError(text, path=where, damaged=True)
    return files


def each(call: Callable[[str], object], names: Iterable[str]) -> None:
    """Call a function with all names, `AT_ONCE` at a time. Raise the first error.

    The threads do not keep a process alive that is stopped, as a `ThreadPoolExecutor` does.
    """
    waiting, errors = deque(names), list[Exception]()

    def work() -> None:
        while not errors:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                call(name)
            except Exception as error:  # raised below
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def local_file(path: str | Path) -> Path:
    """Return a file of this machine; a remote one is fetched."""
    text = local_path(path, remote=True)
    return fetched(text) if is_remote(text) else Path(text)


def fetched(url: str) -> Path:
    """Return the copy of a remote file or folder on this machine, after all checks of it.

    The copy is in `CACHE`, in a folder for this version of the remote one. The processes of a node
    fetch it once, and a process lists the remote folder once. A folder with a marker must have the
    digests that the marker lists. A copy that has been changed since is fetched again.

    Raises:
        StoreError: it does not exist, cannot be read or is damaged.
    """
    if url not in _fetched and url.startswith(HUB_PREFIX):
        _fetched[url] = data_file(url)
    if url in _fetched:
        return _fetched[url]
    store = Store(url)
    infos = store.files()
    if not infos:
        raise StoreError(mask_secrets(f"{url} does not exist, or has no files"), path=url)
    files: Listed = {name: (info["size"], None) for name, info in infos.items()}
    if MARKER in files:
        files |= listed(store.read(MARKER) or b"", url)
    versions = sorted([n, i["size"], *(str(i.get(k)) for k in _VERSION)] for n, i in infos.items())
    version = hashlib.sha256(json.dumps([url, versions]).encode()).hexdigest()[:24]
    folder = Path(local_path(CACHE)) / version
    place, record = folder / PurePosixPath(store.url).name, folder / ".digests.json"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    with lock:  # another process of this machine waits here
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(record.read_bytes()) if record.is_file() else {}

        def get(name: str) -> None:
            path, (size, digest) = place / name, files[name]
            if not _is_unchanged(path, known.get(name), whole=not name):
                digest = store.get(name, path, size, digest)
                known[name] = [*_stamp(path), digest]

        each(get, files)
        with atomic_write(record) as file:
            file.write(json.dumps(known).encode())
    _fetched[url] = place
    return place


def _is_unchanged(path: Path, known: list[int | str] | None, *, whole: bool) -> bool:
    """Return whether a copy is as it was fetched; `whole`: compare its content, too."""
    if known is None or not path.is_file() or _stamp(path) != known[:2]:
        return False
    return not whole or digests(path)[1] == known[2]


def _stamp(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]
