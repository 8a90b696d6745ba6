"""Every metric a run can record, what it means, and how values of one step become one.

A `*` in a name stands for a part that depends on the run (a data source, a span's name).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

Kind = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class MetricInfo:
    """`kind` says how several values within one step (from ranks, parts, calls) become one."""

    unit: str
    meaning: str
    kind: Kind = "mean"


_I = MetricInfo

METRICS: dict[str, MetricInfo] = {
    # Reward and validation
    "reward/mean": _I("reward", "score of a response, before KL penalty and shaping"),
    "reward/max": _I("reward", "highest score in the step", "max"),
    "reward/min": _I("reward", "lowest score in the step", "min"),
    "reward/kl_penalty": _I("nats", "KL of policy from reference a token, taken off the reward"),
    "reward/kl_coef": _I("1", "coefficient of the KL penalty in the reward", "last"),
    "reward/overlong_penalty": _I("reward", "soft over-long penalty, a sequence (zero or below)"),
    "val/accuracy": _I("share", "mean score of held-out answers; a share where scores are 0 or 1"),
    "val/samples": _I("answers", "held-out answers scored", "sum"),
    "reward/raised": _I("samples", "reward functions that raised; such a sample scores 0", "sum"),
    "reward/timed_out": _I("samples", "reward functions past their deadline", "sum"),
    "reward/crashed": _I("samples", "reward functions that took their process along", "sum"),
    "reward/extra/*": _I("1", "a number that reward functions return beside the score"),
    # Lengths and sizes
    "response_length/mean": _I("tokens", "length of a response, end token included"),
    "response_length/max": _I("tokens", "longest response", "max"),
    "response_length/clip_ratio": _I("share", "responses cut off at max_response_length"),
    "batch/sequences": _I("sequences", "responses in the step, over all ranks", "sum"),
    "batch/tokens": _I("tokens", "prompt and response tokens in the step", "sum"),
    "batch/token_spread": _I("share", "(most − fewest) / most tokens a rank; 0 is balanced", "max"),
    # Groups (samples of one prompt)
    "group/total": _I("groups", "groups in the step", "sum"),
    "group/dead": _I("groups", "groups whose rewards are all equal: they teach nothing", "sum"),
    "group/dead_fraction": _I("share", "the same as a share of the groups"),
    "group/dead_at_top": _I("share", "groups that have the step's best reward throughout"),
    "group/dead_at_bottom": _I("share", "groups that have the step's worst reward throughout"),
    "group/std_mean": _I("reward", "spread of rewards within a group"),
    "group/kept": _I("groups", "groups with signal that refilling kept", "last"),
    "group/gen_batches": _I("batches", "batches of rollouts that refilling drew", "last"),
    # Rollout against training
    "mismatch/k1": _I("nats", "KL of training from rollout a token, estimate k1"),
    "mismatch/k3": _I("nats", "the same, estimate k3"),
    "mismatch/abs": _I("nats", "difference of the two log-probabilities of a token"),
    "mismatch/max": _I("nats", "the largest of these", "max"),
    "mismatch/prob_max": _I("1", "the largest difference of the two probabilities", "max"),
    "mismatch/ppl_gap": _I("1", "perplexity under training minus under rollout"),
    "mismatch/ppl_ratio": _I("1", "perplexity under training over that under rollout"),
    "mismatch/effective_sample_size": _I("share", "tokens that the likelihood ratios leave"),
    "mismatch/sequence_ess": _I("share", "responses that their likelihood ratios leave"),
    "mismatch/is_*": _I("1", "weights of the importance correction, and what they leave out"),
    # Advantages
    "critic/advantages/mean": _I("1", "advantage of a response token"),
    "critic/advantages/max_abs": _I("1", "largest size of an advantage", "max"),
    # Policy update
    "actor/loss": _I("1", "policy loss with entropy and KL terms, as differentiated"),
    "actor/pg_loss": _I("1", "policy-gradient part of the loss, a token"),
    "actor/pg_clipfrac": _I("share", "tokens whose ratio was clipped"),
    "actor/pg_clipfrac_lower": _I("share", "tokens clipped where the advantage is negative"),
    "actor/ppo_kl": _I("nats", "KL of the policy from the one that generated, estimate k1"),
    "actor/ratio_max": _I("1", "largest probability ratio of new to old policy, a token", "max"),
    "actor/ratio_min": _I("1", "smallest probability ratio of new to old policy, a token", "min"),
    "actor/cov_selected": _I("share", "tokens chosen by covariance (clip_cov, kl_cov)"),
    "actor/importance_weight": _I("1", "weight that makes up for rollout against training"),
    "actor/behaviour_weight": _I("1", "decoupled PPO's weight for the policy that sampled"),
    "actor/behaviour_weight_max": _I("1", "the largest of these", "max"),
    "actor/entropy": _I("nats", "entropy of the policy, a token"),
    "actor/kl_loss": _I("nats", "KL of policy from reference in the loss, before its coefficient"),
    "actor/grad_norm": _I("1", "norm of the gradient before clipping"),
    "actor/lr": _I("1", "learning rate, mean over the step's optimizer steps"),
    "actor/skipped_steps": _I("steps", "steps left out so far: gradient not finite", "max"),
    "actor/micro_batches": _I("1", "forward and backward passes in an optimizer step, a rank"),
    "actor/optimizer_steps": _I("steps", "optimizer steps in this training step", "last"),
    # Critic update
    "critic/loss": _I("1", "value loss as differentiated"),
    "critic/vf_clipfrac": _I("share", "tokens whose value change was clipped"),
    "critic/vpred_mean": _I("reward", "predicted value, a token"),
    "critic/grad_norm": _I("1", "norm of the critic's gradient before clipping"),
    "critic/lr": _I("1", "critic's learning rate, mean over the step's optimizer steps"),
    "critic/skipped_steps": _I(
        "steps", "critic's steps left out so far: gradient not finite", "max"
    ),
    "critic/micro_batches": _I("1", "critic's passes in an optimizer step, a rank"),
    "critic/optimizer_steps": _I("steps", "critic's optimizer steps in this training step", "last"),
    # Supervised fine-tuning
    "sft/loss": _I("nats", "negative log-probability of an answer token"),
    "sft/grad_norm": _I("1", "norm of the gradient before clipping"),
    "sft/lr": _I("1", "learning rate of the step", "last"),
    "sft/skipped_steps": _I("steps", "steps left out so far: gradient not finite", "max"),
    "sft/micro_batches": _I("1", "forward and backward passes in the step, a rank"),
    # Time and speed
    "time/*": _I("s", "time in one part of the step; spans may lie inside others", "sum"),
    "perf/tokens_per_second": _I("tokens/s", "prompt and response tokens of a step over its time"),
    "progress/elapsed": _I("s", "time since the run began", "last"),
}

_REDUCERS: dict[Kind, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def describe_metric(name: str) -> MetricInfo | None:
    """What a metric means, or None if no table entry fits its name."""
    exact = METRICS.get(name)
    if exact is not None:
        return exact
    fitting = [pattern for pattern in METRICS if "*" in pattern and fnmatchcase(name, pattern)]
    return METRICS[max(fitting, key=len)] if fitting else None


def add_metric(name: str, unit: str, meaning: str, kind: Kind = "mean") -> None:
    """Describe a metric of one's own. Raises `ValueError` if the name means something already."""
    if name in METRICS:
        raise ValueError(f"metric {name!r} is already described: {METRICS[name].meaning}")
    METRICS[name] = MetricInfo(unit, meaning, kind)


def undescribed(names: Iterable[str]) -> list[str]:
    """Those names that the table does not explain, sorted."""
    return sorted({name for name in names if describe_metric(name) is None})


class MetricSet:
    """Collects the values of one step; each metric's kind says how they become one number."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add values: a number each, or a list of numbers (one a rank or a part)."""
        for name, value in metrics.items():
            values = value if isinstance(value, list | tuple) else [value]
            self._values.setdefault(name, []).extend(float(v) for v in values)

    def reduce(self) -> dict[str, float]:
        """One number a metric, in the order they came; unknown names are averaged."""
        return {name: _reduce(name, values) for name, values in self._values.items() if values}

    def take(self) -> dict[str, float]:
        """`reduce`, then forget."""
        reduced = self.reduce()
        self._values = {}
        return reduced


def _reduce(name: str, values: list[float]) -> float:
    info = describe_metric(name)
    return _REDUCERS[info.kind if info else "mean"](values)
