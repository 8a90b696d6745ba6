"""Learning rate as a function of the step: pure, so a resumed run needs only the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from quadriga.config.schema import OptimConfig
from quadriga.errors import ConfigError, UnknownNameError


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
"""Name -> factor of the peak rate, from progress in [0, 1] after the warmup."""


def learning_rate(step: int, optim: OptimConfig, total_steps: int | None) -> float:
    """Rate of optimizer step `step` (0 is the first).

    Warmup rises linearly and reaches the peak at step `lr_warmup_steps`; its first step is
    already above zero. Then the schedule falls to `min_lr_ratio` of the peak at the last step.
    """
    warmup = optim.lr_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    if optim.lr_scheduler == "constant" or total_steps is None:
        return optim.lr
    progress = (step - warmup) / max(total_steps - 1 - warmup, 1)
    factor = SCHEDULES[optim.lr_scheduler](min(progress, 1.0))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * factor)


def check_schedule(optim: OptimConfig, total_steps: int | None) -> None:
    """Raise `UnknownNameError` or `ConfigError` for a schedule that cannot be followed."""
    if optim.lr_scheduler not in SCHEDULES:
        raise UnknownNameError(
            f"lr_scheduler is {optim.lr_scheduler!r}; expected one of {', '.join(SCHEDULES)}",
            name=optim.lr_scheduler,
            known=list(SCHEDULES),
            nearest=None,
        )
    if optim.lr_scheduler != "constant" and total_steps is None:
        raise ConfigError(
            f"lr_scheduler {optim.lr_scheduler!r} needs the number of optimizer steps; set "
            "optim.total_steps"
        )
