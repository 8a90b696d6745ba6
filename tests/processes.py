"""Read processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> str:
    """Return the command line, or an empty text if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
