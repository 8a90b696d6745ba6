"""Code in a sandbox reaches nothing of the machine; what it does costs its own call alone."""

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from quadriga.agents import sandbox_process
from quadriga.agents.sandbox import check_isolation, pytest_reward, python, run_python
from quadriga.errors import InputError

try:
    check_isolation()
    ISOLATED = True
except InputError:
    ISOLATED = False
isolated = pytest.mark.skipif(not ISOLATED, reason="the system allows no isolation")

# What the code tries → what its output ends with.
STOPPED = {
    "import socket; socket.create_connection(('1.1.1.1', 80), 2)": "Network is unreachable",
    "import socket; socket.create_connection(('127.0.0.1', PORT), 2)": "Network is unreachable",
    "open('/proc/PID/environ').read()": "No such file or directory: '/proc/PID/environ'",
    "open('FOLDER/secret').read()": "No such file or directory: 'FOLDER/secret'",
    "open('/usr/planted', 'w')": "Read-only file system: '/usr/planted'",
    "open('/usr/planted', 'w')  # UNSHARE": "Read-only file system: '/usr/planted'",
    "import sys; open(sys.prefix + '/planted', 'w')": "/planted'",
    "import os\ntry: os.kill(1, 9)\nexcept OSError: pass\nos.kill(PID, 9)": "No such process",
    "x = 'a' * 10**10": "MemoryError",
    "import mmap; mmap.mmap(-1, 10**10)": "Cannot allocate memory",
    "import os, time\nwhile os.fork(): pass\ntime.sleep(60)": "Resource temporarily unavailable",
    "f = open('big', 'w')\nwhile True: f.write('a' * 10**6)": "No space left on device",
}
REMOUNT = """
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x10000000 | 0x20000)  # a user of its own, who may mount
libc.mount(b"none", b"/usr", b"", 0x1000 | 0x20, b"")  # writable again
"""


@isolated
@pytest.mark.parametrize("code", STOPPED)
def test_code_reaches_nothing_of_the_machine(code, tmp_path):
    import socket

    (tmp_path / "secret").write_text("word")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"PORT": server.getsockname()[1], "PID": os.getpid(), "FOLDER": tmp_path}
        filled = [code, STOPPED[code]]
        for name, value in names.items():
            filled = [text.replace(name, str(value)) for text in filled]
        start = REMOUNT if "UNSHARE" in code else ""
        result = run_python(start + filled[0], memory_mb=256, timeout_s=60)
    assert (result.status, result.code, result.isolated) == ("ended", 1, True)
    assert result.output.rstrip().endswith(filled[1])
    assert not Path("/usr/planted").exists()
    assert str(run_python("print(1)", max_output=10)) == "1\n"


ENDED = {
    "while True: pass": "timed_out",
    "import os\nif os.fork(): os._exit(0)\nos.setsid()\nwhile True: pass": "ended",
    "from signal import signal\nfor n in {*range(1, 32)} - {9, 19}: signal(n, print)\n"
    "while True: pass": "timed_out",
    "while True: print('a' * 1000)": "too_much_output",
    "import os, time\nfor i in range(9):\n    if not os.fork(): break\n"
    "x = b'a' * (60 << 20); time.sleep(60)": "out_of_memory",
}


