"""Run Python code that a policy has written: without a network, within limits, apart from the run.

Each call has processes of its own (`sandbox_process`) in namespaces of the kernel (Linux): they see
no network, no other process, no environment variable of the run, and of the files Python and the
libraries of the system, which they can only read. What they write is in memory and ends with them.
Where the system does not allow namespaces, as in many containers, code is not run, unless
`allow_unisolated=True`: then only the limits hold. With an `image` the code runs in a container of
podman or docker instead, where these are installed.

The kernel of the machine is shared. Use a virtual machine for code that may attack it.
"""

import json
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Literal

from quadriga.agents import sandbox_process
from quadriga.errors import InputError

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
_PULL_S = 300.0  # until a container runs, whose image may be fetched
_LAST_READ_S = 2.0  # for the output that is left when the processes are killed
_AT_ONCE = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))  # the others wait, without limit


@dataclass(frozen=True)
class Result:
    """What a run of code gave.

    Attributes:
        status: "ended" by itself; "timed_out"; "out_of_memory", all processes used too much; or
            "too_much_output". A process that exceeds its own memory has a MemoryError.
        code: exit code, negative for a signal; None if it was killed.
        output: standard output and error, cut.
        isolated: whether it ran in namespaces of its own.
    """

    status: Literal["ended", "timed_out", "out_of_memory", "too_much_output"]
    code: int | None
    output: str
    isolated: bool

    def __str__(self) -> str:
        """Return the output, and a last line that says how it ended if it failed."""
        if self.status == "ended" and self.code == 0:
            return self.output
        ended = self.status.replace("_", " ") if self.code is None else f"exit code {self.code}"
        return f"{self.output.rstrip()}\n[{ended}]".lstrip()


def run_python(
    code: str,
    *,
    files: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    max_output: int = 20_000,
    processes: int = 32,
    allow_unisolated: bool = False,
    image: str | None = None,
) -> Result:
    """Run Python code in a folder of its own, with the packages of this Python.

    Args:
        files: further files of the folder, by their relative paths.
        timeout_s: after so many seconds all its processes are killed.
        memory_mb: of all its processes; of each its address space; and of what it writes to files.
        max_output: bytes; code that prints more is killed.
        processes: and threads that it may have.
        allow_unisolated: run it with limits alone where the system allows no isolation.
        image: run it in a container of this image, with the packages of its `python3`. The limit of
            `memory_mb` is on all processes together, and on what is written.

    Raises:
        InputError: the system does not allow isolation; a path leads out of the folder; the
            process cannot start; or no container of the image can be run.
    """
    for name in files or {}:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"files[{name!r}] must be a relative path inside of the folder")
    written = {**(files or {}), "main.py": code}
    with _AT_ONCE, tempfile.TemporaryDirectory(prefix="quadriga_") as folder:
        if image is not None:
            memory = f"{memory_mb}m"
            return _run_in_container(
                image, written, timeout_s, max_output, memory, processes, folder
            )
        request = {
            "argv": [sys.executable, "-E", "-s", "-B", "main.py"],
            "environment": _ENVIRONMENT,
            "files": written,
            "folder": folder,
            "shown": sorted({sys.prefix, sys.base_prefix}),
            "cpu_s": math.ceil(timeout_s) + 1,
            "memory_mb": memory_mb,
            "processes": processes,
            "allow_unisolated": allow_unisolated,
        }
        output, told, cause = _run(
            [sys.executable, "-I", "-S", sandbox_process.__file__],
            json.dumps(request).encode(),
            timeout_s,
            max_output,
            folder,
            env={},
        )
    if not told and cause is None:
        raise InputError(f"the process of a sandbox cannot start: {output[-300:]!r}")
    isolated = bool(told and told[0]["isolated"])
    if told and not isolated and not allow_unisolated:
        raise InputError(
            f"code is not run, because the system allows no isolation ({told[0]['why']}); allow "
            "user namespaces, or start the container with the capability SYS_ADMIN, or pass "
            "allow_unisolated=True, to run it with limits alone"
        )
    text = output[:max_output].decode("utf-8", "replace")
    if cause is None and len(told) == 2 and not told[1]["memory"]:
        return Result("ended", int(str(told[1]["code"])), text, isolated)
    return Result(cause or "out_of_memory", None, text, isolated)


# The first process in a container: it says that it runs, writes the files, runs main.py and tells
# its exit code, or that the memory was used up. Processes that are left end with it.
_BEGIN = """
import json, os, sys, time
word, seconds, files = json.loads(sys.stdin.readline())
print(word, flush=True)
for name, text in files.items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
child = os.fork()
if not child:
    os.execv(sys.executable, [sys.executable, "-E", "-s", "-B", "main.py"])
ends, code = time.monotonic() + seconds, None
while code is None and time.monotonic() < ends:
    ended, status = os.waitpid(-1, os.WNOHANG)
    if ended == child:
        code = os.waitstatus_to_exitcode(status)
    time.sleep(0 if ended else 0.02)
for path in ("memory.events", "memory/memory.oom_control"):
    try:
        found = open("/sys/fs/cgroup/" + path).read()
        code = "memory" if "oom_kill " in found and "oom_kill 0" not in found else code
    except OSError:
        pass
print(f"\\n{word} {code}", flush=True)
"""


