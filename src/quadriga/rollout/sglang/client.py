"""One SGLang over its restarts: requests side by side, weights with their version, pauses, memory.

After a restart SGLang holds the weights of the model folder. The client then sends the weights that
it has kept and sets their version, before the requests without an answer are sent again.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.config.schema import ModelConfig
from quadriga.errors import (
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.models.folder import local_folder
from quadriga.parallel.distributed import gloo_on_loopback
from quadriga.rollout.base import tensor_digest
from quadriga.rollout.sglang.host import Json
from quadriga.rollout.sglang.options import CPU_TOKENS, MEM_FRACTION_STATIC, SGLangOptions
from quadriga.rollout.sglang.transports import (
    Body,
    HostTransport,
    HTTPTransport,
    Transport,
    failed,
)
from quadriga.rollout.sglang.weights import (
    HeldWeight,
    Shapes,
    buckets,
    checked,
    question,
    read_answer,
)

Fault = RolloutDiedError | RolloutTimeoutError
"""What a restart can cure."""

_MOST_THREADS = 64
_READBACK = "quadriga.rollout.sglang.scheduler.answer"
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
_WEIGHTS = ("weights",)
_MEMORY = (*_WEIGHTS, "kv_cache", "cuda_graph")
"""Kinds of device memory, as SGLang names them."""


@dataclass(frozen=True)
class Launch:
    """What is needed to start SGLang, again if it has ended.

    `releasable`: its memory can be released on a GPU.
    """

    model: ModelConfig
    options: SGLangOptions
    device: torch.device
    dtype: torch.dtype
    window: int | None
    releasable: bool = True

    def start(self) -> Transport:
        """Start SGLang, or connect to it, and wait until it is ready.

        Raises:
            RolloutDiedError, RolloutTimeoutError: it did not become ready.
        """
        if self.options.url is not None:
            return HTTPTransport(self.options.url, self.options.api_key)
        folder = Path(tempfile.mkdtemp(prefix="quadriga-sglang-"))
        settings: Json = {"device": self.device.type, "args": self._arguments(folder)}
        python = self.options.python or sys.executable
        host = HostTransport(python, folder, self._variables(folder), settings)
        try:
            host.wait_until_ready(self.options.start_timeout_s)
        except BaseException:
            host.close()
            raise
        return host

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables of an SGLang with this folder for temporary files."""
        original = self.options.log_probs == "temperature_1"
        variables = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1" if original else "0",
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
            "custom_weight_loader": [_READBACK],
            "log_level": self.options.log_level,
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


