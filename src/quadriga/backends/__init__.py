"""The backends that run worker groups: `get_backend("ray")`, `get_backend("local")`.

`ray` starts one actor per rank on a cluster, `local` builds all ranks in the controller's process.
Each implements `quadriga.single_controller.backend.Backend`. A backend may import
`single_controller`, `protocol` and `errors`, and never the other backend.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.schema import RunConfig
from quadriga.errors import ConfigError, unknown_name
from quadriga.lazy import imported
from quadriga.observability.run_folder import PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from quadriga.single_controller.backend import Backend

BACKENDS = {
    "ray": "quadriga.backends.ray.backend:RayBackend",
    "local": "quadriga.backends.local:LocalBackend",
}


def get_backend(name: str, **options: object) -> Backend:
    """Return a new backend of that name; import its libraries and no others.

    `options`: arguments of its class; `get_backend("ray", store="shards")` makes a `RayBackend`
    that fetches whole shards from other nodes.

    Raises:
        UnknownNameError: there is no such backend; the nearest name is given.
        ConfigError: the backend has no such option.
    """
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    factory: Callable[..., Backend] = imported(BACKENDS[name])
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"get_backend({name!r}): {error}; its options are {signature}.", key=name
        ) from error
    return factory(**options)


def profiler_options(trainer: RunConfig) -> dict[str, object]:
    """Return the options of `Backend.worker_group` for `trainer.profile`: with nsys the ranks start
    under Nsight Systems, which writes one report for each step to the run folder."""
    if not trainer.profile.steps or trainer.profile.tool != "nsys":
        return {}
    from quadriga.backends.ray.start import Nsight

    folder = Path(trainer.default_local_dir).absolute() / PROFILE
    folder.mkdir(parents=True, exist_ok=True)
    ends = f"repeat:{len(trainer.profile.steps)}"
    flags = {"t": "cuda,cudnn,cublas,nvtx", "capture-range": "cudaProfilerApi"}
    flags |= {"capture-range-end": ends, "kill": "none", "o": f"{folder}/process_%p"}
    return {"profiler": Nsight(flags)}
