"""The alarm for rollout and training log-probabilities that differ.

Both engines hold the same weights, so the log-probabilities of a token differ by rounding only. If
many tokens differ by more, the update is off-policy and no other number shows it: the weights
did not arrive, the engines compute in different dtypes, or they sample by different rules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quadriga.config.schema import SamplingConfig, TrainConfig
from quadriga.errors import MismatchError
from quadriga.workers.objectives import MISMATCH

_log = logging.getLogger("quadriga")

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = "actor_rollout_ref.actor.engine"


class MismatchWatch:
    """Compares the share of tokens beyond `mismatch.bound` with `mismatch.max_share` in each step.

    A run logs a warning at its first alarm, and then at the 10th, 100th, … alarm.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.alarms = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise or log an alarm if the metrics of a step ask for one.

        Args:
            metrics: of the step. A step in which nothing was compared has no `mismatch/beyond`.

        Raises:
            MismatchError: more tokens than allowed, and `mismatch.on_alarm` is "fail".
        """
        settings = self.config.actor_rollout_ref.rollout.mismatch
        share = metrics.get(f"{MISMATCH}beyond", 0.0)
        if share <= settings.max_share:
            return
        self.alarms += 1
        text = self._text(step, share, metrics)
        if settings.on_alarm == "fail":
            raise MismatchError(text, step=step, share=share)
        if _is_power_of_ten(self.alarms):
            _log.warning(
                "%s. Alarm %d of this run; the next warning is at alarm %d. "
                "%s.mismatch.on_alarm=fail ends the run instead",
                text,
                self.alarms,
                10 * self.alarms,
                _ROLLOUT,
            )

    def _text(self, step: int, share: float, metrics: Mapping[str, float]) -> str:
        settings = self.config.actor_rollout_ref.rollout.mismatch
        found = [
            f"{label} {metrics[MISMATCH + name]:.3g}"
            for name, label in (("abs", "mean"), ("max", "largest"), ("correlation", "correlation"))
            if MISMATCH + name in metrics
        ]
        return (
            f"step {step}: for {share:.1%} of the response tokens, the log-probabilities of "
            f"rollout and training differ by more than {settings.bound:g} nats "
            f"({_ROLLOUT}.mismatch.bound); at most {settings.max_share:.1%} may "
            f"({_ROLLOUT}.mismatch.max_share). Of the difference: {', '.join(found)}. To find the "
            f"cause, try: {'; '.join(remedies(self.config))}"
        )


def remedies(config: TrainConfig) -> list[str]:
    """Return what to try against a mismatch with these settings, each with its setting."""
    rollout, engine = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.engine
    found = []
    if rollout.dtype != engine.dtype:
        found.append(
            f"equal dtypes, {_ROLLOUT}.dtype={engine.dtype} as {_ENGINE}.dtype "
            f"(it is {rollout.dtype})"
        )
    elif engine.dtype != "float32":
        found.append(f"float32 in both engines, {_ROLLOUT}.dtype=float32 {_ENGINE}.dtype=float32")
    filters = _filters(rollout.sampling)
    if filters:
        found.append(f"no sampling filters, {' '.join(filters)}")
    if rollout.name != "hf":
        found.append(f"the engine of reference, {_ROLLOUT}.name=hf")
    correction = config.algorithm.rollout_correction
    if correction.level == "none":
        found.append("a correction by importance weights, algorithm.rollout_correction.level=token")
    elif correction.mode != "mask":
        found.append(
            "to leave such tokens out of the update, algorithm.rollout_correction.mode=mask"
        )
    if not found:
        found.append(f"a larger {_ROLLOUT}.mismatch.bound, if the difference is expected")
    return found


def _filters(sampling: SamplingConfig) -> list[str]:
    """Return the settings that switch off the filters of a sampling that has some."""
    plain = SamplingConfig()
    return [
        f"{_ROLLOUT}.sampling.{name}={value}"
        for name, value in vars(plain).items()
        if name in ("top_p", "top_k", "min_p") and getattr(sampling, name) != value
    ]


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
