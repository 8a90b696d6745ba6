"""Training engines by name: a model, its optimizer, and how both lie over the ranks."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from quadriga.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
    from quadriga.engines.base import TrainEngine


def _fsdp(*args: Any, **settings: Any) -> TrainEngine:
    from quadriga.engines.fsdp import FSDPEngine

    return FSDPEngine(*args, **settings)


def _megatron(*args: Any, **settings: Any) -> TrainEngine:
    raise ConfigError("engine 'megatron' is not in this release; set engine.name=fsdp")


ENGINES: dict[str, Any] = {"fsdp": _fsdp, "megatron": _megatron}
"""Name -> function (model, engine, optim, **settings) that builds the engine."""


def build_engine(
    model: ModelConfig, engine: EngineConfig, optim: OptimConfig | None = None, **settings: Any
) -> TrainEngine:
    """The training engine that `engine.name` names; see `FSDPEngine` for `settings`.

    Raises `UnknownNameError` for a name that is not in the table, `ConfigError` for one that this
    release does not have.
    """
    if engine.name not in ENGINES:
        nearest = next(iter(difflib.get_close_matches(engine.name, ENGINES, n=1)), None)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UnknownNameError(
            f"no training engine {engine.name!r}; known: {', '.join(ENGINES)}{hint}",
            name=engine.name,
            known=list(ENGINES),
            nearest=nearest,
        )
    built: TrainEngine = ENGINES[engine.name](model, engine, optim, **settings)
    return built
