"""Keep code of the user within bounds in the process that runs it, and end what it has started."""

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from quadriga.errors import DataError, InputError

_code_runs: ContextVar[bool] = ContextVar("code_runs", default=True)
MAX_DETAIL = 2000  # characters of the description of an error


class _Exit(BaseException):
    """Raised in place of `os._exit` within `contained`."""


@contextmanager
def without_code() -> Iterator[None]:
    """Within the block, checks leave out what would run code that settings name (`code_runs`)."""
    before = _code_runs.set(False)
    try:
        yield
    finally:
        _code_runs.reset(before)


def code_runs() -> bool:
    """Return whether files and programs that settings name may run now."""
    return _code_runs.get()


@contextmanager
def contained() -> Iterator[None]:
    """Within the block, the user's code can neither end this process nor continue it in a copy.

    `os._exit(0)` in a reward function would end the run at once with exit code 0, as if it had
    succeeded: within the block it raises. A function that forks and returns in the child would
    continue the run a second time: the child ends with the block. What it closes of the output is
    opened again.
    """
    owner, really_exit = os.getpid(), os._exit

    def refuse(status: int) -> NoReturn:
        if os.getpid() != owner:
            really_exit(status)
        raise _Exit(f"it called os._exit({status}), which would end the run")

    os._exit = refuse
    try:
        yield
    finally:
        if os.getpid() != owner:
            really_exit(0)
        os._exit = really_exit
        open_output()


def open_output() -> None:
    """Open `sys.stdout` and `sys.stderr` where the process was started without them, or code of the
    user has closed them. Python keeps their file descriptors open; if one is not, its text is lost.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        with contextlib.suppress(ValueError):  # it is closed
            if stream is not None:
                getattr(stream, "writable", bool)()
                continue
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        again = os.fdopen(number, "w", buffering=1, errors="replace", closefd=False)
        vars(sys).update({name: again, f"__{name}__": again})


def leave_closed_terminal() -> None:
    """Let what is printed be lost if the terminal of this process was closed: else it raises."""
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _default_signals() -> None:
    """Let a copy of this process that the user's code has forked end by its signals.

    `multiprocessing.Pool.terminate` sends SIGTERM. Ray's handler would close, in the copy, the
    connections of the driver, which then waits for ever; the handler of a run would end nothing.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        package, _, _ = str(getattr(signal.getsignal(number), "__module__", "")).partition(".")
        if package in ("quadriga", "ray"):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


os.register_at_fork(after_in_child=_default_signals)


class ExitGuard:
    """Gives `os._exit(0)` the exit code of the command, wherever in this process it is called.

    `os._exit` ends a process at once. Called with 0 by an estimator or a thread of the user, it
    would end a run in the middle with the exit code of success. Processes that this one forks end
    as they ask to. Exits that do not pass through `os._exit` are not covered: those of code in C,
    and `os.execv`.

    Attributes:
        code: the exit code of the command; 1 until it has ended.
    """

    def __init__(self) -> None:
        self.code = 1
        self._owner, self._really_exit = os.getpid(), os._exit

    def install(self) -> None:
        """Replace `os._exit`."""
        os._exit = self._exit

    def remove(self) -> None:
        """Restore `os._exit`."""
        os._exit = self._really_exit

    def _exit(self, status: int) -> NoReturn:
        # The system keeps the lowest 8 bits: 256 would become 0.
        if os.getpid() == self._owner and self.code and not status & 0xFF:
            frame = sys._getframe(1)
            where = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            text = (
                f"error: os._exit({status}) in {where}: the exit code is {self.code}, because the"
            )
            os.write(2, f"{text} command has not ended with success\n".encode())
            self._really_exit(self.code)
        self._really_exit(status)


@contextmanager
def reported(error: Callable[[str], Exception], *kept: type[BaseException]) -> Iterator[None]:
    """Contain the code of the user in the block, and raise `error` of what it raises.

    `exit()` is reported, too. Ctrl-C and the errors `kept` pass.
    """
    passed: tuple[type[BaseException], ...] = (KeyboardInterrupt, *kept)
    try:
        with contained():
            yield
    except passed:
        raise
    except BaseException as found:  # the code may raise anything
        raise error(describe(found)) from found


def import_file(
    path: Path, what: str, name: str | None = None, content: bytes | None = None
) -> ModuleType:
    """Import a Python file of the user.

    Args:
        what: what the file is, in error messages: "reward file".
        name: of the module in `sys.modules`; None: it is not there.
        content: what is run in place of what the file has now, on this node.

    Raises:
        DataError: there is no such file.
        InputError: it cannot be imported. Whatever its import raises is an error in the file, also
            an `exit()` at its top level.
    """
    if content is None and not path.is_file():
        raise DataError(f"{what} {path} does not exist", path=str(path))
    spec = importlib.util.spec_from_file_location(name or f"quadriga_file_{path.stem}", path)
    if spec is None:
        raise InputError(f"{what} {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module  # where a dataclass looks for the types of its fields
    try:
        with reported(lambda said: InputError(f"{what} {path} cannot be imported: {said}")):
            code = path.read_bytes() if content is None else content
            exec(compile(code, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        name = None
        raise
    finally:
        if name is None:
            sys.modules.pop(spec.name, None)
            if before is not None:
                sys.modules[spec.name] = before
    return module


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception, which may be one of the user's classes."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the class of the exception is the user's, its `__str__` may raise
        text = "(its message cannot be read)"
    return cut(f"{type(error).__name__}: {text}", MAX_DETAIL)


def cut(text: str, length: int) -> str:
    """Return at most `length` characters of a text, and the length of the whole if it is longer.

    Half a surrogate pair becomes "?": it cannot be written to a file or a terminal.
    """
    if len(text) > length:
        text = f"{text[:length]}… ({len(text)} characters)"
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


ENDS_WITH_PARENT, ADOPTS_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_KILL_S = 5.0  # how long to go on killing processes that start others


def prctl(option: int, value: int) -> None:
    """Set an option of this process (Linux; no effect elsewhere)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def end_all(worker: int) -> None:
    """Kill the worker's process group and all descendants of this process, and collect them."""
    import psutil

    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        # Processes that left the group with `setsid`. One that starts others while it is killed is
        # found again, because this process adopts them.
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def reap(worker: int) -> int | None:
    """Collect all children that have ended; return the status of `worker` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                status = found[1]
    return status


def start_program(module: str, connection: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start a module of the package as a program that gets a file descriptor, whose number is its
    first argument."""
    return subprocess.Popen(
        # -P: files in the working directory are no modules, unless they are for this process.
        [sys.executable, "-P", "-m", module, str(connection), *arguments],
        pass_fds=[connection],
        stdin=subprocess.DEVNULL,
        # What a function prints goes to standard error: standard output is the run's own.
        stdout=sys.__stderr__ if sys.__stderr__ else subprocess.DEVNULL,
        # The processes score in parallel, so more threads in each would compete for the CPUs.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
