"""Start a command, and end its whole process group when it or the process that started this ends.

    python -I guard.py FOLDER COMMAND…

The process that starts the guard gives it a session of its own, so the group holds the guard, the
command and what the command starts. A process that was stopped, or that waits with the interpreter
locked, is ended too: SIGKILL needs no cooperation. FOLDER, for temporary files of the group, is
removed. This script imports the standard library only, and runs no code of the command.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

_LOOK_S = 0.5
"""How often to look whether the parent is still the same process."""


def main(folder: str, command: list[str]) -> None:
    """Run `command` until it or the parent of this process ends, then end the group."""
    parent = os.getppid()
    child = subprocess.Popen(command)
    while os.getppid() == parent:
        try:
            child.wait(_LOOK_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if os.getppid() != parent:  # otherwise the parent reads the log in the folder first
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
