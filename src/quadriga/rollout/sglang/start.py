"""Start SGLang for a model, or find the one that runs already."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quadriga.config.schema import ModelConfig
from quadriga.errors import RolloutDiedError
from quadriga.models.folder import local_folder
from quadriga.parallel.distributed import gloo_on_loopback
from quadriga.rollout.sglang.options import CPU_TOKENS, MEM_FRACTION_STATIC, SGLangOptions
from quadriga.rollout.sglang.process import HostProcess
from quadriga.rollout.sglang.processes.frames import Json
from quadriga.rollout.sglang.transports import (
    HTTPTransport,
    PipeTransport,
    Transport,
    free_port,
    new_key,
)

_READBACK = "quadriga.rollout.sglang.processes.readback.answer"
_SPARE_TOKENS = 8
"""SGLang keeps some positions of its window for itself, so it is told a longer one."""
_PORTS_TRIED = 3
_CPU: Mapping[str, Json] = {
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": CPU_TOKENS,
}
_GPU: Mapping[str, Json] = {"mem_fraction_static": MEM_FRACTION_STATIC}
_RELEASABLE: Mapping[str, Json] = {
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,  # without it, `release` would lose the weights
}


@dataclass(frozen=True)
class Instance:
    """One SGLang that is ready.

    Attributes:
        host: the processes that were started; None if it ran already.
    """

    transport: Transport
    host: HostProcess | None


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

    def start(self) -> Instance:
        """Start SGLang, or connect to it, and wait until it is ready.

        Raises:
            RolloutDiedError, RolloutTimeoutError: it did not become ready.
        """
        if self.options.url is not None:
            transport = HTTPTransport(self.options.url, self.options.api_key, None)
            transport.wait_until_ready(self.options.start_timeout_s)
            return Instance(transport, None)
        for attempt in range(1, _PORTS_TRIED + 1):
            try:
                return self._start_host()
            except RolloutDiedError as error:
                # Another process can take the port before the server does.
                if "address already in use" not in str(error) or attempt == _PORTS_TRIED:
                    raise
        raise AssertionError("unreachable")

    def _start_host(self) -> Instance:
        host = HostProcess(self.options.python or sys.executable, self._variables)
        try:
            arguments = self._arguments(host.folder)
            transport: Transport
            if self.options.transport == "engine":
                transport = PipeTransport(host)
            else:
                port, key = free_port(), new_key()
                arguments |= {
                    "host": "127.0.0.1",
                    "port": port,
                    "api_key": key,
                    "skip_server_warmup": True,
                }
                transport = HTTPTransport(f"http://127.0.0.1:{port}", key, host)
            settings: dict[str, Any] = {
                "mode": self.options.transport,
                "device": self.device.type,
                "args": arguments,
            }
            host.begin(settings)
            transport.wait_until_ready(self.options.start_timeout_s)
        except BaseException:
            host.close()
            raise
        return Instance(transport, host)

    def _variables(self, folder: Path) -> dict[str, str]:
        """Return the environment variables of an SGLang with this folder for temporary files."""
        variables = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": (
                "1" if self.options.log_probs == "temperature_1" else "0"
            ),
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
            arguments |= {**_GPU, **(_RELEASABLE if self.releasable else {})}
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
