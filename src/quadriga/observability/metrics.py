"""All metrics of a run: unit, meaning, and how several values of one step are reduced.

A `*` in a name stands for a part that depends on the run, such as the name of a span.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, SupportsFloat

Kind = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class MetricInfo:
    """A metric. `kind` says how its values of one step (from ranks, parts, calls) are reduced."""

    unit: str
    meaning: str
    kind: Kind = "mean"


_I = MetricInfo

_OF_UPDATES = {
    "grad_norm": _I("1", "‖g‖₂ = √Σg², the norm of the gradient before clipping"),
    "lr": _I("1", "learning rate, mean over the optimizer steps"),
    "skipped_steps": _I("steps", "optimizer steps skipped so far (gradient not finite)", "max"),
    "micro_batches": _I("1", "forward and backward passes per optimizer step and rank"),
}

METRICS: dict[str, MetricInfo] = {
    **{
        f"{role}/{name}": info
        for role in ("actor", "critic", "rm", "sft")
        for name, info in _OF_UPDATES.items()
    },
    "actor/optimizer_steps": _I("steps", "optimizer steps in this training step", "last"),
    "critic/optimizer_steps": _I("steps", "optimizer steps in this training step", "last"),
    # Reward and validation
    "reward/mean": _I("reward", "Σr / B, the score of a response before penalties"),
    "reward/rules": _I("reward", "score of the rules, if a reward model is added to them"),
    "reward/model": _I("reward", "score of the reward model, before its weight"),
    "reward/max": _I("reward", "largest score of the step", "max"),
    "reward/min": _I("reward", "smallest score of the step", "min"),
    "reward/kl_penalty": _I("nats", "mean of kl(log π_old − log π_ref) over tokens, by kl_penalty"),
    "reward/kl_coef": _I("1", "coefficient of the KL penalty in the reward", "last"),
    "reward/overlong_penalty": _I("reward", "soft over-long penalty per response, at most 0"),
    "val/score": _I("reward", "Σr / B over the validation responses"),
    "val/accuracy": _I("share", "val/score, if all scores so far are 0 or 1"),
    "val/samples": _I("responses", "validation responses that were scored", "sum"),
    "val-core/*": _I("reward", "of one data source: mean, pass, best, maj @n of n responses"),
    "val-aux/*": _I("reward", "of one data source: pass and best @k of k < n responses"),
    "reward/raised": _I("samples", "reward functions that raised an exception", "sum"),
    "reward/timed_out": _I("samples", "reward functions that exceeded their deadline", "sum"),
    "reward/crashed": _I("samples", "reward functions that ended their process", "sum"),
    "reward/failed": _I("share", "(raised + timed_out + crashed) / samples"),
    "reward/masked": _I("samples", "failed samples that are left out of the update", "sum"),
    "reward/extra/*": _I("1", "another number that reward functions return"),
    # Lengths and sizes
    "response_length/mean": _I("tokens", "length of a response, end token included"),
    "response_length/max": _I("tokens", "length of the longest response", "max"),
    "response_length/clip_ratio": _I("share", "responses that max_response_length has cut"),
    "batch/sequences": _I("sequences", "sequences of the step, over all ranks", "sum"),
    "batch/tokens": _I("tokens", "prompt and response tokens of the step", "sum"),
    "batch/token_spread": _I(
        "share", "(most − fewest) / most computed tokens of a rank; 0: balanced", "max"
    ),
    "batch/cost_imbalance": _I(
        "1", "cost of the slowest rank / mean of the ranks, by mini-batch; 1: balanced", "max"
    ),
    # Prompt groups: the responses to one prompt
    "group/total": _I("groups", "prompt groups of the step", "sum"),
    "group/dead": _I("groups", "zero-variance groups: their rewards are equal", "sum"),
    "group/dead_fraction": _I("share", "dead / total"),
    "group/dead_at_top": _I("share", "groups whose rewards all equal the largest of the step"),
    "group/dead_at_bottom": _I("share", "groups whose rewards all equal the smallest of the step"),
    "group/std_mean": _I("reward", "standard deviation of the rewards within a group"),
    "group/kept": _I("groups", "groups, not zero-variance, that mode refill kept", "last"),
    "group/gen_batches": _I("batches", "batches that mode refill generated", "last"),
    # Prompt groups that are generated while the policy is trained (trainer.max_staleness)
    "staleness/mean": _I("steps", "training steps since the generation of a group started"),
    "staleness/max": _I("steps", "the same, of the oldest group of the step", "max"),
    "staleness/share_*": _I("share", "groups of the step that started so many steps before"),
    "stream/waiting": _I("groups", "groups whose generation has not started", "last"),
    "stream/started": _I("groups", "groups that are generated, scored or ready", "last"),
    "stream/restarted": _I("groups", "groups so far that began again: a replica was lost", "last"),
    "stream/moved": _I("groups", "groups so far that went on on another replica", "last"),
    "stream/dropped": _I("groups", "zero-variance groups so far that were replaced", "last"),
    # Episodes of several turns
    "agent/turns/mean": _I("turns", "of the policy in an episode"),
    "agent/turns/max": _I("turns", "of the policy in an episode", "max"),
    "agent/ended/*": _I(
        "share", "episodes that ended: done, after max_turns or max_seconds, or by length"
    ),
    "agent/raised": _I("share", "episodes whose environment raised an exception"),
    "agent/timed_out": _I("share", "episodes whose environment exceeded a deadline"),
    "agent/crashed": _I("share", "episodes whose environment ended its process"),
    "agent/contexts": _I("contexts", "of an episode"),
    "agent/rewritten_turns": _I(
        "turns",
        "after which the template begins a context, because it writes them in another way",
    ),
    "agent/reward/turn_*": _I("reward", "of this turn, 0 in an episode without it"),
    "agent/*": _I("own", "a number of the environment, its sum over the turns of an episode"),
    # Difference between rollout and training log-probabilities
    "mismatch/k1": _I("nats", "KL(rollout‖training): mean of −Δ, Δ = log π_train − log π_rollout"),
    "mismatch/k3": _I("nats", "KL(rollout‖training): mean of e^Δ − 1 − Δ"),
    "mismatch/abs": _I("nats", "mean of |Δ| over tokens"),
    "mismatch/max": _I("nats", "largest |Δ|", "max"),
    "mismatch/beyond": _I("share", "tokens with |Δ| > rollout.mismatch.bound"),
    "mismatch/correlation": _I("1", "Pearson correlation of log π_train and log π_rollout"),
    "mismatch/prob_max": _I("1", "largest |π_train − π_rollout|", "max"),
    "mismatch/ppl_gap": _I("1", "mean of ppl_train − ppl_rollout, ppl = exp(−mean log π)"),
    "mismatch/ppl_ratio": _I("1", "exp(mean of log ppl_train − log ppl_rollout)"),
    "mismatch/effective_sample_size": _I("share", "(Σw)² / (n·Σw²) of the token ratios w = e^Δ"),
    "mismatch/sequence_ess": _I("share", "the same of the sequence ratios w = e^ΣΔ"),
    "mismatch/is_*": _I("1", "statistics of the importance correction weights"),
    # Advantages
    "critic/advantages/mean": _I("1", "ΣA / tokens of the responses"),
    "critic/advantages/max_abs": _I("1", "largest |A|", "max"),
    # Policy update
    "actor/loss": _I("1", "the loss that is differentiated, with entropy and KL terms"),
    "actor/pg_loss": _I("1", "policy-gradient term of the loss"),
    "actor/pg_clipfrac": _I("share", "tokens whose ratio ρ = π/π_old was clipped"),
    "actor/pg_clipfrac_lower": _I("share", "tokens with negative advantage that were clipped"),
    "actor/ppo_kl": _I("nats", "KL(old‖new): mean of −log ρ over tokens"),
    "actor/ratio_max": _I("1", "largest ρ", "max"),
    "actor/ratio_min": _I("1", "smallest ρ", "min"),
    "actor/cov_selected": _I("share", "tokens selected by covariance (clip_cov, kl_cov)"),
    "actor/importance_weight": _I("1", "importance correction weight (rollout to training)"),
    "actor/behaviour_weight": _I("1", "weight π_old/π_rollout in decoupled PPO"),
    "actor/behaviour_weight_max": _I("1", "largest weight π_old/π_rollout", "max"),
    "actor/entropy": _I("nats", "mean over tokens of −Σ π log π over the vocabulary"),
    "actor/kl_loss": _I("nats", "KL(policy‖reference) in the loss, before its coefficient"),
    # Critic update
    "critic/loss": _I("1", "the value loss that is differentiated"),
    "critic/vf_clipfrac": _I("share", "tokens whose value change was clipped"),
    "critic/vpred_mean": _I("reward", "predicted value per token"),
    # Supervised fine-tuning
    "rm/loss": _I("nats", "−log σ(difference − margin) per pair"),
    "rm/accuracy": _I("share", "pairs in which the chosen response has the higher score"),
    "rm/difference": _I("reward", "score of the chosen response minus that of the rejected one"),
    "sft/loss": _I("nats", "negative log-probability per answer token"),
    "val/loss": _I("nats", "loss of the validation data, per answer token or per pair"),
    # Device memory, with rollout.take_turns. On a CPU: of the process of the rank
    "memory/rollout_mode_before": _I("GiB", "in use before generation, most of all ranks", "max"),
    "memory/rollout_mode_after": _I(
        "GiB", "in use when training has released its memory and the rollout has its own", "max"
    ),
    "memory/trainer_mode_before": _I("GiB", "in use after generation, most of all ranks", "max"),
    "memory/trainer_mode_after": _I(
        "GiB", "in use when the rollout has released its memory and training has its own", "max"
    ),
    # To the rollout, over all of its ranks. The page of the weight sync names the paths
    "weight_sync/bytes_*": _I("bytes", "of weights that a sync moved by this path", "sum"),
    # Time and speed
    "time/written": _I("s", "from a checkpoint to its commit, beside the steps"),
    "time/reward": _I("s", "scoring, beside the passes of roles", "sum"),
    "time/*": _I("s", "time in a span of the step; spans can be nested", "sum"),
    "perf/tokens_per_second": _I("tokens/s", "prompt and response tokens / time of the step"),
    "progress/elapsed": _I("s", "seconds of the run, without those between its starts", "last"),
    # In the first row after a restart
    "restarts/count": _I("1", "restarts of the run so far, after losses", "last"),
    "restarts/lost_steps": _I("steps", "completed steps that are done again", "last"),
    "restarts/seconds": _I("s", "from the loss until the run went on", "last"),
}

_OF_RUNS = tuple(METRICS)

_REDUCERS: dict[Kind, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def describe_metric(name: str) -> MetricInfo | None:
    """Return the entry for a metric, or None. Among patterns that match, the longest is used."""
    exact = METRICS.get(name)
    if exact is not None:
        return exact
    fitting = [pattern for pattern in METRICS if "*" in pattern and fnmatchcase(name, pattern)]
    return METRICS[max(fitting, key=len)] if fitting else None


def is_of_runs(name: str) -> bool:
    """Whether a run may log a metric of this name itself: no `add_metric` has added it."""
    return any(fnmatchcase(name, pattern) for pattern in _OF_RUNS)


def add_metric(name: str, unit: str, meaning: str, kind: Kind = "mean") -> None:
    """Add a metric to the table. Raises `ValueError` if the name is already described."""
    if name in METRICS:
        raise ValueError(f"metric {name!r} is already described: {METRICS[name].meaning}")
    METRICS[name] = MetricInfo(unit, meaning, kind)


class MetricSet:
    """Collects the values of one step and reduces them to one number per metric.

    With values 1 and [2, 6]: mean 3, sum 9, max 6, min 1, last 6.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, SupportsFloat | Sequence[SupportsFloat]]) -> None:
        """Add values: per metric one number, or a list of numbers (one per rank or part)."""
        for name, value in metrics.items():
            values = value if isinstance(value, Sequence) else [value]
            self._values.setdefault(name, []).extend(float(v) for v in values)

    def reduce(self) -> dict[str, float]:
        """Return one number per metric, in the order of `add`; unknown names are averaged."""
        return {name: _REDUCERS[metric_kind(name)](v) for name, v in self._values.items() if v}

    def take(self) -> dict[str, float]:
        """Return `reduce()` and remove all values."""
        reduced = self.reduce()
        self._values = {}
        return reduced


def metric_kind(name: str) -> Kind:
    """Return how the values of a metric are reduced; unknown names are averaged."""
    info = describe_metric(name)
    return info.kind if info else "mean"


class Timer:
    """Adds up the seconds spent in named spans.

    `with timer("rollout"): …` adds to the metric `time/rollout`. Spans can be nested and repeated;
    a span includes the spans inside it.

    `begins`: is called with the name of each span when it begins.
    """

    def __init__(self, begins: Callable[[str], object] = lambda name: None) -> None:
        self._begins = begins
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begins(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def times(self) -> dict[str, float]:
        """Return `time/<span>` → seconds since the last `take`."""
        return {f"time/{name}": value for name, value in self._seconds.items()}

    def take(self) -> dict[str, float]:
        """Return the same, and reset all spans."""
        taken = self.times()
        self._seconds = {}
        return taken
