"""Read processes that may end at any moment."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def command_line(process: psutil.Process) -> str:
    """Return the command line, or an empty text if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def children() -> set[int]:
    """Return the processes below this one."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != "zombie"}


def gone(pids: Iterable[int]) -> bool:
    """Wait until processes have ended; return whether they have after 30 s."""
    waiting = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(waiting, timeout=30)[1]