@isolated
@pytest.mark.parametrize("code", ENDED)
def test_code_that_does_not_end_is_killed_with_all_its_processes(code):
    before = {*psutil.Process().children()}
    seconds = 2 if ENDED[code] == "timed_out" else 60
    mark = f"ends_{os.getpid()}"  # the name of its processes
    named = f"import ctypes; ctypes.CDLL(None).prctl(15, {mark.encode()})\n{code}"
    result = run_python(named, timeout_s=seconds, memory_mb=256, max_output=5000)
    assert (result.status, len(result.output) <= 5000) == (ENDED[code], True)
    deadline = time.monotonic() + 10
    while any(p.info["name"] == mark for p in psutil.process_iter(["name"])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {*psutil.Process().children()} <= before


@isolated
def test_environment_files_and_exit_code(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "word")
    seen = run_python("import os; print(sorted(os.environ), os.getpid())")
    assert "SECRET" not in seen.output and "HOME" in seen.output
    code = (
        "import part.one; open('a', 'w').write('b'); print(open('a').read()); raise SystemExit(3)"
    )
    result = run_python(code, files={"part/one.py": ""})
    assert (result.code, str(result)) == (3, "b\n[exit code 3]")
    assert "No such file" in python("open('a')")  # nothing of the call before
    with pytest.raises(InputError, match="relative path"):
        run_python("", files={"../a": ""})


def test_nothing_runs_where_no_isolation_is_available_unless_told_so(tmp_path, monkeypatch):
    before = {*psutil.Process().children()}
    # A program for which `unshare` fails, as in a container.
    program = Path(sandbox_process.__file__).read_text(encoding="utf-8")
    (tmp_path / "program.py").write_text(program.replace("_libc.unshare(", "min(-1, "))
    monkeypatch.setattr(sandbox_process, "__file__", str(tmp_path / "program.py"))
    with pytest.raises(InputError, match=r"the system allows no isolation \(.*unshare: "):
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()
    result = run_python("import os; print(os.getcwd()); 'a' * 10**10", allow_unisolated=True)
    assert result.isolated is False and result.output.rstrip().endswith("MemoryError")
    assert not Path(result.output.splitlines()[0]).exists()
    endless = run_python("while True: pass", timeout_s=1, allow_unisolated=True)
    assert endless.status == "timed_out" and {*psutil.Process().children()} <= before


TESTS = "from solution import add\ndef test_add():\n    assert add(1, 2) == 3\n"
RESPONSES = {
    "I add.\n```python\ndef add(a, b):\n    return a + b\n```\nDone.": 1.0,
    "def add(a, b): return a + b": 1.0,
    "```\ndef add(a, b):\n    return a\n```": 0.0,
    "import os; os._exit(0)": 0.0,
    "raise SystemExit": 0.0,
    "import sys\ndef add(a, b): sys.exit(0)": 0.0,
    "print('0')\n": 0.0,
}


@isolated
@pytest.mark.parametrize("response", RESPONSES)
def test_a_response_that_passes_its_tests_scores_1(response):
    assert pytest_reward("", response, TESTS) == RESPONSES[response]


PODMAN = """#!/bin/sh
pwd >> FOLDER/folder; cd FOLDER; echo "$@" >> calls
[ $1 = run ] || exit 0
while [ $1 != python3 ]; do [ $1 = absent ] && echo "no such image" && exit 125; shift; done
shift; exec PYTHON "$@"
"""


def test_an_image_runs_in_a_container(tmp_path, monkeypatch):
    (tmp_path / "podman").write_text(
        PODMAN.replace("FOLDER", str(tmp_path)).replace("PYTHON", sys.executable)
    )
    (tmp_path / "podman").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code = "from helper import x\nprint(x)\nraise SystemExit(x)"
    result = run_python(code, image="mine", files={"helper.py": "x = 3"}, memory_mb=64)
    assert (result.status, result.code, result.output) == ("ended", 3, "3\n")
    late = run_python("while True: pass", image="mine", timeout_s=0.5)
    assert (late.status, late.code) == ("timed_out", None)
    assert Path((tmp_path / "folder").read_text().split()[0]) != Path.cwd()
    _, run, killed = (tmp_path / "calls").read_text().split("run --rm")
    assert "--network=none" in run and "--memory=64m" in run and "--read-only" in run
    assert re.search(r"--name=(\w+)", killed)[1] == killed.split()[-1]
    with pytest.raises(InputError, match="cannot run a container of absent: no such image"):
        run_python("print(1)", image="absent")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="needs podman or docker"):
        run_python("print(1)", image="mine")
