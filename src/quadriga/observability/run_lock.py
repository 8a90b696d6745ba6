"""The lock of a run folder: one run at a time writes into it.

The lock is the file `run.lock`, which holds the owner as JSON and is deleted when the run ends. A
lock whose owner has ended without deleting it is stale, and the next run takes it over:

    owner                                      the lock is stale
    of this host, and no such process          at once
    of this host, the process id is reused     at once: the process was started at another time
    of another host                            when the owner has not renewed it for 10 minutes

The owner renews the lock every 30 seconds by setting the file's modification time. Its age is
measured against a file that is written into the same folder, because clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from quadriga.errors import ConfigError

LOCK = "run.lock"
RENEW_S = 30.0
STALE_AFTER_S = 600.0
_LAST_START = 2.0**36  # about the year 4100; a later time is not that of a run
_START_TOLERANCE_S = 2.0  # the start time of a process is computed from clock ticks


@dataclass(frozen=True)
class LockOwner:
    """The run that holds a lock.

    Attributes:
        host: name of the host, and the number of its space of process ids. Two containers of one
            machine can have equal names, but a process id means another process in each.
        started: when the process was started, in seconds since 1970.
        token: tells apart two runs of one process.
    """

    user: str
    host: str
    pid: int
    started: float
    token: str

    @classmethod
    def this_run(cls) -> LockOwner:
        """Return the owner for a new lock of this process."""
        pid = os.getpid()
        started = psutil.Process(pid).create_time()
        return cls(_user(), _host(), pid, started, secrets.token_hex(8))

    @classmethod
    def read(cls, text: str) -> LockOwner | None:
        """Return the owner from the content of a lock file; None if it is empty or damaged."""
        try:
            raw = json.loads(text)
            owner = cls(**raw)
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = {"user": str, "host": str, "pid": int, "started": int | float, "token": str}
        whole = all(isinstance(getattr(owner, f.name), kinds[f.name]) for f in fields(cls))
        return owner if whole and 0 <= owner.started < _LAST_START else None

    def is_alive(self, age_s: float) -> bool:
        """Return whether this owner still runs; `age_s`: since it has renewed its lock."""
        if self.host != _host():
            return age_s < STALE_AFTER_S
        try:
            started = psutil.Process(self.pid).create_time()
        except psutil.NoSuchProcess:
            return False
        except (psutil.Error, ValueError, OverflowError):
            return age_s < STALE_AFTER_S
        return abs(float(started) - self.started) <= _START_TOLERANCE_S

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
        return f"process {self.pid} of {self.user} on {self.host.partition(':')[0]}, since {began}"


class RunLock:
    """A lock that this run holds until `release`. A thread renews it."""

    def __init__(self, path: Path, owner: LockOwner) -> None:
        self.path = path
        self.owner = owner
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="quadriga-run-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, folder: Path) -> RunLock:
        """Take the lock of a folder, which must exist.

        Raises:
            ConfigError: another run that is alive holds it.
            OSError: the lock file cannot be written.
        """
        path = folder / LOCK
        own = LockOwner.this_run()
        with _opened(path, create=True) as file:
            assert file is not None
            refuse_if_alive(folder, _owner_in(file), _age(file, folder))
            _write(file, json.dumps(asdict(own)))
        return cls(path, own)

    def release(self) -> None:
        """Delete the lock, unless another run has taken it over. A second call does nothing."""
        if self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError), _opened(self.path, create=False) as file:
            if file is not None and _owner_in(file) == self.owner:
                self.path.unlink()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the folder is unreachable: try again later
                os.utime(self.path, follow_symlinks=False)


def check_lock(folder: Path) -> None:
    """Raise `ConfigError` if a run that is alive holds the lock. Nothing is written."""
    path = folder / LOCK
    try:
        # Neither a link to a device without an end nor a pipe without a writer is waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            owner = _owner_in(file)
            age = time.time() - os.fstat(file).st_mtime
        finally:
            os.close(file)
    except OSError:  # no lock, or no file, which `RunLock.acquire` refuses
        return
    refuse_if_alive(folder, owner, age)


def refuse_if_alive(folder: Path, owner: LockOwner | None, age_s: float) -> None:
    """Raise `ConfigError` if the owner of the folder's lock is alive."""
    if owner is not None and owner.is_alive(age_s):
        raise ConfigError(
            f"{folder} is in use by another run ({owner}); choose another "
            "trainer.default_local_dir, or wait until that run has ended",
            key="trainer.default_local_dir",
        )


@contextmanager
def _opened(path: Path, *, create: bool) -> Iterator[int | None]:
    """Open the lock file and keep other processes out of this block; None if it does not exist.

    Two runs that find a stale lock at the same time must not both take it. `flock` lets one of them
    in; the other then reads what the first has written. The owner of `release` deletes the file
    within the block, so a process that waited for `flock` may hold a deleted file: it opens again.
    """
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            file = os.open(path, flags, 0o644)
        except FileNotFoundError:
            if create:
                raise
            yield None
            return
        try:
            with contextlib.suppress(OSError):  # a file system without `flock`: go on without
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _owner_in(file: int) -> LockOwner | None:
    return LockOwner.read(os.pread(file, 4096, 0).decode(errors="replace"))


def _age(file: int, folder: Path) -> float:
    """Return the seconds since the lock was renewed, by the clock of the file system."""
    probe = folder / f".{LOCK}.{secrets.token_hex(4)}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime - os.fstat(file).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)
    os.fsync(file)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for the user
        return str(os.getuid())


def _host() -> str:
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname()}:{space}"
