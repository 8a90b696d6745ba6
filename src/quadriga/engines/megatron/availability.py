"""Whether Megatron-core can be used here. Imports neither torch nor Megatron-core."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from quadriga.errors import ConfigError

PACKAGE = "megatron-core"
VERSION = "0.16.1"
"""The version that the engine was written for. Others have other modules and arguments."""

on_cpu_for_tests = False
"""Whether `quadriga.testing.megatron_on_cpu` has let Megatron-core compute on CPUs."""


def check_installed(key: str = "engine.name") -> None:
    """Check that Megatron-core is installed, in the version that the engine was written for.

    Args:
        key: the setting that asks for it.

    Raises:
        ConfigError: it is not.
    """
    found = _version()
    if found != VERSION:
        state = "it is not installed" if found is None else f"this environment has {found}"
        raise ConfigError(
            f"{key}=megatron needs {PACKAGE} {VERSION}, and {state}; install "
            f"quadriga[megatron], or set {key} to fsdp",
            key=key,
        )


def _version() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def check_device(device_type: str, key: str = "engine.name") -> None:
    """Check that Megatron-core computes on a device.

    Args:
        key: the setting that asks for it.

    Raises:
        ConfigError: it does not.
    """
    if device_type != "cuda" and not (device_type == "cpu" and on_cpu_for_tests):
        raise ConfigError(
            f"{key}=megatron needs CUDA devices, and the device of the ranks is {device_type!r}; "
            f"set {key}=fsdp",
            key=key,
        )
