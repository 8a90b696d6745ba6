"""Rollout engines by name: prompts in, sampled responses out."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from quadriga.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from quadriga.config.schema import ModelConfig
    from quadriga.rollout.base import RolloutEngine


def _hf(model: ModelConfig, **settings: Any) -> RolloutEngine:
    from quadriga.rollout.hf import HFRollout

    return HFRollout(model, **settings)


def _absent(name: str) -> Any:
    def refuse(model: ModelConfig, **settings: Any) -> RolloutEngine:
        raise ConfigError(
            f"rollout engine {name!r} is not in this release; set actor_rollout_ref.rollout.name=hf"
        )

    return refuse


ROLLOUTS: dict[str, Any] = {
    "hf": _hf,
    "vllm": _absent("vllm"),
    "sglang": _absent("sglang"),
}
"""Name -> function (model config, **settings) that builds the engine."""


def build_rollout(name: str, model: ModelConfig, **settings: Any) -> RolloutEngine:
    """The rollout engine `name`. Settings: `device`, `dtype`, `micro_batch_size`, and the
    engine's own options.

    Raises `UnknownNameError` for a name that is not in the table, `ConfigError` for one that this
    release does not have.
    """
    if name not in ROLLOUTS:
        nearest = next(iter(difflib.get_close_matches(name, ROLLOUTS, n=1)), None)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UnknownNameError(
            f"no rollout engine {name!r}; known: {', '.join(ROLLOUTS)}{hint}",
            name=name,
            known=list(ROLLOUTS),
            nearest=nearest,
        )
    engine: RolloutEngine = ROLLOUTS[name](model, **settings)
    return engine
