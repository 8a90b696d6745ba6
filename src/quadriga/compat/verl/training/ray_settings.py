"""verl's settings of Ray, `ray_kwargs`: arguments of `ray.init`, and a file for a trace."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.backends.ray.programs import init_parameters
from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.config.secrets import mask_secrets
from quadriga.config.verl.settings import plain_values
from quadriga.errors import ConfigError

RUNTIME_ENV = {
    "env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"},
}
"""What `run_ppo` asks of Ray's processes, unless `ray_kwargs` says otherwise."""

_TIMELINE = "timeline_json_file"


@dataclass(frozen=True)
class RaySettings:
    """How `run_ppo` uses Ray.

    Attributes:
        arguments: of `ray.init`.
        timeline: the file for a trace of all tasks; None: no trace.
    """

    arguments: dict[str, Any]
    timeline: str | None


def ray_settings(config: VerlConfig) -> RaySettings:
    """Return the settings of Ray in a configuration of verl.

    They are in the section `ray_kwargs`; older configurations have a section `ray_init` instead.

    Raises:
        ConfigError: names the key, and the value that Ray does not take.
    """
    given = _section(setting(config, "ray_kwargs"), "ray_kwargs")
    older = _section(setting(config, "ray_init"), "ray_init")
    trace = given.get(_TIMELINE) or older.pop(_TIMELINE, None)
    if not isinstance(trace, str | None):
        raise ConfigError(
            f"ray_kwargs.{_TIMELINE} must be a file name, got {trace!r}",
            key=f"ray_kwargs.{_TIMELINE}",
        )
    return RaySettings(ray_init_arguments(given.get("ray_init", older)), trace)


def ray_init_arguments(given: VerlConfig) -> dict[str, Any]:
    """Return the arguments of `ray.init`: the user's, and `RUNTIME_ENV` where they are silent.

    Raises:
        ConfigError: `ray.init` has no such argument, or `runtime_env` is not as Ray expects it.
    """
    where = "ray_kwargs.ray_init"
    arguments = _section(given, where)
    known = init_parameters()
    for name in arguments:
        # Names with an underscore are not in the signature; Ray checks them.
        if name not in known and not name.startswith("_"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"ray.init has no argument {name!r}{hint}", key=f"{where}.{name}")
    environment = _section(arguments.get("runtime_env"), f"{where}.runtime_env")
    variables = _section(environment.get("env_vars"), f"{where}.runtime_env.env_vars")
    for name, value in variables.items():
        if not isinstance(value, str):
            key = f"{where}.runtime_env.env_vars.{name}"
            hint = "" if value is None else f"; write '{value}' in quotes"
            raise ConfigError(f"{key} must be text, got {value!r}{hint}", key=key)
    kept = {key: value for key, value in environment.items() if value is not None}
    return {
        **{key: value for key, value in arguments.items() if value is not None},
        "runtime_env": {**kept, "env_vars": {**RUNTIME_ENV["env_vars"], **variables}},
    }


def get_ppo_ray_runtime_env(config: VerlConfig = None) -> dict[str, dict[str, str]]:
    """Return what `run_ppo` asks of Ray's processes. `config` is not used."""
    return {name: dict(value) for name, value in RUNTIME_ENV.items()}


def _section(value: object, key: str) -> dict[str, object]:
    """Return the settings of a section; {} for None. Raises `ConfigError` for another value."""
    if value is None:
        return {}
    is_section = isinstance(value, Mapping) or hasattr(value, "__dict__")
    if isinstance(value, Sequence) or not is_section:  # a list of OmegaConf is a sequence
        shown = mask_secrets(repr(value))
        raise ConfigError(f"{key} must be a section of settings, got {shown}", key=key)
    return plain_values(value)
