"""Run a function in several processes, which join a process group."""

import atexit
import importlib
import os
import socket
import sys
import time

import torch
import torch.multiprocessing as mp

from processes import forks

WAIT_S = 120


def run_ranks(count: int, main, *args, wait_s: float = WAIT_S) -> None:
    """Run `main(rank, *args, port)` in `count` forks of a process that has imported the engine.

    Raises `TimeoutError` after `wait_s` seconds. However it ends, no process is left.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = (dict(os.environ), main, *args, port)
    method = forks().get_start_method()
    context = mp.start_processes(_run_and_exit, given, count, join=False, start_method=method)
    deadline = time.monotonic() + wait_s
    try:
        while not context.join(timeout=1, grace_period=2):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {count} ranks did not finish within {wait_s} s")
    finally:  # also if the limit of the test ends the wait
        for process in context.processes:
            process.kill()


def fork_ranks(main, ranks: int, *args, limit: float, modules=()) -> None:
    """Run `main(rank, ranks, *args)` in one process per rank, each a rank of a process group.

    The ranks are forks of one process, which imports `modules` and those of `main`: nothing is
    imported twice. Raises `TimeoutError` after `limit` seconds; then no process is left.
    """
    run_ranks(1, _fork, main, ranks, args, modules, wait_s=limit)


def _fork(_: int, main, ranks: int, args, modules, port: int) -> None:
    for name in modules:
        importlib.import_module(name)
    mp.start_processes(
        _run_and_exit, (dict(os.environ), _run_as_rank, main, ranks, args, port),
        nprocs=ranks, start_method="fork",
    )  # fmt: skip


def _run_as_rank(rank: int, main, ranks: int, args, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    main(rank, ranks, *args)
    torch.distributed.destroy_process_group()


def _run_and_exit(rank: int, environment: dict[str, str], main, *args) -> None:
    """Run `main` and end the process, without the last phase of the interpreter.

    A thread of gloo drops a tensor of a finished collective with Python's lock. If it asks for the
    lock while the interpreter ends, the process aborts with "terminate called without an active
    exception" (pytorch/pytorch#190489), also after `destroy_process_group`: a mesh keeps its group.
    """
    os.environ.clear()
    os.environ.update(environment)
    main(rank, *args)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
