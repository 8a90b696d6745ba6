"""The weight files of a model folder, read once on each node into memory that its ranks share.

    rank 0   reads the files ──► anonymous memory (memfd) ──► loads from it
                                       │ file descriptors, over a Unix socket
    rank 1   asks ◄────────────────────┘                  ──► loads from it

Loading maps the memory. A tensor that keeps its dtype and its device is a view of it, so the ranks
of a node hold one copy of such weights until they write to them. Without this, each rank reads the
files, which a network file system may send once for each of them.

Nothing is left in /dev/shm: the memory has no name, and the kernel frees it with its last
descriptor and its last mapping, also if the processes are killed. A process that is killed while it
loads leaves a folder of links, which the next load of the same user removes.

The n-th load of a folder in one rank shares its memory with the n-th load of the other ranks of its
group. Otherwise a rank that loads the folder twice (actor and rollout) could take the memory of
another load, and the rank that offers this would keep it for `KEEP_S` seconds.

consumes      the safetensors files of a folder
waits for     the rank that reads, at most `WAIT_S` seconds
produces      a folder of links, which is removed at the end of the `with` block
unblocked by  the end of the read, or the death of the rank that reads: then another rank reads
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from quadriga.errors import ModelError

WAIT_S = 1800.0
"""Seconds that a rank waits for the one that reads."""
KEEP_S = 300.0
"""Seconds after which the rank that has read stops to offer the memory to others."""
OFFERS = "quadriga-weights"
"""The name of the thread that offers the memory."""
_MOST_FILES = 200  # descriptors in one message; the kernel's limit is 253
_SUFFIX = ".safetensors"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LINKS = "quadriga-model-"
_STALE_S = 60.0  # a folder of links that is younger may not be locked yet
_READ_ONLY = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
"""No process can change the weights of another one."""
_PEER = struct.Struct("3i")  # pid, uid, gid

Files = Mapping[str, int]
"""File name → descriptor."""

_LOADS: Counter[str] = Counter()
"""Version of a folder → how often this process has loaded it."""


@contextmanager
def folder_in_memory(folder: Path, ranks_of_node: int | None = None) -> Iterator[Path]:
    """Yield a folder with the files of `folder`, whose weights are in memory shared by the node.

    `ranks_of_node`: how many processes of this node load the folder; None: LOCAL_WORLD_SIZE, or 1.
    With one process `folder` itself is yielded. Raises `ModelError` if the rank that reads does not
    answer within `WAIT_S` seconds, or if the system has no memory without a name (not Linux).
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
    files = _shared_files(folder, ranks)
    try:
        with _folder_of_links() as made:
            # With the folder's own name, by which transformers caches the code of a model.
            linked = made / folder.resolve().name
            linked.mkdir()
            for entry in folder.iterdir():
                held = files.get(entry.name)
                target = entry.resolve() if held is None else Path(f"/proc/self/fd/{held}")
                (linked / entry.name).symlink_to(target)
            yield linked
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _ranks_of_node() -> int:
    # Ranks of the local backend share one process and have no port.
    apart = os.environ.get("MASTER_PORT", "0").isdecimal()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if apart else 1


