"""Which accelerators a process may use, from the environment variables of all vendors."""

from __future__ import annotations

import os
from collections.abc import Mapping

from quadriga.errors import PlacementError

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

NOSET_FLAGS = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
)


def ray_noset_visible_devices(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user told Ray, for any vendor, not to set the visible devices."""
    return any(env.get(flag, "0").lower() in ("1", "true") for flag in NOSET_FLAGS)


def visible_devices(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the visible devices ("0,1") that the vendors' variables give, None if none is set.

    Raises `PlacementError` naming the variables if two of them differ.
    """
    given = {name: env[name] for name in VISIBLE if env.get(name)}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name}={value}" for name, value in given.items())
        raise PlacementError(
            f"Two variables give different visible devices: {listed}. Set one of them, or set all "
            "to the same list.",
            wanted=given,
        )
    return next(iter(given.values()), None)


def unify_visible_devices() -> str | None:
    """Set CUDA_VISIBLE_DEVICES, unset the variables of other vendors, and return the value.

    PyTorch for ROCm reads CUDA_VISIBLE_DEVICES too. With one variable, libraries that read
    different variables use the same devices.
    """
    devices = visible_devices()
    if devices is None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")
    for name in VISIBLE[1:]:
        os.environ.pop(name, None)
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    return devices


def device_index(local_rank: int, devices: str | None, noset: bool) -> int:
    """Return the index, among the visible devices, of the device that a rank uses.

    Ray makes only its own device visible to a process, as number 0. With a `NOSET` flag, or
    outside Ray, a process sees all devices of the node and uses the one of its local rank.
    """
    if devices is None:
        return local_rank
    count = len([part for part in devices.split(",") if part.strip()])
    return local_rank if noset or count > 1 else 0
