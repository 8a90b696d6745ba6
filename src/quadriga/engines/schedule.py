"""Learning rate as a pure function of the step, so a resumed run needs only the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from quadriga.config.schema import LrSchedulerName, OptimConfig
from quadriga.errors import ConfigError, UnknownNameError


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[LrSchedulerName, Callable[[float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
"""Name -> function from progress in [0, 1] after the warmup to a factor of the peak rate."""


def learning_rate(step: int, optim: OptimConfig, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    During warmup the rate rises linearly. Its first value is above 0, and it reaches the peak
    `optim.lr` at step `lr_warmup_steps`. Then the schedule falls to `min_lr_ratio` of the peak,
    which it reaches at the last step.
    """
    # lr 1, two warmup steps, six steps in total, min_lr_ratio 0:
    #
    #   step        0     1     2     3     4     5     6 …
    #   warmup     1/3   2/3
    #   progress                0    1/3   2/3    1     1      (step − 2) / (6 − 1 − 2)
    #   linear     .33   .67    1    .67   .33    0     0
    #   cosine     .33   .67    1    .75   .25    0     0
    warmup = optim.lr_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    if optim.lr_scheduler == "constant" or total_steps is None:
        return optim.lr
    progress = (step - warmup) / max(total_steps - 1 - warmup, 1)
    factor = SCHEDULES[optim.lr_scheduler](min(progress, 1.0))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * factor)


def check_schedule(optim: OptimConfig, total_steps: int | None) -> None:
    """Check that the schedule exists and has what it needs.

    Raises:
        UnknownNameError: there is no schedule `optim.lr_scheduler`.
        ConfigError: the schedule needs the number of steps, and it is not known.
    """
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
