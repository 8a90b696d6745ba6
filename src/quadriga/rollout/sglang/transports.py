"""Start SGLang in a host below a guard, and how requests reach it: frames over its pipe, or HTTP.

Both transports take the paths and bodies of SGLang's HTTP server. Any thread may call; calls run
side by side.
"""

from __future__ import annotations

import base64
import http.client
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from quadriga.errors import RolloutDiedError, RolloutError, RolloutTimeoutError, printable
from quadriga.parallel.distributed import rank
from quadriga.rollout.sglang.host import Json, read_frame, write_frame

Body = Mapping[str, Json]

_READ = 1 << 20
_READER_S = 10.0  # for the thread that reads answers to see the end of the pipe
_MAX_DETAIL = 2000
NAME = "sglang"
ErrorT = TypeVar("ErrorT", bound=RolloutError)
_GUARD = Path(__file__).with_name("guard.py")
_HOST = "quadriga.rollout.sglang.host"
_LOG_LINES = 12
_LOG_BYTES = 1 << 16
_LINE_LENGTH = 300
_START_S = 60.0  # until the host reads; SGLang is not imported yet
_log = logging.getLogger("quadriga")
_END_S = 10.0  # SIGKILL ends the processes at once, unless the system is very slow

_OF_THE_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that describe the process group of the training, which SGLang must not join."""


class HostProcess:
    """The processes of one SGLang, from start to end.

    The host waits until `begin` is called.

    Args:
        python: the interpreter that has SGLang.
        variables: returns environment variables of the host, beside those of this process, for its
            folder.

    Attributes:
        folder: temporary files of the processes and their log; removed by `close`.
        stdin, stdout: file descriptors of the host's standard input and output.
    """

    def __init__(self, python: str, variables: Callable[[Path], Mapping[str, str]]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quadriga-sglang-"))
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_RANK}
        environment |= {"TMPDIR": str(self.folder), **variables(self.folder)}
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(self.folder), python, "-m", _HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        # Closes the pipes and ends the processes also if `close` is never called.
        self.close = weakref.finalize(self, _end, self._process, self.folder)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)

    def begin(self, settings: Json) -> None:
        """Let the host start SGLang; see `host` for the settings."""
        try:
            write_frame(self.stdin, settings, b"", time.monotonic() + _START_S)
        except OSError as error:  # TimeoutError is one
            raise self.died("it was starting") from error

    @property
    def pid(self) -> int:
        """The process id of the guard, and the id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the processes run."""
        return self._process.poll() is None

    def died(self, what: str) -> RolloutDiedError:
        """Return the error for processes that have ended: what was being done, and the log."""
        return failed(
            RolloutDiedError,
            f"its process ended while {what}; {self.log()}. Correct the cause, or set "
            "rollout.options.restarts to start it again",
        )

    def log(self) -> str:
        """Return the last lines of the log in one line of text."""
        try:
            with open(self.folder / "log", "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return "its log is gone"
        lines = [line.strip()[:_LINE_LENGTH] for line in printable(text).splitlines()]
        lines = [line for line in lines if line][-_LOG_LINES:]
        return f"the last lines of its log: {' | '.join(lines)}" if lines else "its log is empty"


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        if process.poll() is None:
            process.terminate()  # the guard ends the group, and removes its shared memory
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _log.warning("process %s of SGLang does not end, although it was killed", process.pid)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Answers:
    """The requests that wait for an answer, by number. Number 0 waits for the start."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Json]] = {0: Future()}
        self._next = 1
        self._lock = threading.Lock()
        self.ended = False

    def expect(self) -> tuple[int, Future[Json]]:
        """Return the number of a new request, and the future of its answer."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            future = self._futures[number] = Future()
            if self.ended:
                future.set_exception(BrokenPipeError("the host has closed its pipe"))
        return number, future

    def start(self) -> Future[Json]:
        """Return the future that is done when SGLang is ready."""
        return self._futures[0]

    def forget(self, number: int) -> None:
        """Ignore an answer that comes later."""
        with self._lock:
            self._futures.pop(number, None)

    def read_all(self, fd: int) -> None:
        """Read answers until the pipe is closed, then fail the requests without one."""
        fault: Exception = BrokenPipeError("the host has closed its pipe")
        try:
            while (frame := read_frame(fd)) is not None:
                self._resolve(frame[0])
        except (OSError, ValueError, TypeError, KeyError) as error:
            fault = failed(RolloutError, f"unreadable answer: {error!r}")
        finally:
            os.close(fd)
        with self._lock:
            self.ended = True
            waiting = list(self._futures.values())
        for future in waiting:
            if not future.done():
                future.set_exception(fault)

    def _resolve(self, message: Json) -> None:
        if not isinstance(message, dict) or not isinstance(message["id"], int):
            raise TypeError("expected a JSON object with an id")
        with self._lock:
            future = self._futures.get(message["id"])
        if future is None:  # its caller has stopped waiting
            return
        if message["status"] == 200:
            future.set_result(message["body"])
        else:
            future.set_exception(refused("a request", message["body"]))


class PipeTransport:
    """Frames over the pipe of a host. One thread reads the answers.

    The thread refers neither to this object nor to the host, so the processes end when nothing
    refers to this object any more.
    """

    def __init__(self, host: HostProcess) -> None:
        self.host = host
        self._writing = threading.Lock()
        self._answers = _Answers()
        # The thread closes its own descriptor: the number of one that was closed elsewhere could
        # soon be that of another file.
        self._reader = threading.Thread(
            target=self._answers.read_all,
            args=(os.dup(host.stdout),),
            daemon=True,
            name="sglang answers",
        )
        self._reader.start()

    def call(self, path: str, body: Body, timeout_s: float, payload: bytes = b"") -> Json:
        """Return the answer to one request.

        Args:
            path: of SGLang's HTTP server.
            payload: serialized weights, for `/update_weights_from_tensor`.

        Raises:
            RolloutError: SGLang refused the request, or answered something else than JSON.
            RolloutDiedError: SGLang has ended or cannot be reached.
            RolloutTimeoutError: no answer arrived in time.
        """
        if not self.host.alive:  # its descriptors may be closed, and belong to other files
            raise self.host.died(f"it was to be sent {path}")
        deadline = time.monotonic() + timeout_s
        number, future = self._answers.expect()
        try:
            message: Json = {"id": number, "path": path, "body": dict(body)}
            if not self._writing.acquire(timeout=timeout_s):
                raise TimeoutError("an earlier request is still being written")
            try:
                write_frame(self.host.stdin, message, payload, deadline)
            finally:
                self._writing.release()
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise late(path, timeout_s, self.host.log()) from error
        except OSError as error:
            raise self.host.died(f"it was sent {path}") from error
        finally:
            self._answers.forget(number)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until SGLang has loaded the model. It raises as `call`."""
        try:
            self._answers.start().result(timeout_s)
        except TimeoutError as error:
            raise late("start", timeout_s, self.host.log()) from error
        except OSError as error:
            raise self.host.died("it was starting") from error

    def close(self) -> None:
        """End the host."""
        self.host.close()
        self._reader.join(_READER_S)


