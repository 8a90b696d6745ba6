"""Profilers of ranks: Nsight Systems around the process, or torch's profiler around each call.

worker_group(pool, cls, profiler=Nsight(ranks=[0]))
worker_group(pool, cls, profiler=TorchProfiler("/traces", methods=["update_actor"]))
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from quadriga.errors import ConfigError
from quadriga.single_controller.environment import RankEnvironment


@dataclass(frozen=True)
class Nsight:
    """Start ranks under `nsys profile`, through Ray's `runtime_env`. The nodes need `nsys`.

    `options`: flags of `nsys profile` without their dashes (`{"t": "cuda,nvtx"}`); None: Ray's
    default flags. `ranks`: which ranks; None: all. Reports are in the folder `nsight` of the logs
    of the Ray session.
    """

    options: Mapping[str, str] | None = None
    ranks: Collection[int] | None = None

    def __post_init__(self) -> None:
        for name, value in (self.options or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise ConfigError(
                    f"Nsight: options are flags of nsys and their values, both strings, got "
                    f"{name!r}: {value!r}.",
                    key="profiler",
                )

    def runtime_env(self) -> dict[str, object]:
        """Return Ray's setting for one rank."""
        return {"nsight": "default" if self.options is None else dict(self.options)}


@dataclass(frozen=True)
class TorchProfiler:
    """Write a trace of each call of a rank: `{folder}/{role}.{method}-rank{r}-{number}.json`.

    `folder`: on the node of the rank. `methods`: which methods; None: all. `ranks`: which ranks;
    None: all. `calls`: how many calls of each method are traced. A trace of the whole call is kept
    in memory until it is written. A group with coroutine methods is refused: their calls overlap in
    one process, so no trace would be of one call.
    """

    folder: str
    methods: Collection[str] | None = None
    ranks: Collection[int] | None = None
    calls: int = 3
    _done: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.folder or self.calls < 1:
            raise ConfigError(
                f"TorchProfiler needs a folder and calls of 1 or more, got {self.folder!r} and "
                f"{self.calls}.",
                key="profiler",
            )

    @contextmanager
    def trace(self, role: str, method: str, rank: int) -> Iterator[None]:
        """Trace one call, if its method is traced and has not had all its traces."""
        label = f"{role}.{method}"
        number = self._done.get(label, 0)
        if number >= self.calls or (self.methods is not None and method not in self.methods):
            yield
            return
        self._done[label] = number + 1
        import torch

        os.makedirs(self.folder, exist_ok=True)
        with torch.profiler.profile() as profile:
            yield
        profile.export_chrome_trace(os.path.join(self.folder, f"{label}-rank{rank}-{number}.json"))


Profiler = Nsight | TorchProfiler


def profiler_of_rank(
    profiler: object, place: RankEnvironment, methods: Collection[str], coroutines: Collection[str]
) -> Profiler | None:
    """Return the profiler of one rank, None if it has none.

    `methods`, `coroutines`: the methods of the classes of the group, and those that are coroutine
    methods. Raises `ConfigError` for a profiler that cannot do its work in the group.
    """
    if profiler is None:
        return None
    if not isinstance(profiler, Nsight | TorchProfiler):
        _refuse(f"expected Nsight(...) or TorchProfiler(...), got {profiler!r}")
    if wrong := sorted(r for r in profiler.ranks or () if not 0 <= r < place.world_size):
        _refuse(f"rank(s) {wrong} do not exist in a group of {place.world_size} ranks")
    if isinstance(profiler, TorchProfiler):
        if coroutines:
            _refuse(
                f"the group has the coroutine methods {sorted(coroutines)}, whose calls overlap in "
                "one process, so TorchProfiler cannot trace one call. Use Nsight, or a class "
                "without coroutine methods"
            )
        if unknown := sorted(set(profiler.methods or ()) - set(methods)):
            _refuse(f"the group has no method {unknown}; it has {sorted(methods)}")
    return profiler if profiler.ranks is None or place.rank in profiler.ranks else None


def _refuse(text: str) -> NoReturn:
    raise ConfigError(f"profiler: {text}.", key="profiler")
