"""`quadriga plan --async RUN`: what generation beside training would give a run.

    metrics.jsonl, samples.jsonl or stream.jsonl ──► Costs, lengths
    Costs, lengths ──► Simulation of each division ──► table

Training on fewer ranks is taken to be slower in proportion. What a decoding step takes for itself,
and what more for each row and for each token that the rows attend to, is fitted to the steps of a
run with `trainer.max_staleness=0`, and else to its calls.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from quadriga.config.role_ranks import role_ranks
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.files import replacing
from quadriga.observability.jsonl import Sample, read_metrics, read_samples
from quadriga.observability.run_folder import RunFolder
from quadriga.rollout import rollout_of
from quadriga.streams.simulation import Costs, Division, Simulation, Timeline, attended, fit_costs
from quadriga.streams.timeline import (
    Counts,
    RecordedStream,
    chrome_trace,
    read_stream,
    recorded_spans,
)
from quadriga.trainer.checks.settings import check_train_settings
from quadriga.trainer.dataflow import StepPlan
from quadriga.trainer.roles.registry import load_train_config

MIN_STEPS = 3
"""Steps that a run must have after its first one, which is slower than the others."""
NEAR = 0.97
"""Of divisions that reach this share of the best one, that with the least staleness is
recommended."""
_PACES = ((0, None), *((k, times) for k in (1, 2, 4) for times in (1.25, None)))
"""`trainer.max_staleness` and `rollout.oversample` of the table."""
_NEEDED = ("time/rollout", "time/update_actor", "time/sync_weights", "batch/tokens")
_TRAINED = ("time/evaluate", "time/advantages", "time/update_critic", "time/update_actor")


@dataclass(frozen=True)
class MeasuredRun:
    """A run and what its work takes. `seconds`: of a step."""

    file: Path
    config: TrainConfig
    costs: Costs
    lengths: Counts
    prompt_tokens: int
    seconds: float

    def simulated(self, config: TrainConfig) -> Timeline:
        """Simulate the run with other settings."""
        costs = self.costs
        if StepPlan.of(config).old_log_prob_pass > StepPlan.of(self.config).old_log_prob_pass:
            costs = replace(costs, train=costs.train + costs.prefill)
        return Simulation(division_of(config), costs, self.lengths, self.prompt_tokens).run()


def division_of(config: TrainConfig) -> Division:
    """Return how a run with these settings uses its ranks."""
    ranks, rollout = role_ranks(config), config.actor_rollout_ref.rollout
    staleness, apart = config.trainer.max_staleness, ranks["rollout"] != ranks["actor"]
    copies = len(ranks["rollout"]) // rollout_of(rollout).ranks_of_copy
    return Division(
        len(ranks["actor"]), copies, apart, config.data.train_batch_size, staleness,
        rollout.slice_tokens if staleness else config.data.max_response_length,
        rollout.micro_batch_size if apart and staleness else None,
        math.ceil(rollout.oversample * config.data.train_batch_size - 1e-6)
        if rollout.oversample else None,
        rollout.reset_caches,
    )  # fmt: skip


def read_run(path: Path) -> MeasuredRun:
    """Read the folder of a run.

    Raises:
        ConfigError: it is no such folder, or the run does not have what the plan needs.
    """
    folder, config, problem = RunFolder(path), None, None
    rows, found, stream = list[dict[str, float]](), list[int](), None
    if folder.config.is_file() and folder.metrics.is_file():
        config = load_train_config((), folder.config)
        rows = [row for row in read_metrics(folder.metrics) if all(name in row for name in _NEEDED)]
        samples = [*read_samples(folder.samples)] if folder.samples.is_file() else []
        samples.sort(key=_place)  # the ranks that train may have them in another order
        found = [s.response_tokens for s in samples if s.split == "train" and s.response_tokens]
        if config.trainer.max_staleness and folder.stream.is_file():
            stream = read_stream(folder.stream)
    if config is None:
        problem = "is no run folder (trainer.default_local_dir) with config.yaml and metrics.jsonl"
    elif config.trainer.max_staleness and not (stream and stream.calls[1:]):
        problem = "has no times of calls in stream.jsonl; pass a run of this version of Quadriga"
    elif len(rows) <= MIN_STEPS:
        problem = f"has {len(rows)} training steps with their times, expected {MIN_STEPS + 1}"
    elif not (found or stream):
        problem = "has no training samples; pass a run with trainer.samples_per_step above 0"
    if config is None or problem:
        raise ConfigError(f"plan --async: {path} {problem}", key="--async")
    return _measured(folder.config, config, rows[1:], np.array(found), stream)


def _place(sample: Sample) -> tuple[int, ...]:
    """Return the place of a response in generation: `group` is "step-draw-number"."""
    return sample.step, *map(int, re.findall(r"\d+", sample.group or ""))


def _measured(
    file: Path,
    config: TrainConfig,
    rows: list[dict[str, float]],
    found: Counts,
    stream: RecordedStream | None,
) -> MeasuredRun:
    lengths, dead = ("response_length/mean", "response_length/max"), "group/dead_fraction"
    names = (*_NEEDED, *_TRAINED, *lengths, dead)
    of = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    groups, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    division, longest = division_of(config), of["response_length/max"]
    sampled, generated = of["response_length/mean"] * groups * n, of["time/rollout"]
    trained, prompts = sum(of[name].mean() for name in _TRAINED), of["batch/tokens"] - sampled
    prompt = round(prompts.mean() / (groups * n))
    train = trained * division.trainers / of["batch/tokens"].mean()
    steps = max(16, min(32, 2048 // groups))
    seconds = generated.mean() + trained + of["time/sync_weights"].mean()
    if stream is not None:
        copies = 1 if division.apart else division.copies
        resets = config.actor_rollout_ref.rollout.reset_caches
        calls = [call._replace(synced=call.synced and resets) for call in stream.calls[1:]]
        costs = Costs.of_calls(calls, prompt, copies)
        # Without the wait for the ends of calls, which the simulation has of its own.
        syncs = [span.end - span.start for span in stream.spans if span.name == "sync"]
        costs = replace(costs, train=train, sync=float(np.mean(syncs or [0.0])))
        trained_rows = np.array([stream.lengths[row] for row in sorted(stream.lengths)])
        every = np.resize(trained_rows, (steps * groups, n))
        return MeasuredRun(file, config, costs, every, prompt, seconds)
    # A forward pass takes a third of an update, which has a backward pass, too, and may leave out
    # the rows without an advantage.
    updated = of["batch/tokens"] * (1 - of[dead] * StepPlan.of(config).advantages_before_passes)
    prefill = of["time/update_actor"].sum() / max(updated.sum(), 1) * division.trainers / 3
    decoding = np.maximum(generated - prefill * prompts / division.copies, generated / 2)
    whole = found[groups * n :]
    is_whole = len(whole) == len(rows) * groups * n  # the samples have all responses of the run
    # Else the rows of a copy are not known: each has the longest response and its share of tokens.
    of_copies = [(longest, sampled / division.copies, np.zeros(len(rows)))]
    if is_whole:
        split = np.array_split(whole.reshape(len(rows), -1), division.copies, axis=1)
        of_copies = [(own.max(1), own.sum(1), attended(own, prompt).sum(1)) for own in split]
    decode, row, context = fit_costs(np.array(of_copies).transpose(2, 0, 1), decoding)
    sync = of["time/sync_weights"].mean()
    costs = Costs(decode, row, context, prefill=prefill, train=train, sync=sync)
    if is_whole:
        every = np.resize(whole, (steps * groups, n))
        return MeasuredRun(file, config, costs, every, prompt, seconds)
    # Each simulated step has the longest response and the tokens of a step of the run.
    own = np.resize(np.arange(len(rows)), steps)
    rng = np.random.default_rng(config.trainer.seed)
    drawn = rng.choice(found, (steps, groups * n)).astype(float)
    drawn *= ((sampled - longest)[own] / np.maximum(drawn[:, 1:].sum(1), 1.0))[:, None]
    drawn[:, 0] = np.inf
    drawn = rng.permuted(drawn.clip(1, longest[own, None]), axis=1).round()
    simulated = drawn.astype(np.int64).reshape(-1, n)
    return MeasuredRun(file, config, costs, simulated, prompt, seconds)


def candidates(run: MeasuredRun) -> Iterator[tuple[str, TrainConfig]]:
    """Yield the settings that can be recommended: all ranks in turns, or divided."""
    world = run.config.trainer.ranks
    divided = sorted({max(1, world * part // 4) for part in (1, 2, 3)} if world > 1 else ())
    slice_tokens = max(64, run.config.data.max_response_length // 32)
    rollout = "actor_rollout_ref.rollout"
    for generating in (0, *divided):
        trains, generates = f"[0-{world - generating - 1}]", f"[{world - generating}-{world - 1}]"
        if not generating:
            trains = generates = "null"
        for staleness, times in _PACES:
            line = f"trainer.max_staleness={staleness} placement.actor={trains} "
            line += f"placement.rollout={generates} {rollout}.oversample={times or 'null'}"
            line += f" {rollout}.slice_tokens={slice_tokens}" * (staleness > 0)
            try:
                config = load_train_config(line.split(), run.file)
                check_train_settings(config)
            except ConfigError:
                continue  # the ranks do not divide the batch or the model so
            yield line, config


def limit_of(run: MeasuredRun, config: TrainConfig, found: Timeline) -> str:
    """Name what the time of a step depends on most."""
    training, generation = found.share("trainer"), found.share("replica")
    if training >= generation:
        return "training"
    # A response may take `staleness` + 1 steps, and no division makes a decoding step shorter.
    longest = run.costs.decode * run.lengths.max() / (config.trainer.max_staleness + 1)
    return "longest response" if 2 * longest > generation * found.step_seconds else "generation"


def show_async_plan(path: Path, trace: Path | None = None) -> None:
    """Print what each staleness, over-sampling and division of the ranks would give a run.

    Args:
        trace: the file for the timeline of the run, which Perfetto and chrome://tracing open.
    """
    if trace is not None:  # also of a run that cannot be planned
        spans = recorded_spans(path)
        with replacing(trace) as fresh:
            fresh.write_text(json.dumps(chrome_trace(spans)))
        print(f"{trace}: {len(spans)} spans, for https://ui.perfetto.dev")
    run = read_run(path)
    own, table = run.simulated(run.config), Table()
    for name in ("staleness, oversample", "train", "generate", "tokens/s", "× run", "limit"):
        table.add_column(name, justify="right", no_wrap=name == "limit")
    found = []
    for line, config in candidates(run):
        timeline, division = run.simulated(config), division_of(config)
        gain = timeline.tokens_per_second / own.tokens_per_second
        found.append((gain, division.staleness, line))
        copies = f"{division.copies}{'' if division.apart else ', in turns'}"
        rate, limit = f"{timeline.tokens_per_second:.0f}", limit_of(run, config, timeline)
        times = config.actor_rollout_ref.rollout.oversample or division.staleness + 1
        pace = f"{division.staleness}, {times:g}"
        table.add_row(pace, str(division.trainers), copies, rate, f"{gain:.2f}", limit)
    if not found:
        problem = "has roles whose ranks leave no division of actor and rollout; see placement"
        raise ConfigError(f"plan --async: {path} {problem}", key="--async")
    Console(highlight=False).print(table)
    print(f"a step of the run: {run.seconds:.3g} s measured, {own.step_seconds:.3g} s simulated")
    near = [item for item in found if item[0] >= NEAR * max(found)[0]]
    print(f"recommended: {min(near, key=lambda item: (item[1], -item[0]))[2]}")
