"""Rule functions that score responses.

    manager           `RewardManager`: a batch with responses → scores per token, and answers;
                      several weighted parts of a score
    functions         which function scores a row, how a function of the user is loaded, and what a
                      call of it gives
    tensors           reward functions of a program that return the scores of a batch as a tensor
    judges            models behind servers that score responses
    pool              `RewardPool`: processes in which each sample has a deadline
    pool_worker       the program of these processes, and what supervises it
    functions, mathematics, multiple_choice    the built-in rules

The package imports `errors`, `lazy`, `containment`, `config` and `protocol`. The names below are
public; each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.rewards.functions import (
        FunctionRef as FunctionRef,
        load_reward_function as load_reward_function,
        register_reward_function as register_reward_function,
    )
    from quadriga.rewards.manager import Failure as Failure, RewardManager as RewardManager
    from quadriga.rewards.pool import RewardPool as RewardPool
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
