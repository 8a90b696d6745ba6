"""What vLLM changes in the process is undone outside its calls.

vLLM is written for a process of its own. In the process of a rank the training engine runs too, so
each call of vLLM is made within `Isolation.inside()`:

    what                        inside                          outside
    environment variables       those of `VARIABLES`, and       as before
                                what vLLM set itself
    torch.set_num_threads,      vLLM's replacements, which      torch's
    torch.accelerator.*         do nothing (on a CPU)
    random states, threads      vLLM seeds them                 as before
    frozen garbage collection   vLLM freezes what it made       not frozen
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

VARIABLES: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `requests` sets the sampler of the first model runner
    # One token more than the window is requested, because `score` has to generate a token.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment variables that vLLM reads. A log level that the user has set is kept."""

_REPLACED: tuple[tuple[object, str], ...] = (
    (torch, "set_num_threads"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
)

Replacements = tuple[Callable[..., object], ...]


@dataclass(frozen=True)
class _Outside:
    """The state of the process that the rest of the program relies on."""

    environment: dict[str, str]
    replaced: Replacements
    threads: int
    python_random: tuple[object, ...]
    numpy_random: dict[str, object]
    torch_random: torch.Tensor
    cuda_random: torch.Tensor | None
    frozen: int

    @classmethod
    def read(cls) -> _Outside:
        return cls(
            environment=dict(os.environ),
            replaced=_replaced(),
            threads=torch.get_num_threads(),
            python_random=random.getstate(),
            numpy_random=dict(np.random.get_state(legacy=False)),
            torch_random=torch.get_rng_state(),
            cuda_random=_cuda_random(),
            frozen=gc.get_freeze_count(),
        )

    def restore(self) -> None:
        _set_environment(self.environment)
        _replace(self.replaced)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        random.setstate(self.python_random)
        np.random.set_state(self.numpy_random)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random)
        if gc.get_freeze_count() > self.frozen:
            gc.unfreeze()


class Isolation:
    """Remembers what vLLM changed, from one call to the next."""

    def __init__(self) -> None:
        own = {k: v for k, v in VARIABLES.items() if k != "VLLM_LOGGING_LEVEL"}
        level = os.environ.get("VLLM_LOGGING_LEVEL", VARIABLES["VLLM_LOGGING_LEVEL"])
        self._variables: dict[str, str | None] = {**own, "VLLM_LOGGING_LEVEL": level}
        self._replaced: Replacements | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within the block, vLLM's changes are in effect; afterwards they are undone."""
        outside = _Outside.read()
        _set_environment({**outside.environment, **self._variables})
        if self._replaced is not None:
            _replace(self._replaced)
        try:
            with warnings.catch_warnings():
                # vLLM looks at every attribute of torch, the deprecated ones included.
                warnings.simplefilter("ignore", FutureWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                yield
        finally:
            self._replaced = _replaced()
            self._variables = _difference(outside.environment, os.environ)
            outside.restore()


def _cuda_random() -> torch.Tensor | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_rng_state()


def _replaced() -> Replacements:
    return tuple(getattr(owner, name) for owner, name in _REPLACED)


def _replace(functions: Replacements) -> None:
    for (owner, name), function in zip(_REPLACED, functions, strict=True):
        setattr(owner, name, function)


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that differ, with their value in `after`; None if it has none."""
    names = before.keys() | after.keys()
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _set_environment(variables: Mapping[str, str | None]) -> None:
    """Make `os.environ` equal to `variables`. Only the variables that differ are written."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    for name, value in _difference(os.environ, wanted).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
