"""Run a function in several processes, which join a process group."""

from __future__ import annotations

import socket
import time

import torch.multiprocessing as mp

WAIT_S = 120


def run_two_ranks(main, *args) -> None:
    run_ranks(2, main, *args)


def run_ranks(count: int, main, *args, wait_s: float = WAIT_S) -> None:
    """Run `main(rank, *args, port)` in `count` processes. Raises `TimeoutError` after `wait_s`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(main, args=(*args, port), nprocs=count, join=False)
    deadline = time.monotonic() + wait_s
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the {count} ranks did not finish within {wait_s} s")