class HTTPTransport:
    """One connection per request to an HTTP server of SGLang that runs already.

    Args:
        url: "http://host:port".
        key: sent with each request as a bearer token.
    """

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(self, path: str, body: Body, timeout_s: float, payload: bytes = b"") -> Json:
        """See `PipeTransport.call`."""
        content = dict(body)
        if payload:
            count = content.pop("ranks")
            assert isinstance(count, int)
            content["serialized_named_tensors"] = [base64.b64encode(payload).decode()] * count
        status, text = self._request("POST", path, json.dumps(content), timeout_s)
        answer: Json
        try:
            answer = json.loads(text) if text else None
        except ValueError:
            answer = text.decode(errors="replace")
        if status != 200:
            raise refused(path, answer if answer else f"status {status}")
        return answer

    def wait_until_ready(self, timeout_s: float) -> None:
        """Look whether the server answers, with this key."""
        self.get("/model_info", timeout_s)

    def get(self, path: str, timeout_s: float) -> Json:
        """Return the answer to a request without a body. It raises as `call`."""
        status, text = self._request("GET", path, "", timeout_s)
        if status != 200:
            hint = "is rollout.options.api_key the right key?"
            raise refused(path, f"status {status}; {hint}")
        try:
            answer: Json = json.loads(text)
        except ValueError:
            start = text[:80].decode(errors="replace")
            raise refused(
                path, f"{start!r}, which is not JSON; is there an SGLang server at this address?"
            ) from None
        return answer

    def close(self) -> None:
        """Do nothing: the server was not started here."""

    def _request(self, method: str, path: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        deadline = time.monotonic() + timeout_s
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            connection.request(method, path, body.encode() or None, self._headers)
            response = connection.getresponse()
            parts = []
            while part := response.read(_READ):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError
            if response.length:  # `read(n)` ends without an error if the connection does
                raise http.client.IncompleteRead(b"".join(parts), response.length)
            return response.status, b"".join(parts)
        except TimeoutError as error:
            raise late(path, timeout_s, "its log is on its own machine") from error
        except (OSError, http.client.HTTPException) as error:
            raise failed(
                RolloutDiedError,
                f"the server at {self._address[0]}:{self._address[1]} cannot be reached for "
                f"{path}: {error}; start it, or correct rollout.options.url",
            ) from error
        finally:
            connection.close()


Transport = PipeTransport | HTTPTransport
"""Sends requests to one SGLang."""


def late(path: str, timeout_s: float, log: str) -> RolloutTimeoutError:
    """Return the error for an answer that did not arrive in time."""
    setting = {"start": "start_timeout_s", "/generate": "generate_timeout_s"}
    return failed(
        RolloutTimeoutError,
        f"no answer to {path} within {timeout_s:g} s; {log}. If it is slow and not stuck, raise "
        f"rollout.options.{setting.get(path, 'call_timeout_s')}; rollout.options.restarts starts "
        "it again",
        method=path,
        deadline=timeout_s,
    )


def refused(path: str, answer: Json) -> RolloutError:
    """Return the error for a request that SGLang did not carry out."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return failed(RolloutError, f"SGLang refused {path}: {text[:_MAX_DETAIL]}", method=path)


def failed(kind: type[ErrorT], problem: str, **details: object) -> ErrorT:
    """Return an error of the engine on this rank."""
    place = {"engine": NAME, "rank": rank()}
    return kind(f"rollout engine {NAME!r} of rank {rank()}: {problem}", **place, **details)
