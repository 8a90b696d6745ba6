"""Reward functions that misbehave. `solution_str` is a number; a good function returns it."""

import asyncio
import ctypes
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection


def process_id(solution_str, **_):
    return os.getpid()


def fork_and_return(solution_str, **_):
    os.fork()
    return int(solution_str)


def _connection():
    # The descriptor is not closed: the pool worker goes on to use it.
    return Connection(os.dup(int(sys.argv[1])))


def _report(sample, process, copies=1):
    outcome = {"status": "scored", "score": 99.0, "extra": {}, "detail": ""}
    _connection().send_bytes(json.dumps([sample, process, [outcome] * copies]).encode())


def report_for_another_sample(solution_str, **_):
    if solution_str == "2":
        _report(2, os.getpid())
    return int(solution_str)


def report_several(solution_str, **_):
    if solution_str == "2":
        _report(1, os.getpid(), copies=2)
    return int(solution_str)


def report_as_another_process(solution_str, **_):
    if solution_str == "2":
        _report(1, os.getpid() + 1)
    return int(solution_str)


class _Executes:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def send_a_pickle(solution_str, extra_info, **_):
    _connection().send_bytes(pickle.dumps(_Executes(extra_info)))
    return int(solution_str)


def set_an_alarm(solution_str, **_):
    if solution_str == "1":
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        time.sleep(0.4)
    return int(solution_str)


def end_a_moment_later(solution_str, **_):
    if solution_str == "1":
        threading.Timer(0.2, os._exit, [3]).start()
    return int(solution_str)


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def leave_a_session(solution_str, **_):
    return subprocess.Popen(SLEEP, start_new_session=True).pid


def leave_an_orphan(solution_str, **_):
    """Start a process in a session of its own, whose parent ends at once."""
    code = (
        "import subprocess, sys;"
        f"print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=2).pid)"
    )
    return int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout)


def hang_with_a_child(extra_info, **_):
    with open(extra_info, "w") as note:
        note.write(str(leave_a_session("")))
    time.sleep(600)


def hang(**_):
    time.sleep(600)


def hang_in_c(**_):
    """Hold the interpreter's lock: no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(600)


def allocate(solution_str, **_):
    if solution_str == "1":
        bytearray(2 << 30)
    return int(solution_str)


def print_a_lot(solution_str, **_):
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer)  # which must not be a file that seeks
    for _ in range(50):
        print("x" * 200_000)
    return int(solution_str)


def return_much(solution_str, **_):
    if solution_str == "1":
        return {"score": 1.0, "text": "x" * 10_000_000}
    if solution_str == "2":
        return {"score": 1.0, **{str(i): 1.0 for i in range(100_000)}}
    if solution_str == "3":
        raise ValueError("x" * 10_000_000)
    return 4.0


BREAKS = {
    "stop_itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "read_invalid_memory": lambda: ctypes.string_at(1),
}


def break_the_process(solution_str, extra_info, **_):
    if solution_str == "1":
        BREAKS[extra_info]()
    return int(solution_str)


class _Silent(BaseException):
    """An exception whose message ends the process."""

    def __str__(self):
        raise SystemExit(0)


def raise_anything(solution_str, **_):
    if solution_str == "1":
        raise _Silent
    if solution_str == "2":
        raise asyncio.CancelledError
    if solution_str == "3":
        raise GeneratorExit
    return int(solution_str)


def exit_at_two(solution_str, **_):
    if solution_str == "2":
        os._exit(0)
    return int(solution_str)


def return_half_a_pair(solution_str, **_):
    if solution_str == "2":
        raise ValueError("half \ud800")
    return {"score": float(solution_str), "half \ud800": 1.0, "note": "\udfff"}


def begin_a_message(solution_str, **_):
    if solution_str == "2":
        os.write(int(sys.argv[1]), b"\x00\x00\x01\x00abc")
    return float(solution_str)


def look_for_the_connection_in_a_copy(**_):
    pid = os.fork()
    if not pid:
        try:
            os.fstat(int(sys.argv[1]))
        except OSError:
            os._exit(0)
        os._exit(1)
    return float(os.waitpid(pid, 0)[1])
