"""Start SGLang, and send requests to it.

Requests are messages to a host process that is started here, or HTTP to a server. Both take the
paths and bodies of SGLang's HTTP server. Any thread may call; calls run side by side.
"""

import base64
import contextlib
import fcntl
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from quadriga.config.schema import ModelConfig
from quadriga.errors import (
    ConfigError,
    RolloutDiedError,
    RolloutError,
    RolloutTimeoutError,
    printable,
)
from quadriga.models.folder import local_folder
from quadriga.parallel.distributed import gloo_on_loopback, rank
from quadriga.rollout.sglang.host import Json, end_group, remove
from quadriga.rollout.sglang.options import CPU_TOKENS, MEM_FRACTION_STATIC, SGLangOptions
from quadriga.rollout.sglang.weights import READBACK

NAME = "sglang"
Body = Mapping[str, Json]
ErrorT = TypeVar("ErrorT", bound=RolloutError)

_PREFIX = "quadriga-sglang-"
_HOST = "quadriga.rollout.sglang.host"
_MAX_DETAIL = 2000
_CAUSE = re.compile(r"[\w.]+(Error|Exception)(:|$)")
"""The last line of a traceback, behind which SGLang still writes."""
_LOG_LINES, _LOG_BYTES, _LINE_LENGTH = 12, 1 << 16, 300
_END_S = 10.0  # SIGKILL ends the processes at once, unless the system is very slow
_OF_THE_RANK = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
)
"""Variables that describe the process group of the training, which SGLang must not join."""
_SPARE_TOKENS = 8
"""SGLang keeps some positions of its window for itself, so it is told a longer one."""
_CPU: Mapping[str, Json] = {
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": CPU_TOKENS,
}
_RELEASABLE: Mapping[str, Json] = {
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,  # without it, `release` would lose the weights
}

_Outbox = SimpleQueue[tuple[bytes, bytes] | None]


