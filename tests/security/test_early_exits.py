"""Code of the user that ends the controller does not look like a run that has succeeded.

Reward functions are in `test_reward_containment.py`.
"""

import subprocess
import sys

import pytest

from processes import run_python
from quadriga.algorithms.user_files import _LOADED, load_user_file
from quadriga.errors import InputError

ENDS = {
    "os._exit": ("import os\nos._exit(0)", 1, "os._exit(0)"),
    "sys.exit": ("import sys\nsys.exit(0)", 1, "sys.exit(0)"),
    # The system keeps the lowest 8 bits of an exit code: 256 becomes 0.
    "os._exit, cut to 0": ("import os\nos._exit(-256)", 1, "os._exit(-256)"),
    "sys.exit, cut to 0": ("import sys\nsys.exit(2**40)", 1, "sys.exit(1099511627776)"),
    "exit with a code": ("raise SystemExit(7)", 7, "sys.exit(7)"),
    "a thread": (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: os._exit(0)).start()\ntime.sleep(60)",
        1,
        "os._exit(0)",
    ),
    "at exit, after a failure": (
        "import atexit, os\natexit.register(os._exit, 0)\natexit.register(lambda: os._exit(0))\n"
        "raise InputError('wrong')",
        2,
        "error: wrong",
    ),
    "in a copy of the process": (
        "import os\npid = os.fork()\nif not pid:\n    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\nraise InputError('the copy ended with 0')",
        2,
        "the copy ended with 0",
    ),
}

PROGRAM = """
import sys
from types import SimpleNamespace
from quadriga.cli.main import main
from quadriga.errors import InputError

def run_training(config):
    code = compile({code!r}, "rules.py", "exec")
    exec(code, globals())

sys.modules["quadriga.trainer.main"] = SimpleNamespace(run_training=run_training)
early = SimpleNamespace(check_early=lambda *_, **__: None)  # the settings have no data
sys.modules["quadriga.trainer.checks.early"] = early
sys.argv = ["quadriga", "train"]
sys.exit(main())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_code_of_the_user_ends_does_not_exit_with_0(name):
    code, status, message = ENDS[name]
    done = run_python("-c", PROGRAM.format(code=code), status=status, timeout=60)
    assert message in done.stderr and "Traceback" not in done.stderr


IMPORTS = {
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "BaseException": "class Any(BaseException): pass\nraise Any",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_that_exits_while_it_is_imported_is_named(name, tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(IMPORTS[name])
    before = dict(_LOADED)
    with pytest.raises(InputError, match="cannot be imported") as caught:
        load_user_file(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert before == _LOADED


@pytest.mark.nightly
def test_a_copy_that_an_import_forks_ends_with_the_import(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text("import os\nos.fork()\n")
    program = (
        "import sys\nfrom quadriga.algorithms.user_files import load_user_file\n"
        "load_user_file(sys.argv[1])\nprint('continued', flush=True)"
    )
    assert run_python("-c", program, file, timeout=60).stdout == "continued\n"


def test_ctrl_c_during_an_import_stops_the_program(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_user_file(file)


def test_a_command_that_imports_the_file_has_code_2(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text("import os\nos._exit(0)\n")
    command = ("-m", "quadriga.cli.main", "algorithms", f"user_files=[{file}]")
    done = run_python(*command, status=2, timeout=60)
    assert done.stderr.startswith("error: ") and "os._exit(0)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_connection_of_the_user_is_not_success():
    # Python raises the same exception for a connection as for standard output without a reader.
    code = "raise BrokenPipeError(32, 'the peer is gone')"
    done = run_python("-c", PROGRAM.format(code=code), status=1, timeout=60)
    assert "the peer is gone" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "status"), [("", 1), (", '--print-config'", 0)])
def test_a_run_that_loses_the_reader_of_its_output_is_not_success(options, status):
    code = "while True:\n    print('step', flush=True)"
    program = PROGRAM.format(code=code).replace('"train"', f'"train"{options}')
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert ("standard output" in errors) == bool(status)


WRAPS = "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)"
CLOSES = {
    "closed": "import sys\nsys.stdout.close()",
    "both": "import sys\nsys.stdout.close()\nsys.stderr.close()",
    "detached": "import sys\nsys.stdout.detach()",
    "wrapped twice": f"{WRAPS}\n{WRAPS}",  # the first wrapper closes the buffer of the second
}


@pytest.mark.parametrize("name", CLOSES)
def test_a_file_that_closes_standard_output_ends_no_run(name, tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(CLOSES[name])
    code = f"""
from quadriga.algorithms.user_files import load_user_file
load_user_file({str(file)!r})
print("after the import")
print("a warning", file=sys.stderr)
exec({CLOSES[name]!r})
from quadriga.observability.console import RunConsole
RunConsole(1).log(1, {{}})
exec({CLOSES[name]!r})
"""
    done = run_python("-c", PROGRAM.format(code=code), status=0, timeout=60)
    assert (done.stdout, done.stderr) == ("after the import\ntrain 1/1  left 0s\n", "a warning\n")


def test_a_command_without_standard_output_ends_as_with_it():
    command = [sys.executable, "-m", "quadriga.cli.main", "algorithms"]
    program = "import os, subprocess, sys\nos.close(1)\nsys.exit(subprocess.call(sys.argv[1:]))"
    assert run_python("-c", program, *command, timeout=60).stderr == ""