def _run_in_container(
    image: str,
    files: Mapping[str, str],
    timeout_s: float,
    max_output: int,
    memory: str,
    processes: int,
    folder: str,
) -> Result:
    tool = shutil.which("podman") or shutil.which("docker")
    if image.startswith("-"):
        raise InputError(f"image={image!r} must be the name of an image")
    if tool is None:
        raise InputError(f"image={image!r} needs podman or docker, and neither is installed")
    word, name = secrets.token_hex(8), f"quadriga_{secrets.token_hex(8)}"
    bounds = {
        "memory": memory, "memory-swap": memory, "pids-limit": processes, "cpus": 1,
        "network": "none", "cap-drop": "all", "security-opt": "no-new-privileges",
        "user": "65534:65534", "workdir": "/quadriga", "env": "HOME=/tmp", "name": name,
    }  # fmt: skip
    folders = [f"--tmpfs={path}:rw,mode=1777,size={memory}" for path in ("/quadriga", "/tmp")]
    given = [*(f"--{key}={value}" for key, value in bounds.items()), "--read-only", *folders]
    program = [tool, "run", "--rm", "--interactive", *given, image, "python3", "-c", _BEGIN]
    request = json.dumps([word, timeout_s + _LAST_READ_S, files]).encode() + b"\n"
    most, cause = max_output + 2 * len(word) + 16, None
    try:
        output, _, cause = _run(program, request, timeout_s, most, folder, start_s=_PULL_S)
    finally:
        if cause is not None or sys.exception():  # the tool was killed, and its container goes on
            subprocess.run([tool, "kill", name], capture_output=True, timeout=60, check=False)
    if not output.startswith(word.encode()):
        problem = "no output" if cause is None else f"it has {cause.replace('_', ' ')}"
        last = output.decode("utf-8", "replace").strip()[-300:] or problem
        raise InputError(f"{tool} cannot run a container of {image}: {last}")
    text = output[len(word) + 1 :].decode("utf-8", "replace")
    text, told, ended = text.rpartition(f"\n{word} ")
    if not told:
        return Result(cause or "out_of_memory", None, ended[:max_output], True)
    if ended.strip() == "memory":
        return Result("out_of_memory", None, text[:max_output], True)
    if ended.strip() == "None":
        return Result("timed_out", None, text[:max_output], True)
    return Result("ended", int(ended), text[:max_output], True)


def _run(
    program: list[str],
    request: bytes,
    timeout_s: float,
    max_output: int,
    folder: str,
    env: Mapping[str, str] | None = None,
    start_s: float = 0.0,
) -> tuple[bytes, list[dict[str, object]], Literal["timed_out", "too_much_output"] | None]:
    """Start the processes, and read until they have ended or are killed.

    Args:
        program: which gets the descriptor of a pipe as its last argument.
        folder: in which it starts; podman leaves files there when memory is used up.
        env: None: the variables of this process.
        start_s: further seconds until its first output, with which `timeout_s` begins.

    Returns:
        their output; the lines that they have told; and why they were killed.
    """
    told, its_end = os.pipe()
    found = {"output": b"", "told": b""}
    cause: Literal["timed_out", "too_much_output"] | None = None
    with (
        os.fdopen(told, "rb", buffering=0) as status,
        subprocess.Popen(
            [*program, str(its_end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=[its_end],
            cwd=folder,
            start_new_session=True,
        ) as process,
        selectors.DefaultSelector() as ready,
    ):
        os.close(its_end)
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.close()
            ready.register(process.stdout, selectors.EVENT_READ, "output")
            ready.register(status, selectors.EVENT_READ, "told")
            ends = time.monotonic() + start_s + timeout_s
            while ready.get_map():
                left = ends - time.monotonic()
                if left <= 0:
                    if cause is not None:
                        break
                    cause, ends = "timed_out", time.monotonic() + _LAST_READ_S
                    _kill(process)
                for key, _ in ready.select(max(left, 0)):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        ready.unregister(key.fileobj)
                    if start_s and key.data == "output":
                        start_s, ends = 0.0, time.monotonic() + timeout_s
                    if key.data == "told" or len(found["output"]) <= max_output:
                        found[key.data] += data
                if len(found["output"]) > max_output and cause is None:
                    cause, ends = "too_much_output", time.monotonic() + _LAST_READ_S
                    _kill(process)
        finally:
            _kill(process)
    return found["output"], [json.loads(line) for line in found["told"].splitlines()], cause


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and its group. The kernel kills the processes of its namespaces then."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@cache
def check_isolation() -> None:
    """Check that code can be run in isolation here. Raises `InputError` as `run_python`."""
    run_python("")


def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: The program. It has no network, and nothing of an earlier call.
    """
    return str(run_python(code))


_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
# The line with the word is printed after the tests have run: code that ends the process while it is
# imported has not passed them.
_TESTS = """
import os
os.unlink("main.py")
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
def run(word):
    import pytest
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "test_solution.py"])
    print(f"\\n{word} {int(code)}", flush=True)
run("WORD")
"""


def pytest_reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Return 1.0 if the code of a response passes the tests in `ground_truth`, else 0.0.

    The code is the last block in ``` of the response, or all of it. The tests are a file of pytest
    that imports it as `solution`. The code runs in the process of the tests: a policy that is
    trained long enough may learn to change them. Look at the samples.

    Raises:
        InputError: pytest is not installed, or the system allows no isolation.
    """
    blocks = _BLOCK.findall(solution_str)
    word = secrets.token_hex(8)
    files = {"solution.py": blocks[-1] if blocks else solution_str}
    files["test_solution.py"] = ground_truth
    result = run_python(
        _TESTS.replace("WORD", word), files=files, timeout_s=30.0, max_output=1 << 20
    )
    if "No module named 'pytest'" in result.output:
        raise InputError("the reward pytest_reward needs pytest; install it: pip install pytest")
    return float(result.output.rstrip().endswith(f"{word} 0"))
