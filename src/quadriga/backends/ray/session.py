"""The folder of a Ray session that is started here.

Ray makes folders that all users of the machine can write. Another user could replace the socket
of the object store in it, or read what ranks print. So they are made in a folder of mode 0700:

    /tmp/quadriga-ray-x3f9w2ab/         mode 0700
        lock                            locked as long as the process that started Ray runs
        r/session_…/sockets, …/logs     Ray's
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

PREFIX = "quadriga-ray-"
_LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket."""
_OF_RAY = "/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_BASE = _LONGEST_SOCKET - len(f"/{PREFIX}12345678{_OF_RAY}")


def private_folder() -> str:
    """Make the folder of a session, and remove the folders of sessions that have ended.

    It is below the folder of temporary files, or below /tmp if the sockets in it would have paths
    that are too long. It stays until a later session begins, because it holds Ray's logs.
    """
    own = tempfile.gettempdir()
    base = own if len(os.fsencode(own)) <= _LONGEST_BASE else "/tmp"
    _remove_ended(Path(base))
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # it is released when this process ends
    return f"{folder}/r"


def _remove_ended(base: Path) -> None:
    found = [f for f in base.glob(f"{PREFIX}*") if _is_own(f) and _is_unlocked(f / "lock")]
    if not found:
        return
    lines = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    for folder in found:  # Ray's processes have the folder in their command lines
        if not any(f"{folder}/" in line for line in lines):
            shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_unlocked(path: Path) -> bool:
    with suppress(OSError), open(path) as file:  # it is missing, or locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
