"""One class a role, whatever engine runs under it. Names load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
    from quadriga.workers.critic import CriticWorker
    from quadriga.workers.runtime import RankRuntime
    from quadriga.workers.sft import SFTWorker

_HOMES = {
    "ActorRolloutRefWorker": "actor_rollout_ref",
    "CriticWorker": "critic",
    "RankRuntime": "runtime",
    "SFTWorker": "sft",
}

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RankRuntime", "SFTWorker"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