@contextmanager
def _folder_of_links() -> Iterator[Path]:
    """Yield an empty folder, locked so that no other process takes it for one that was left."""
    _remove_left_folders()
    with tempfile.TemporaryDirectory(prefix=_LINKS) as made:
        lock = os.open(made, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(made)
        finally:
            os.close(lock)


def _remove_left_folders() -> None:
    """Remove the folders of links of this user whose process was killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_LINKS}*"):
        with suppress(OSError):  # another process removes it, or its process lives and has the lock
            stat = left.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < _STALE_S:
                continue
            lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)


def _shared_files(folder: Path, ranks: int) -> dict[str, int]:
    """Return descriptors of the weight files, from the rank that has read them or by reading."""
    version = _version(folder)
    files = _from_a_rank(_address(version, _LOADS[version]), folder, ranks)
    _LOADS[version] += 1
    return files


def _from_a_rank(address: str, folder: Path, ranks: int) -> dict[str, int]:
    expires = time.monotonic() + WAIT_S
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(address)  # succeeds in one process of the node
        except OSError:
            listener.close()
            files = _received(address)
            if files is not None:
                return files
            if time.monotonic() > expires:
                raise ModelError(
                    f"the rank that reads the weights in {folder} for this node has not answered "
                    f"within {WAIT_S:.0f} s; set use_shm=false",
                    path=str(folder),
                ) from None
            time.sleep(0.05)
            continue
        return _read_and_offer(listener, folder, ranks)


def _version(folder: Path) -> str:
    """Return a text for these files of this user. Changed files have another one."""
    stats = [(path, path.stat()) for path in _weight_files(folder)]
    version = [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return f"{os.getuid()} {folder.resolve()} {version}"


def _address(version: str, load: int) -> str:
    """Return the abstract address of the `load`-th load of this version by the group of ranks."""
    group = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    text = f"{group} {load} {version}"
    return f"\0quadriga-weights-{hashlib.sha256(text.encode()).hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that loading reads. A folder may hold the same weights in others too."""
    files = sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
    read = _read_by_loading(folder)
    files = [path for path in files if read is None or path.name in read]
    if len(files) > _MOST_FILES:
        raise ModelError(
            f"model folder {folder} has {len(files)} weight files, at most {_MOST_FILES} can be "
            "shared by the ranks of a node; set use_shm=false",
            path=str(folder),
        )
    return files


def _read_by_loading(folder: Path) -> set[str] | None:
    """Return names of files. None: all that there are."""
    if (folder / _SINGLE).is_file():
        return {_SINGLE}
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # loading says what is wrong with the index


def _read_and_offer(listener: socket.socket, folder: Path, ranks: int) -> dict[str, int]:
    """Read the files into memory, start to offer them, and return descriptors of them."""
    files: dict[str, int] = {}
    try:
        for path in _weight_files(folder):
            files[path.name] = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            with path.open("rb") as source, os.fdopen(os.dup(files[path.name]), "wb") as copy:
                shutil.copyfileobj(source, copy, 16 * 2**20)
            fcntl.fcntl(files[path.name], fcntl.F_ADD_SEALS, _READ_ONLY)
        listener.listen(ranks)  # until now, the other ranks cannot connect
    except BaseException:
        listener.close()
        for descriptor in files.values():
            os.close(descriptor)
        raise
    own = {name: os.dup(descriptor) for name, descriptor in files.items()}
    threading.Thread(target=_offer, args=(listener, files, ranks), name=OFFERS, daemon=True).start()
    return own


def _offer(listener: socket.socket, files: Files, ranks: int) -> None:
    """Send the descriptors to the other ranks; end when all have them, or after `KEEP_S` s."""
    served: set[int] = set()
    began = time.monotonic()
    listener.settimeout(1.0)
    try:
        while len(served) < ranks - 1 and time.monotonic() - began < KEEP_S:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError):  # a rank that has ended
                pid = _same_user(connection)
                if pid is not None:
                    names = json.dumps(list(files)).encode()
                    socket.send_fds(connection, [names], list(files.values()))
                    served |= {pid} - {os.getpid()}
    finally:
        listener.close()
        for descriptor in files.values():
            os.close(descriptor)


def _received(address: str) -> dict[str, int] | None:
    """Ask for the descriptors. Return None while no rank offers them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        try:
            connection.connect(address)
            if _same_user(connection) is None:
                return None
            names, descriptors, _, _ = socket.recv_fds(connection, 2**16, _MOST_FILES)
        except OSError:  # the rank still reads, or it has ended
            return None
    if not names:
        return None
    expected = json.loads(names)
    if len(descriptors) < len(expected):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ModelError(
            f"a rank can open only {len(descriptors)} of the {len(expected)} weight files that "
            "another rank of the node has read; raise its limit of open files (ulimit -n), or set "
            "use_shm=false"
        )
    return dict(zip(expected, descriptors, strict=True))


def _same_user(connection: socket.socket) -> int | None:
    """Return the process id of the other side, None if it is a process of another user.

    Any user can bind an abstract address, and would then choose the weights.
    """
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(peer)
    return int(pid) if uid == os.getuid() else None