class Client:
    """See the module.

    Args:
        shapes: the weights of the model.
        at_once: the most requests that run side by side.

    Attributes:
        version: of the weights in SGLang; -1 for those of the folder.
        restarts: how often SGLang was started again.
        held: the weights that SGLang held when it was started, if they can be read back.
        received: the digest of each weight that SGLang has accepted, as it was sent to it last.
        paused: the mode of a pause that a program has asked for; None: there is none.
    """

    def __init__(self, launch: Launch, shapes: Shapes, at_once: int) -> None:
        self._launch = launch
        self._options = launch.options
        self._shapes = shapes
        self._at_once = min(at_once, _MOST_THREADS)
        self._kept: dict[str, Tensor] = {}
        self._unusable = ""
        self._closed = False
        self._released: frozenset[str] = frozenset()  # kinds of device memory
        self._pausing = threading.RLock()
        self.paused: str | None = None
        self.received: dict[str, int] = {}
        self.version = -1
        self.restarts = 0
        self._transport = launch.start()
        self.held: dict[str, HeldWeight] = {}
        try:
            if isinstance(self._transport, HostTransport):
                self.held = self.read_back()
            else:
                self.version = self._adopt_version(self._transport)
        except BaseException:
            self.close()
            raise

    def _adopt_version(self, server: HTTPTransport) -> int:
        """Return the version of the weights in a server that runs already."""
        info = server.call("/model_info", None, self._options.call_timeout_s)
        version = info.get("weight_version") if isinstance(info, dict) else None
        if version == "default":  # the weights of its model folder
            version = "-1"
            self._set_version(version)
        try:
            return int(str(version))
        except ValueError:
            raise failed(
                RolloutError,
                f"the weights of the server at {self._options.url} have the version {version!r}, "
                "which is not a number; start SGLang there, again if it runs",
            ) from None

    # Requests

    def call(self, path: str, body: Body | None = None, payload: bytes = b"") -> Json:
        """Return the answer to a request that generates nothing.

        Raises:
            RolloutError: SGLang refused it, has ended, or did not answer in time.
        """
        transport = self._transport  # another thread may start SGLang again meanwhile
        try:
            answer = transport.call(path, body or {}, self._options.call_timeout_s, payload)
        except (RolloutDiedError, RolloutTimeoutError):
            transport.close()  # one that does not answer now may answer later
            raise
        if isinstance(answer, dict) and answer.get("success") is False:
            problem = f"SGLang did not carry out {path}: {answer.get('message')}"
            raise failed(RolloutError, problem, method=path)
        return answer

    def run(self, bodies: Sequence[Body]) -> list[Json]:
        """Send `/generate` requests side by side and return their answers.

        If SGLang ends or does not answer, it is started again as often as the options allow, and
        the requests without an answer are sent again.

        Raises:
            RolloutError: a request failed and could not be repeated.
        """
        if self._unusable:
            raise failed(RolloutError, self._unusable)
        answers: dict[int, Json] = {}
        while len(answers) < len(bodies):
            waiting = {i: body for i, body in enumerate(bodies) if i not in answers}
            fault = self._ask(waiting, answers)
            if fault is not None:
                self._recover(fault)
        return [answers[i] for i in range(len(bodies))]

    def _ask(self, bodies: Mapping[int, Body], answers: dict[int, Json]) -> Fault | None:
        """Send requests and add their answers. Return the first fault that a restart can cure."""
        transport, limit = self._transport, self._options.generate_timeout_s
        faults: list[Fault] = []

        def ask(i: int) -> None:
            try:
                if not faults:
                    answers[i] = transport.call("/generate", bodies[i], limit)
            except (RolloutDiedError, RolloutTimeoutError) as error:
                faults.append(error)
                transport.close()  # so that the other requests end before their deadlines

        with ThreadPoolExecutor(min(len(bodies), self._at_once)) as pool:
            list(pool.map(ask, bodies))
        return faults[0] if faults else None

    def _recover(self, fault: Fault) -> None:
        """Start SGLang again with the last weights; raise `fault` if this may not be."""
        self._transport.close()
        while self._may_restart():
            self.restarts += 1
            try:
                self._transport = self._launch.start()
                self._released = frozenset()
                if self._kept:
                    self._send(iter(self._kept.items()), self.version)
                if self.held:
                    self._check_restarted()
                if self.paused is not None:
                    self.pause(self.paused)
                return
            except (RolloutDiedError, RolloutTimeoutError) as error:
                self._transport.close()
                fault = error
            except RolloutError as error:
                self._unusable = f"it failed before: {error}"
                self._transport.close()
                raise
        self._unusable = f"it failed before: {fault}"
        raise fault

    def _check_restarted(self) -> None:
        """Compare what a restarted SGLang holds with the weights that it was sent, and with the
        first weights of the folder for the others."""
        expected = {name: weight.digest for name, weight in self.held.items()}
        expected |= {n: tensor_digest(w) for n, w in self._kept.items() if n in expected}
        found = self.read_back()
        wrong = [n for n, d in expected.items() if n not in found or found[n].digest != d]
        if wrong:
            raise failed(
                RolloutOutputError,
                f"after its restart {len(wrong)} of {len(expected)} weights differ from those of "
                f"version {self.version}, {wrong[0]!r} first; no responses are sampled from them. "
                "Start the run again from its last checkpoint",
                fault="weights",
                row=None,
                version=self.version,
            )

    def _may_restart(self) -> bool:
        started_here = isinstance(self._transport, HostTransport)
        return started_here and not self._closed and self.restarts < self._options.restarts

    # Pauses last over weight updates and restarts. Another thread may ask for them.

    def pause(self, mode: str) -> None:
        """Let SGLang generate nothing until `go_on`."""
        with self._pausing:
            self.call("/pause_generation", {"mode": mode})
            self.paused = mode

    def go_on(self) -> None:
        """End the pause."""
        with self._pausing:
            self.paused = None
            self.call("/continue_generation")

    # Weights

    def update(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace weights and set their version; nothing of the old cache is used afterwards.

        Raises:
            ModelError: the model has no weight of that name and shape, or one comes twice.
            RolloutError: SGLang refused them, has ended, or did not answer in time.
        """
        stream = checked(stream, self._shapes, self.dtypes)
        if not self._options.restarts:
            self._send(stream, version)
            self.version = version
            return
        new = {name: weight.clone() for name, weight in stream}
        self._kept |= new
        self.version = version
        try:
            self._send(iter(new.items()), version)
        except (RolloutDiedError, RolloutTimeoutError) as fault:
            self._recover(fault)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each weight that could be read back; the launch's dtype for the others."""
        return {
            name: self.held[name].dtype if name in self.held else self._launch.dtype
            for name in self._shapes
        }

    def _send(self, stream: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._get_back(_WEIGHTS)
        parts = buckets(stream, self._options.bucket_mb << 20)
        part = next(parts, None)  # the first bucket is checked before anything is changed
        sent: dict[str, int] = {}
        with self._pausing:
            self.call("/pause_generation", {"mode": "retract"})
            paused = None if self.paused is None else contextlib.nullcontext()
            with paused or self._at_the_end("/continue_generation"):
                self.call("/begin_weight_update")
                with self._at_the_end("/end_weight_update"):
                    while part is not None:
                        self._load("flattened_bucket", part.payload)
                        sent.update(part.digests)
                        part = next(parts, None)
                self._set_version(str(version))
                self.call("/flush_cache")
        self.received |= sent

    def _set_version(self, version: str) -> None:
        body: Body = {"new_version": version, "abort_all_requests": False}
        self.call("/update_weight_version", body)

    def _load(self, load_format: str, payload: bytes) -> None:
        """Send tensors to SGLang. Its cache is flushed once, after the last bucket."""
        ranks = self._options.tensor_parallel
        body: Body = {"ranks": ranks, "load_format": load_format, "flush_cache": False}
        self.call("/update_weights_from_tensor", body, payload)

    @contextlib.contextmanager
    def _at_the_end(self, path: str) -> Iterator[None]:
        """Call `path` after the block; an error of the block is the one to raise."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RolloutError):
                self.call(path)
            raise
        self.call(path)

    def read_back(self) -> dict[str, HeldWeight]:
        """Return the weights that SGLang holds; those that it cannot locate are missing.

        Raises:
            RolloutError: reading back failed.
        """
        assert isinstance(self._transport, HostTransport), "a server elsewhere is not read"
        self._get_back(_WEIGHTS)
        file = self._transport.folder / "held.json"
        self.call("/begin_weight_update")
        with self._at_the_end("/end_weight_update"):
            self._load(_READBACK, question(self._shapes, file))
        return read_answer(file)

    # Device memory, which the trainer needs meanwhile. Without a GPU nothing is freed.

    def release(self) -> None:
        """Release all memory that is not released."""
        tags: list[Json] = [tag for tag in _MEMORY if tag not in self._released]
        if tags:
            self.call("/release_memory_occupation", {"tags": tags})
            self._released = frozenset(_MEMORY)

    def resume(self) -> None:
        """Get all device memory back. An SGLang that has ended is started again, with all of it."""
        try:
            self._get_back(_MEMORY)
        except (RolloutDiedError, RolloutTimeoutError) as fault:
            self._recover(fault)

    def _get_back(self, tags: Sequence[str]) -> None:
        missing: list[Json] = [tag for tag in tags if tag in self._released]
        if missing:
            self.call("/resume_memory_occupation", {"tags": missing})
            self._released -= frozenset(tags)

    def close(self) -> None:
        """End SGLang if it was started here. Requests of other threads fail."""
        self._closed = True
        self._transport.close()
