"""REWARDS: rule functions, a manager that turns them into scores a token, a pool with deadlines.

Names load when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.rewards.functions import FunctionRef as FunctionRef
    from quadriga.rewards.functions import load_reward_function as load_reward_function
    from quadriga.rewards.functions import register_reward_function as register_reward_function
    from quadriga.rewards.manager import Failure as Failure
    from quadriga.rewards.manager import RewardManager as RewardManager
    from quadriga.rewards.pool import RewardPool as RewardPool

_HOME = {
    "Failure": "manager",
    "FunctionRef": "functions",
    "RewardManager": "manager",
    "RewardPool": "pool",
    "load_reward_function": "functions",
    "register_reward_function": "functions",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