class HostTransport:
    """The processes of one SGLang, from start to end, and messages to its host.

    Two threads write requests and read answers. They do not refer to this object, so the processes
    end when nothing refers to it any more.

    Args:
        python: the interpreter that has SGLang.
        folder: for temporary files of the processes, and their log; removed by `close`.
        variables: environment variables of the host, beside those of this process.
        settings: the first message; see `host`.
    """

    def __init__(
        self, python: str, folder: Path, variables: Mapping[str, str], settings: Json
    ) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_RANK}
        environment |= {"TMPDIR": str(folder), **variables}
        ours, theirs = Pipe()
        with theirs, open(folder / "log.new", "wb") as log:
            # All processes below inherit the lock, so it is free when the last of them has ended.
            fcntl.flock(log, fcntl.LOCK_EX)
            (folder / "log.new").rename(folder / "log")
            self._process = subprocess.Popen(
                [python, "-P", "-m", _HOST, str(theirs.fileno()), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._numbers, self._answers = itertools.count(1), _Answers()
        self._outbox: _Outbox = SimpleQueue()
        # Ends the processes also if `close` is never called.
        self.close = weakref.finalize(self, _end, self._process, self._outbox, folder)
        for target in (partial(_write_all, self._outbox), self._answers.read_all):
            threading.Thread(target=target, args=(ours,), daemon=True).start()
        ours.send_bytes(json.dumps(settings).encode())

    def call(self, path: str, body: Body, timeout_s: float, payload: bytes = b"") -> Json:
        """Return the answer to one request.

        Args:
            path: of SGLang's HTTP server.
            payload: serialized weights, for `/update_weights_from_tensor`.

        Raises:
            RolloutError: SGLang refused the request.
            RolloutDiedError: SGLang has ended or cannot be reached.
            RolloutTimeoutError: no answer arrived in time.
        """
        number = next(self._numbers)
        future = self._answers.expect(number)
        message = json.dumps({"id": number, "path": path, "body": dict(body)})
        self._outbox.put((message.encode(), payload))
        answer = self._wait(path, number, future, timeout_s)
        if answer["status"] != 200:
            raise refused(path, answer["body"])
        found: Json = answer["body"]
        return found

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until SGLang has loaded the model. It raises as `call`."""
        self._wait("start", 0, self._answers.expect(0), timeout_s)

    def _wait(self, path: str, number: int, future: Future[Any], timeout_s: float) -> Any:
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise late(path, timeout_s, self._log()) from error
        except EOFError as error:
            problem = f"its process ended before it answered {path}; {self._log()}"
            raise failed(RolloutDiedError, f"{problem}. Correct the cause and resume") from error
        finally:
            self._answers.futures.pop(number, None)

    def _log(self) -> str:
        """Return the last lines of the log in one line of text."""
        try:
            text = (self.folder / "log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        except OSError:
            return "its log is gone"
        lines = [line.strip()[:_LINE_LENGTH] for line in printable(text).splitlines()]
        lines = [line for line in lines if line]
        cause = next((f"{line}; " for line in reversed(lines) if _CAUSE.match(line)), "")
        last = f"{cause}the last lines of its log: {' | '.join(lines[-_LOG_LINES:])}"
        return last if lines else "its log is empty"


class _Answers:
    """The futures of the requests without an answer, by number. Number 0 waits for the start."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.expect(0)

    def expect(self, number: int) -> Future[Any]:
        """Return the future of an answer."""
        with self._lock:
            future = self.futures.setdefault(number, Future())
            if self._ended and not future.done():
                future.set_exception(EOFError())
        return future

    def read_all(self, host: Connection) -> None:
        """Read answers until the host closes its end, then fail the requests without one."""
        with host, contextlib.suppress(EOFError, OSError):
            while True:
                message = json.loads(host.recv_bytes())
                future = self.futures.get(message["id"])
                if future is not None:  # its caller still waits
                    future.set_result(message)
        with self._lock:
            self._ended = True
            for future in list(self.futures.values()):
                if not future.done():
                    future.set_exception(EOFError())


def _write_all(outbox: _Outbox, host: Connection) -> None:
    with contextlib.suppress(OSError):  # the host has ended, which `read_all` sees
        while (request := outbox.get()) is not None:
            for part in request:
                host.send_bytes(part)


def _end(process: subprocess.Popen[bytes], outbox: _Outbox, folder: Path) -> None:
    outbox.put(None)
    end_group(process.pid, str(folder))
    process.wait(_END_S)
    remove(str(folder))  # again: a process could still write files before its end


def remove_leftovers() -> None:
    """Remove what an SGLang of this user has left whose processes and rank were all killed."""
    for log in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/log"):
        with contextlib.suppress(OSError), open(log, "rb") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(str(log.parent))


class HTTPTransport:
    """An HTTP server of SGLang that runs already.

    Args:
        url: "http://host:port".
        key: sent with each request as a bearer token.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, path: str, body: Body | None, timeout_s: float, payload: bytes = b"") -> Json:
        """See `HostTransport.call`. None as the body is a GET request."""
        content = None if body is None else dict(body)
        if content is not None and payload:
            count = content.pop("ranks")
            assert isinstance(count, int)
            content["serialized_named_tensors"] = [base64.b64encode(payload).decode()] * count
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            hint = "; is rollout.options.api_key the right key?" if error.code == 401 else ""
            answer = error.read().decode(errors="replace")
            raise refused(path, f"status {error.code}{hint} {answer}") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise late(path, timeout_s, "its log is on its own machine") from error
            raise failed(
                RolloutDiedError,
                f"the server at {self._url} cannot be reached for {path}: {error}; start it, or "
                "correct rollout.options.url",
            ) from error
        try:
            found: Json = json.loads(text) if text else None
        except ValueError:
            found = text.decode(errors="replace")
        return found

    def weight_version(self, timeout_s: float) -> int:
        """Return the version of the weights that the server has."""
        info = self.call("/model_info", None, timeout_s)
        version = info.get("weight_version") if isinstance(info, dict) else None
        try:
            return int(str(version))
        except ValueError:
            raise failed(
                RolloutError,
                f"the weights of the server at {self._url} have the version {version!r}, which is "
                "not a number; start it with --weight-version=-1",
            ) from None

    def close(self) -> None:
        """Do nothing: the server was not started here."""


Transport = HostTransport | HTTPTransport
"""Sends requests to one SGLang."""


def late(path: str, timeout_s: float, log: str) -> RolloutTimeoutError:
    """Return the error for an answer that did not arrive in time."""
    setting = {"start": "start_timeout_s", "/generate": "generate_timeout_s"}
    return failed(
        RolloutTimeoutError,
        f"no answer to {path} within {timeout_s:g} s; {log}. If it is slow and not stuck, raise "
        f"rollout.options.{setting.get(path, 'call_timeout_s')}",
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


@dataclass(frozen=True)
class Launch:
    """What is needed to start SGLang.

    Attributes:
        releasable: its memory can be released on a GPU.
        routes: it is to say which experts compute each token.
    """

    model: ModelConfig
    options: SGLangOptions
    device: torch.device
    dtype: torch.dtype
    window: int | None
    releasable: bool = True
    routes: bool = False

    def start(self) -> Transport:
        """Start SGLang, or connect to it, and wait until it is ready.

        Raises:
            ConfigError: this process does not see `tensor_parallel` devices.
            RolloutDiedError, RolloutTimeoutError: it did not become ready.
        """
        if self.options.url is not None:
            return HTTPTransport(self.options.url, self.options.api_key)
        if self.device.type == "cuda":
            self._check_devices(torch.cuda.device_count())
        remove_leftovers()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        host = None
        try:
            settings: Json = {"device": self.device.type, "args": self._arguments(folder)}
            python = self.options.python or sys.executable
            host = HostTransport(python, folder, self._variables(folder), settings)
            host.wait_until_ready(self.options.start_timeout_s)
        except BaseException:
            remove(str(folder)) if host is None else host.close()
            raise
        return host

    def _check_devices(self, visible: int) -> None:
        """Check that SGLang, which has the devices of this process, has enough of them."""
        first, parts = self.device.index or 0, self.options.tensor_parallel
        if first + parts > visible:
            key = "actor_rollout_ref.rollout.options.tensor_parallel"
            raise ConfigError(
                f"{key}={parts} needs the devices {first} to {first + parts - 1}, and this process "
                f"sees {visible} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}); "
                "Ray shows each rank its own device only. Start the server by hand and name it in "
                "rollout.options.url, use rollout.name=vllm, or set tensor_parallel=1",
                key=key,
            )

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables of an SGLang with this folder for temporary files."""
        variables = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        }
        if not {"nnodes", "dist_init_addr"} & self.options.server_args.keys():
            # Otherwise the store of the schedulers' process group, and gloo, listen on all
            # addresses of the machine.
            variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/process_group"
            variables |= gloo_on_loopback()
        if self.device.type == "cpu":
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            variables["TORCH_COMPILE_DISABLE"] = "1"  # compiling needs a compiler for C++
        return variables

    def _arguments(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of SGLang's `ServerArgs`."""
        arguments: dict[str, Any] = {
            "model_path": str(_without_end_tokens(local_folder(self.model.path), folder / "model")),
            "json_model_override_args": json.dumps({"eos_token_id": None}),
            "trust_remote_code": self.model.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "tp_size": self.options.tensor_parallel,
            "base_gpu_id": self.device.index or 0,
            "skip_tokenizer_init": True,
            "sampling_backend": "pytorch",
            "enable_deterministic_inference": self.options.seeds,
            "weight_version": "-1",
            "custom_weight_loader": [READBACK],
            "log_level": "error",
            "enable_return_routed_experts": self.routes,
        }
        if self.window is not None:
            arguments["context_length"] = self.window + _SPARE_TOKENS
        if self.device.type == "cpu":
            arguments |= _CPU
        else:
            arguments["mem_fraction_static"] = MEM_FRACTION_STATIC
            arguments |= _RELEASABLE if self.releasable else {}
        return arguments | dict(self.options.server_args)


def _without_end_tokens(folder: Path, view: Path) -> Path:
    """Make a folder of links to the files of a model, but to generation_config.json.

    SGLang ends a response with the end tokens that config.json and generation_config.json name, and
    no request can change that. Here `SamplingParams` alone says which tokens end a response.
    """
    view.mkdir()
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (view / path.name).symlink_to(path.resolve())
    return view
