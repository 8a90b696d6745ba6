"""Let Megatron-core compute on CPUs, for tests. A user's run never imports this file.

Megatron-core asks for CUDA devices, streams and random states wherever it allocates something.
`install` gives its modules, and no others, a `torch` in which these are the CPU's. torch's own
functions stay as they are, because transformers builds models by them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# A user file with which each process of a run computes so.
USER_FILE = f"""
import sys

sys.path.append({str(Path(__file__).parent)!r})
import megatron_on_cpu

megatron_on_cpu.install()
"""
_FACTORIES = ("zeros", "ones", "tensor", "empty", "full", "arange", "empty_like", "zeros_like")
device = "cpu"  # what Megatron-core computes on where it asks for CUDA
_PACKAGES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "megatron.core.transformer.moe.moe_layer",
)


class _Stream:
    """A stream of a device that computes in order: nothing has to wait."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


class _Cuda(ModuleType):
    """`torch.cuda` for a CPU."""

    Stream = _Stream
    Event = _Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: torch.device(device)
        self.current_stream = self.default_stream = lambda *_: _Stream()
        self.stream = lambda _: nullcontext()
        self.synchronize = lambda *_: None
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Distributed(ModuleType):
    """`torch.distributed` in which ranks gather parts of different sizes, as NCCL does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    @staticmethod
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: ProcessGroup) -> None:
        parts[group.rank()].copy_(own)
        for number, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(group, number), group=group)

    @staticmethod
    def reduce_scatter(own: torch.Tensor, parts: list[torch.Tensor], group: ProcessGroup) -> None:
        for number, part in enumerate(parts):
            summed = part.contiguous().clone()
            dist.reduce(summed, dist.get_global_rank(group, number), group=group)
            if number == group.rank():
                own.copy_(summed)


class _Torch(ModuleType):
    """`torch` with factories that allocate on the CPU where Megatron-core says CUDA."""

    cuda = _Cuda()
    distributed = _Distributed("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in _FACTORIES else found


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: object, **settings: object) -> torch.Tensor:
        if settings.get("device") == "cuda":
            settings["device"] = device
        return factory(*args, **settings)

    return allocate


def install(stands_for_cuda: str = "cpu") -> None:
    """Replace what Megatron-core's modules see of torch. A second call does nothing."""
    global device
    device = stands_for_cuda

    from quadriga.engines.megatron import families

    if families.on_cpu_for_tests:
        return
    for package in _PACKAGES:
        module = importlib.import_module(package)
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{package}.{found.name}")
    replacement = _Torch("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = replacement  # type: ignore[attr-defined]  # a module has any names
    _random_states()
    _tokens_of_experts()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to(device)  # type: ignore[assignment]
    families.on_cpu_for_tests = True


def _random_states() -> None:
    """Let Megatron-core's generators, one for each kind of parallelism, be states of the CPU's."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def _tokens_of_experts() -> None:
    """Let the counts of tokens for each expert be numpy arrays, as they are after a copy."""
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: object, as_numpy: bool = False, **_: object) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved
