"""Starting Ray quietly, and ending only what was started here."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import ray

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # By default Ray deletes what nobody names any more once in a second. Until then new objects go
    # into memory that was never touched, which takes several times as long to fill.
    "RAY_free_objects_period_milliseconds": "10",
}
"""Where the user has not set them."""


@dataclass
class RaySession:
    """A connection to Ray. `started`: it was made here, and `close` ends it."""

    started: bool

    def close(self) -> None:
        """Shut Ray down if this session started it."""
        if self.started and ray.is_initialized():
            ray.shutdown()
        self.started = False


def ensure_ray(
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    object_store_memory: int | None = None,
    address: str | None = None,
    namespace: str | None = None,
    log_to_driver: bool = True,
    **options: Any,
) -> RaySession:
    """Connect to Ray, starting a cluster of this machine where none is given.

    `object_store_memory`: bytes. `address`: of a running cluster, "auto" for the one of this
    machine; RAY_ADDRESS counts as given. An existing connection is used as it is. `options` go to
    `ray.init`.
    """
    if ray.is_initialized():
        return RaySession(started=False)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    settings: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": log_to_driver,
        "logging_level": logging.ERROR,
        **options,
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        settings["address"] = address
    else:
        # "local" starts a cluster even where somebody else's runs on this machine.
        settings.update(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_memory,
            include_dashboard=False,
        )
    # Ray announces its token authentication at warning level on every start.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    ray.init(**settings)
    return RaySession(started=True)
