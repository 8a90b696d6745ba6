"""How a request reaches SGLang: frames over the pipe of a host, or HTTP.

Both take the paths and bodies of SGLang's HTTP server. Any thread may call; calls run side by side.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol
from urllib.parse import urlsplit

from quadriga.errors import RolloutDiedError, RolloutError, RolloutTimeoutError
from quadriga.parallel.distributed import rank
from quadriga.rollout.sglang.process import NAME, HostProcess
from quadriga.rollout.sglang.processes.frames import Json, read_frame, write_frame

Body = Mapping[str, Json]

_READ = 1 << 20
_READER_S = 10.0  # for the thread that reads answers to see the end of the pipe
_MAX_DETAIL = 2000


class Transport(Protocol):
    """Sends requests to one SGLang."""

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
        ...

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until SGLang has loaded the model.

        Raises:
            RolloutDiedError, RolloutTimeoutError: as `call`.
        """
        ...

    def get(self, path: str, timeout_s: float) -> Json:
        """Return the answer to a request without a body. It raises as `call`."""
        ...

    def close(self) -> None:
        """End what was started for this transport."""
        ...


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
            fault = RolloutError(
                f"rollout engine {NAME!r}: unreadable answer: {error!r}", engine=NAME
            )
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
    """Frames over the pipe of a host whose mode is "engine". One thread reads the answers.

    The thread refers neither to this object nor to the host, so the processes end when nothing
    refers to this object any more.
    """

    def __init__(self, host: HostProcess) -> None:
        self._host = host
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
        if not self._host.alive:  # its descriptors may be closed, and belong to other files
            raise self._host.died(f"it was to be sent {path}")
        deadline = time.monotonic() + timeout_s
        number, future = self._answers.expect()
        try:
            message: Json = {"id": number, "path": path, "body": dict(body)}
            if not self._writing.acquire(timeout=timeout_s):
                raise TimeoutError("an earlier request is still being written")
            try:
                write_frame(self._host.stdin, message, payload, deadline)
            finally:
                self._writing.release()
            return future.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, FutureTimeoutError) as error:
            raise late(path, timeout_s, self._host.log()) from error
        except OSError as error:
            raise self._host.died(f"it was sent {path}") from error
        finally:
            self._answers.forget(number)

    def wait_until_ready(self, timeout_s: float) -> None:
        try:
            self._answers.start().result(timeout_s)
        except (TimeoutError, FutureTimeoutError) as error:
            raise late("start", timeout_s, self._host.log()) from error
        except OSError as error:
            raise self._host.died("it was starting") from error

    def get(self, path: str, timeout_s: float) -> Json:
        return self.call(path, {}, timeout_s)

    def close(self) -> None:
        self._host.close()
        self._reader.join(_READER_S)


class HTTPTransport:
    """One connection per request to SGLang's HTTP server.

    Args:
        url: "http://host:port".
        key: sent with each request as a bearer token.
        host: the process of the server if it was started here.
    """

    def __init__(self, url: str, key: str | None, host: HostProcess | None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._host = host

    def call(self, path: str, body: Body, timeout_s: float, payload: bytes = b"") -> Json:
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
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise late("start", timeout_s, self._log())
            try:
                status, _ = self._request("GET", "/model_info", "", left)
            except RolloutDiedError:
                # Nothing listens yet. If the process has ended, nothing will.
                if self._host is None or not self._host.alive:
                    raise
                time.sleep(0.2)
                continue
            if status == 200:
                return
            raise refused(
                "/model_info", f"status {status}; is rollout.options.api_key the right key?"
            )

    def get(self, path: str, timeout_s: float) -> Json:
        status, text = self._request("GET", path, "", timeout_s)
        if status != 200:
            raise refused(path, f"status {status}")
        try:
            answer: Json = json.loads(text)
        except ValueError:
            start = text[:80].decode(errors="replace")
            raise refused(
                path, f"{start!r}, which is not JSON; is there an SGLang server at this address?"
            ) from None
        return answer

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

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
            raise late(path, timeout_s, self._log()) from error
        except (OSError, http.client.HTTPException) as error:
            if self._host is not None:
                raise self._host.died(f"it was sent {path}") from error
            raise RolloutDiedError(
                f"rollout engine {NAME!r} of rank {rank()}: the server at "
                f"{self._address[0]}:{self._address[1]} cannot be reached for {path}: {error}; "
                "start it, or correct rollout.options.url",
                engine=NAME,
                rank=rank(),
            ) from error
        finally:
            connection.close()

    def _log(self) -> str:
        return self._host.log() if self._host is not None else "its log is on its own machine"


def late(path: str, timeout_s: float, log: str) -> RolloutTimeoutError:
    """Return the error for an answer that did not arrive in time."""
    setting = {"start": "start_timeout_s", "/generate": "generate_timeout_s"}
    return RolloutTimeoutError(
        f"rollout engine {NAME!r} of rank {rank()}: no answer to {path} within {timeout_s:g} s; "
        f"{log}. If it is slow and not stuck, raise rollout.options."
        f"{setting.get(path, 'call_timeout_s')}; rollout.options.restarts starts it again",
        engine=NAME,
        rank=rank(),
        method=path,
        deadline=timeout_s,
    )


def refused(path: str, answer: Json) -> RolloutError:
    """Return the error for a request that SGLang did not carry out."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return RolloutError(
        f"rollout engine {NAME!r} of rank {rank()}: SGLang refused {path}: {text[:_MAX_DETAIL]}",
        engine=NAME,
        rank=rank(),
        method=path,
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing uses now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def new_key() -> str:
    """Return a key that cannot be guessed."""
    return base64.urlsafe_b64encode(os.urandom(32)).decode()
