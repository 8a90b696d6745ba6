"""Start a command, and end its whole process group when it or the process that started this ends.

    python -I guard.py FOLDER COMMAND…

The process that starts the guard gives it a session of its own, so the group holds the guard, the
command and what the command starts. The group also ends when the guard gets SIGTERM. A process that
was stopped, or that waits with the interpreter locked, is ended too: SIGKILL needs no cooperation.
Killed processes leave their shared memory behind, so the guard notes what they map and removes it.
If the parent has ended, FOLDER, for temporary files of the group, is removed as well.

This script imports the standard library only, and runs no code of the command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LOOK_S = 0.5
"""How often to look whether the parent is still the same process."""
_NOTE_S = 1.0
"""How often to note the shared memory of the group. Processes that end by themselves can no longer
be asked."""
_SHARED = Path("/dev/shm")
_NAMES = ("sem.mp-", "sglang_", "sgl_shm_", "psm_", "torch_")
"""Beginnings of the names of shared memory of SGLang, multiprocessing and torch."""


def main(folder: str, command: list[str]) -> None:
    """Run `command` until it or the parent ends, or SIGTERM comes; then end the group."""
    parent = os.getppid()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    child = subprocess.Popen(command)
    shared: set[Path] = set()
    noted = time.monotonic()
    while os.getppid() == parent and not ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_S)
            break
        if time.monotonic() - noted > _NOTE_S:
            shared |= mapped(os.getpgrp())
            noted = time.monotonic()
    shared |= mapped(os.getpgrp())
    for pid in members(os.getpgrp()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if os.getppid() != parent:  # otherwise the parent still reads the log in the folder
        shutil.rmtree(folder, ignore_errors=True)
    for path in shared:
        path.unlink(missing_ok=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # also what was started meanwhile, and this process


def members(group: int) -> Iterator[int]:
    """Yield the processes of a process group but this one (Linux; elsewhere none)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # "7 (a name) S 1 7 …": the name may hold spaces and brackets.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group and int(entry.name) != os.getpid():
                yield int(entry.name)


def mapped(group: int) -> set[Path]:
    """Return the files of shared memory that processes of the group map."""
    # A line of "maps": "7f0a…-7f0b… rw-s 00000000 00:1b 4711 /dev/shm/sem.x4Zq1 (deleted)". A
    # semaphore gets its name after it was mapped, so files are found by their number, 4711.
    numbers = set()
    for pid in members(group):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {_SHARED}/" in line:
                    numbers.add(int(line.split()[4]))
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHARED):
            if entry.name.startswith(_NAMES) and entry.inode() in numbers:
                found.add(Path(entry.path))
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
