"""Run a command in a process of its own, and read processes that may end at any moment."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from quadriga.observability.jsonl import read_jsonl

PRELOADED = (
    "tensordict",
    "quadriga.trainer.ppo",
    "quadriga.engines.fsdp",
    "quadriga.models.tiny",
    "quadriga.rollout.hf.engine",
)


def forks():
    """Return the context of processes that are forks of one, which has imported `PRELOADED`.

    To import an engine takes some seconds of each process. The fork server lives as long as this
    process; its forks have the environment in which it was started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_python(*arguments, status=0, timeout=150, **given):
    """Run Python with these arguments. It must end with the exit code `status`.

    `given`: arguments of `subprocess.run`.
    """
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **given)
    assert run.returncode == status, run.stdout[-2000:] + run.stderr[-4000:]
    return run


def quadriga(*words: str, timeout: float | None = None, **given: object) -> str:
    """Run `quadriga` as `run_python` runs Python; return its standard output."""
    return run_python("-m", "quadriga.cli.main", *words, timeout=timeout, **given).stdout


def accuracies(run: Path) -> list[float]:
    """Return what the validations of a run have found."""
    steps = read_jsonl(run / "metrics.jsonl")
    return [step["val/accuracy"] for step in steps if "val/accuracy" in step]


def command_line(process: psutil.Process) -> str:
    """Return the command line, or an empty text if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children() -> set[int]:
    """Return the processes below this one."""
    return {p.pid for p in psutil.Process().children(recursive=True) if is_running(p.pid)}


def gone(pids: Iterable[int]) -> bool:
    """Wait until processes have ended; return whether they have after 60 s."""
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
