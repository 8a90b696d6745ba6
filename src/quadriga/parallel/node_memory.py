"""The weight files of a model folder, read once on each node into memory that its ranks share.

    rank 0   locks a record, reads the files ──► anonymous memory (memfd) ──► loads from it
                    │ writes its process and the numbers of its descriptors
    rank 1   waits for the lock, opens /proc/PID/fd/N                    ──► loads from it

Loading maps the memory. A tensor that keeps its dtype and its device is a view of it, so the ranks
of a node hold one copy of such weights until they write to them. Without this, each rank reads the
files, which a network file system may send once for each of them.

Nothing is left in /dev/shm: the memory has no name, and the kernel frees it with its last
descriptor and its last mapping, also if the processes are killed. The records are in a folder that
only this user can read or write.

The n-th load of a folder in one rank shares its memory with the n-th load of the other ranks of its
group. Otherwise a rank that loads the folder twice (actor and rollout) could take the memory of
another load, and the rank that offers this would keep it for `KEEP_S` seconds.

consumes      the safetensors files of a folder
waits for     the rank that reads, at most `WAIT_S` seconds
produces      a folder of links, which is removed at the end of the `with` block
unblocked by  the end of the read, or the death of the rank that reads: then another rank reads
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quadriga.errors import ModelError

WAIT_S = 1800.0
"""Seconds that a rank waits for the one that reads."""
KEEP_S = 300.0
"""Seconds after which the rank that has read stops to offer the memory to others."""
OFFERS = "quadriga-weights"
"""The name of the thread that offers the memory, and of the folder of records."""
_SUFFIX = ".safetensors"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_READ_ONLY = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""No process can change the weights of another one."""

_LOADS: Counter[str] = Counter()
"""Version of a folder → how often this process has loaded it."""


@contextmanager
def folder_in_memory(folder: Path, ranks_of_node: int | None = None) -> Iterator[Path]:
    """Yield a folder with the files of `folder`, whose weights are in memory shared by the node.

    `ranks_of_node`: how many processes of this node load the folder; None: LOCAL_WORLD_SIZE, or 1.
    With one process `folder` itself is yielded. Raises `ModelError` if the rank that reads does not
    end within `WAIT_S` seconds, or if the system has no memory without a name (not Linux).
    """
    ranks = _ranks_of_node() if ranks_of_node is None else ranks_of_node
    if ranks < 2:
        yield folder
        return
    if not hasattr(os, "memfd_create"):
        raise ModelError(
            f"the weights in {folder} cannot be shared by the ranks of a node, because this system "
            "has no memfd_create; set use_shm=false",
            path=str(folder),
        )
    version = _version(folder)
    with _locked(_record(version, _LOADS[version]), folder) as record:
        files = _from_a_rank(record) or _read_and_offer(record, folder)
        _count(record, ranks)
    _LOADS[version] += 1
    try:
        with tempfile.TemporaryDirectory(prefix="quadriga-model-") as made:
            # With the folder's own name, by which transformers caches the code of a model.
            linked = Path(made) / folder.resolve().name
            linked.mkdir()
            for entry in folder.iterdir():
                held = files.get(entry.name)
                target = entry.resolve() if held is None else Path(f"/proc/self/fd/{held}")
                (linked / entry.name).symlink_to(target)
            yield linked
    finally:
        _close(files.values())


def _ranks_of_node() -> int:
    # Ranks of the local backend share one process and have no port.
    apart = os.environ.get("MASTER_PORT", "0").isdecimal()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if apart else 1


def _version(folder: Path) -> str:
    """Return a text for these files of this user. Changed files have another one."""
    stats = [(path, path.stat()) for path in _weight_files(folder)]
    version = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return f"{os.getuid()} {folder.resolve()} {version}"


def _record(version: str, load: int) -> Path:
    """Return the record of the `load`-th load of this version by the group of ranks."""
    group = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    folder = Path(tempfile.gettempdir()) / f"{OFFERS}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    stat = folder.lstat()
    if stat.st_uid != os.getuid() or stat.st_mode & 0o077 or folder.is_symlink():
        raise ModelError(
            f"{folder} is not a folder of this user alone, so its records cannot be trusted; "
            "remove it, or set use_shm=false",
            path=str(folder),
        )
    return folder / hashlib.sha256(f"{group} {load} {version}".encode()).hexdigest()


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[Path]:
    """Hold the lock of a record. A process that dies gives it up."""
    expires = time.monotonic() + WAIT_S
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last rank removes the record: the lock of a removed file locks nothing.
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                yield path
                return
        except BlockingIOError:
            if time.monotonic() > expires:
                raise ModelError(
                    f"the rank that reads the weights in {folder} for this node has not ended "
                    f"within {WAIT_S:.0f} s; set use_shm=false",
                    path=str(folder),
                ) from None
            time.sleep(0.05)
        finally:
            os.close(lock)


def _from_a_rank(record: Path) -> dict[str, int]:
    """Return descriptors of what a rank has read; none if no rank has, or it has ended."""
    files: dict[str, int] = {}
    if not record.stat().st_size:
        return files
    pid, numbers, _ = json.loads(record.read_text())
    try:
        for name, number in numbers.items():
            files[name] = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            if not os.readlink(f"/proc/self/fd/{files[name]}").startswith(f"/memfd:{name}"):
                raise OSError("another process has its number")
    except OSError as error:
        _close(files.values())
        if error.errno == errno.EMFILE:
            raise ModelError(
                f"a rank can open only {len(files)} of the {len(numbers)} weight files that "
                "another rank of the node has read; raise its limit of open files (ulimit -n), or "
                "set use_shm=false"
            ) from None
        return {}
    return files


def _read_and_offer(record: Path, folder: Path) -> dict[str, int]:
    """Read the files into memory, offer them in the record, and return descriptors of them."""
    files: dict[str, int] = {}
    try:
        for path in _weight_files(folder):
            files[path.name] = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with path.open("rb") as source, os.fdopen(os.dup(files[path.name]), "wb") as copy:
                shutil.copyfileobj(source, copy, 16 * 2**20)
            fcntl.fcntl(files[path.name], fcntl.F_ADD_SEALS, _READ_ONLY)
        offered = {name: os.dup(descriptor) for name, descriptor in files.items()}
    except BaseException:
        _close(files.values())
        raise
    record.write_text(json.dumps([os.getpid(), offered, 0]))
    arguments = (record, [*offered.values()])
    threading.Thread(target=_offer, args=arguments, name=OFFERS, daemon=True).start()
    return files


def _count(record: Path, ranks: int) -> None:
    """Note that one more rank has the memory; the last one removes the record."""
    pid, numbers, count = json.loads(record.read_text())
    if count + 1 < ranks:
        record.write_text(json.dumps([pid, numbers, count + 1]))
    else:
        record.unlink()


def _offer(record: Path, descriptors: Sequence[int]) -> None:
    """Keep descriptors open until the record is removed, or for `KEEP_S` seconds."""
    began = time.monotonic()
    while record.exists() and time.monotonic() - began < KEEP_S:
        time.sleep(0.1)
    _close(descriptors)
    record.unlink(missing_ok=True)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that loading reads. A folder may hold the same weights in others too."""
    files = sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
    read = _read_by_loading(folder)
    return [path for path in files if read is None or path.name in read]


def _read_by_loading(folder: Path) -> set[str] | None:
    """Return names of files. None: all that there are."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE}
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # loading says what is wrong with the index
