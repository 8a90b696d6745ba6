"""What generation beside training gives, in virtual time; and the same times against a run on Ray.

    python benchmarks/streams.py --out streams.json --plot docs/streams_timeline.png
    python benchmarks/streams.py --quick        # few steps, below a minute
    python benchmarks/streams.py --trace run.json   # for Perfetto and chrome://tracing
    python benchmarks/streams.py --sweep        # limits and spreads of lengths
    python benchmarks/streams.py --ray          # one generator and one trainer on two cores
    python benchmarks/streams.py --engine vllm  # the same, streamed against synchronous

Prints JSON. The constants of the simulated runs are those that verl publishes for its fully
asynchronous recipe (docs/advance/fully_async.md: Qwen2.5-Math-7B on 128 H20, 512 prompts × 16
responses): seconds of a synchronous step and of an asynchronous update, scaled from its limit of
28 672 tokens to 16 384, with 64 responses of a step on each rank. The page does not say how long
the responses are: medians of 1000 and 2000 tokens are assumed, lognormal with σ = 1. Not from
this page: 57 344 bytes of keys and values per token (the config of the model), 4.0 TB/s and half
of 148 TFLOP/s (H20). The exit code is 1 if a goal is missed, except with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.cli.async_plan import MeasuredRun, candidates, division_of, read_run
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import TrainConfig
from quadriga.streams.simulation import Costs, Division, Simulation, Timeline
from quadriga.streams.timeline import Counts, chrome_trace

RANKS, GROUPS, N, LIMIT = 8, 32, 16, 16_384
SCALE = LIMIT / 28_672
GENERATION, OLD_LOG_PROB, UPDATE = (
    s * SCALE for s in (177.85, 53.92, 113.81)
)  # all ranks, in turns
UPDATE_APART = 113.16 * SCALE  # half of the ranks, without a pass over old log-probabilities
PUBLISHED = 356.30 / 150.63  # seconds of a step, synchronous over asynchronous
FIXED = {"decode_context": 57_344 / 4.0e12, "prefill": 2 * 7.6e9 / 74e12, "sync": 0.12}
ROWS, SLICE = 128, 256


def lognormal(steps: int, median: float, sigma: float = 1.0) -> Counts:
    """Draw lengths of responses; those beyond the limit are cut."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, (steps * GROUPS, N))
    return np.clip(drawn.round(), 1, LIMIT).astype(np.int64)


def in_turns(staleness: int = 0, **more: int) -> Division:
    """All ranks generate and train."""
    slices = SLICE if staleness else LIMIT
    return Division(RANKS, RANKS, False, GROUPS, staleness, slices, **more)


def apart(generators: int, staleness: int) -> Division:
    """Some ranks generate, and the others train."""
    slices = SLICE if staleness else LIMIT
    return Division(RANKS - generators, generators, True, GROUPS, staleness, slices, ROWS)


def figures(found: Timeline) -> dict[str, float]:
    """What is shown of a simulated run."""
    return {
        "step_s": found.step_seconds, "tokens_per_second": found.tokens_per_second,
        "trainer": found.share("trainer"), "generators": found.share("replica"),
        "age": float(found.ages.mean()),
    }  # fmt: skip


def published(median: float, steps: int) -> tuple[dict[str, object], dict[str, Timeline]]:
    """The published setting: synchronous, and asynchronous with half of the ranks each."""
    lengths = lognormal(steps, median)
    tokens = lengths.mean() * GROUPS * N
    train = (OLD_LOG_PROB + UPDATE) * RANKS / tokens

    def synchronous(decode: float) -> Timeline:
        return Simulation(in_turns(), Costs(decode, train=train, **FIXED), lengths).run()

    def generation(decode: float) -> float:
        found = synchronous(decode)
        return found.share("replica") * found.step_seconds

    # The time of a decoding step with which generation takes as long as published.
    low, high = generation(4e-3), generation(5e-3)
    costs = Costs(4e-3 + 1e-3 * (GENERATION - low) / (high - low), train=train, **FIXED)
    half = replace(costs, train=UPDATE_APART * (RANKS // 2) / tokens)
    runs = {"synchronous": synchronous(costs.decode)}
    runs["synchronous, half each"] = Simulation(apart(RANKS // 2, 0), half, lengths).run()
    for staleness in (1, 2, 4):
        name, division = f"staleness {staleness}", apart(RANKS // 2, staleness)
        runs[name] = Simulation(division, half, lengths).run()
    more = apart(RANKS // 2 + 1, 2)
    runs["staleness 2, 5 ranks generate"] = Simulation(more, half, lengths).run()
    for staleness in (2, 4):
        keeps = replace(apart(RANKS // 2, staleness), resets_caches=False)
        name = f"staleness {staleness}, reset_caches=false"
        runs[name] = Simulation(keeps, half, lengths).run()
    runs["staleness 2, training as on all ranks"] = Simulation(
        apart(RANKS // 2, 2), costs, lengths
    ).run()
    base = runs["synchronous"].tokens_per_second
    shown = {
        name: figures(r) | {"speed_up": r.tokens_per_second / base} for name, r in runs.items()
    }
    about = {"mean_tokens": lengths.mean(), "at_limit": (lengths == LIMIT).mean()}
    return {**about, "decode_s": costs.decode, "runs": shown}, runs


def recorded(folder: Path, costs: Costs, lengths: Counts) -> MeasuredRun:
    """Write the folder of a synchronous run in turns with these costs, as a real run writes it.
    Return the run with these costs; `read_run` estimates costs from the folder.

    Args:
        lengths: of the responses of each group; 12 groups are a step.
    """
    given = [
        f"trainer.n_gpus_per_node={RANKS}", "data.train_batch_size=12", "trainer.max_staleness=0",
        f"actor_rollout_ref.rollout.n={lengths.shape[1]}", f"data.max_response_length={LIMIT}",
        "actor_rollout_ref.rollout.micro_batch_size=128", "algorithm.adv_estimator=grpo",
    ]  # fmt: skip
    config = load_config(TrainConfig, given)
    run = Simulation(division_of(config), costs, lengths).run()
    tracks = ([span for span in run.spans if span.track == track] for track in (
        "controller", "trainer", "sync"))  # fmt: skip
    rows, samples = [], []
    for step, (wait, update, sync) in enumerate(zip(*tracks, strict=True)):
        own = lengths[run.numbers[step]].ravel()
        rows.append({
            "step": step + 1, "progress/elapsed": sync.end, "batch/tokens": int(own.sum()),
            "response_length/mean": float(own.mean()), "response_length/max": int(own.max()),
        } | {f"time/{name}": span.end - span.start for name, span in (
            ("rollout", wait), ("update_actor", update), ("sync_weights", sync))})  # fmt: skip
        sample = {"step": step + 1, "split": "train", "prompt": "", "response": "", "reward": 0.0}
        for number, group in enumerate(own.reshape(-1, lengths.shape[1])):
            named = sample | {"group": f"{step + 1}-0-{number}"}
            samples += [named | {"response_tokens": int(length)} for length in group]
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    for name, found in (("metrics", rows), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return MeasuredRun(folder / "config.yaml", config, costs, lengths, 0, run.step_seconds)


def apart_over_in_turns(run: MeasuredRun, staleness: int) -> dict[int, float]:
    """Tokens per second apart, by generating ranks, over tokens per second in turns."""
    found = {}
    for _, config in candidates(run):
        factor = config.actor_rollout_ref.rollout.oversample
        if config.trainer.max_staleness == staleness and factor is None:
            division = division_of(config)
            copies = division.copies if division.apart else 0
            found[copies] = run.simulated(config).tokens_per_second
    return {copies: rate / found[0] for copies, rate in found.items()}


def scaled_costs() -> Costs:
    """Costs of steps of 12 groups, which are simulated sooner; a token of them stands for
    GROUPS / 12 tokens of `published`, and takes as long as these."""
    of_token = {"train": UPDATE * RANKS / (1630 * GROUPS * N), **FIXED}
    scaled = {name: seconds * GROUPS / 12 for name, seconds in of_token.items()}
    return Costs(6.4e-3, **{**scaled, "sync": FIXED["sync"]})


def long_responses(shares: tuple[float, ...], steps: int) -> dict[str, object]:
    """In turns against apart at staleness 2, by the share of responses at the limit: with the times
    of the simulation, and with the times that `plan --async` finds in the record of a synchronous
    run. Both simulations have the lengths that the plan reads or draws.
    """
    rng, costs = np.random.default_rng(0), scaled_costs()
    ratios: dict[str, object] = {}
    for share in shares:
        lengths = lognormal(steps, 1000, 0.5)[: 12 * steps]
        lengths[rng.random(lengths.shape) < share] = LIMIT
        with tempfile.TemporaryDirectory() as folder:
            run = recorded(Path(folder) / "run", costs, lengths)
            read = read_run(Path(folder) / "run")
            runs = replace(run, lengths=read.lengths), read
            exact, plan = (apart_over_in_turns(each, 2) for each in runs)
        best = max(exact, key=lambda copies: exact[copies] if copies else 0.0)
        of_plan = max(rate for copies, rate in plan.items() if copies)
        ratios[str(share)] = {
            "apart_over_in_turns": exact[best], "generators": best, "by_the_plan": of_plan,
        }  # fmt: skip
    return ratios


def sweep(steps: int) -> dict[str, object]:
    """Staleness 2 over a synchronous run in turns, by limit and spread of lengths: in turns, and
    with half of the ranks generating. The mean length before the cut at the limit is 1630 tokens,
    or a third of the limit if that is less; steps of 12 groups, as in `long_responses`."""
    found: dict[str, object] = {}
    for limit in (4096, LIMIT):
        for sigma in (0.25, 0.5, 1.0, 1.5):
            median = min(1630, limit / 3) / np.exp(sigma**2 / 2)
            lengths = np.minimum(lognormal(steps, median, sigma)[: 12 * steps], limit)
            base, *runs = (
                Simulation(replace(division, groups=12), scaled_costs(), lengths).run()
                for division in (in_turns(), in_turns(2), apart(RANKS // 2, 2))
            )
            speed_ups = [run.tokens_per_second / base.tokens_per_second for run in runs]
            found[f"limit {limit}, sigma {sigma}"] = dict(
                zip(("in_turns", "apart"), speed_ups, strict=True)
            )
    return found


def over_sampling(steps: int) -> dict[str, object]:
    """In turns, with more groups on their way than a step takes; the rest go on in the next one."""
    lengths = lognormal(steps, 1000)
    costs = Costs(6.4e-3, train=UPDATE * RANKS / (lengths.mean() * GROUPS * N), **FIXED)
    waiting = Simulation(in_turns(), costs, lengths).run()
    found: dict[str, object] = {}
    for factor in (1.25, 1.5, 2.0):
        division = in_turns(1, on_the_way=int(factor * GROUPS))
        run = Simulation(division, costs, lengths).run()
        trained = lengths[run.numbers[steps // 4 : -2]].mean() / lengths.mean()
        found[str(factor)] = {
            "speed_up": run.tokens_per_second / waiting.tokens_per_second,
            "mean_length_trained_over_all": trained,
        }
    return found


def plot(runs: dict[str, Timeline], path: Path, seconds: float = 600.0) -> None:
    """Draw two timelines, one above the other."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"replica": "#4c78a8", "trainer": "#f58518", "sync": "#54a24b", "controller": "#ddd"}
    figure, axes = plt.subplots(2, 1, figsize=(10, 5), sharex=True, layout="constrained")
    for axis, name in zip(axes, ("synchronous", "staleness 2"), strict=True):
        spans = [span for span in runs[name].spans if span.start < seconds]
        tracks = sorted({span.track for span in spans}, reverse=True)
        for span in spans:
            colour = colours[span.track.split()[0]]
            bar = [(span.start, span.end - span.start)]
            axis.broken_barh(
                bar, (tracks.index(span.track) - 0.4, 0.8), color=colour, ec="white", lw=0.2
            )
        axis.set_yticks(range(len(tracks)), tracks)
        axis.set(title=name, xlim=(0, seconds))
    axes[-1].set_xlabel("seconds of virtual time")
    figure.savefig(path, dpi=110)


RAY_STEPS = 12
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""


def task_settings(task: Path) -> list[str]:
    """Write a task to a folder; return the settings of a run on Ray with two ranks."""
    from quadriga.cli.main import main

    data = [f"output={task / 'data'}", f"model_output={task}/model", "train_size=256"]
    assert main(["data", "make", *data, "val_size=8"]) == 0
    (task / "reward.py").write_text(REWARD)  # equal scores would need no update
    return [
        f"reward.path={task}/reward.py", "actor_rollout_ref.actor.optim.lr=1e-6",
        f"actor_rollout_ref.model.path={task}/model", "trainer.n_gpus_per_node=2",
        f"data.train_files=[{task / 'data' / 'train.parquet'}]", "data.train_batch_size=16",
        "data.max_response_length=128", "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", "algorithm.adv_estimator=grpo",
        f"trainer.total_training_steps={RAY_STEPS}", "trainer.test_freq=0",
        "trainer.val_before_train=false", "trainer.threads_per_worker=1",
        "trainer.loggers=[jsonl]", "reward.num_processes=0", "trainer.num_cpus=2",
        "actor_rollout_ref.rollout.slice_tokens=64", "trainer.samples_per_step=32",
    ]  # fmt: skip


def with_engine(name: str) -> dict[str, object]:
    """The tokens that runs on two cores train in a second: in turns on both, with one rank for
    each role, and streamed. Without the first two steps and the last one."""
    from quadriga.observability.jsonl import read_jsonl

    apart = ["placement.actor=[0]", "placement.rollout=[1]"]
    runs = {"synchronous, both ranks": [], "synchronous, apart": apart}
    runs["staleness 1"] = [*apart, "trainer.max_staleness=1"]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = [*task_settings(Path(folder)), f"actor_rollout_ref.rollout.name={name}"]
        given.append("trainer.total_training_steps=8")
        if name == "vllm":
            given.append("actor_rollout_ref.rollout.options={kv_cache_mb: 64}")
        for run, own in runs.items():
            path = f"trainer.default_local_dir={folder}/{run.replace(' ', '_').replace(',', '')}"
            command = [sys.executable, "-m", "quadriga.cli.main", "train", *given, *own, path]
            subprocess.run(command, check=True, stdout=sys.stderr)
            rows = [*read_jsonl(Path(path.partition("=")[2]) / "metrics.jsonl")][1:-1]
            tokens = sum(row["response_length/mean"] * row["batch/sequences"] for row in rows[1:])
            seconds = rows[-1]["progress/elapsed"] - rows[0]["progress/elapsed"]
            found[run] = tokens / seconds
    best = max(found[run] for run in runs if run.startswith("synchronous"))
    speed_up = {run: found[run] / best for run in runs}
    return {"tokens_per_second": found, "over_the_faster_synchronous_run": speed_up}


def on_ray() -> dict[str, dict[str, Any]]:
    """Each of three runs calibrates the simulation, which then predicts all of them."""
    from quadriga.observability.jsonl import read_jsonl
    from quadriga.trainer.roles.registry import load_train_config

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder)
        given = [*task_settings(task), "placement.actor=[0]", "placement.rollout=[1]"]
        streams = {f"staleness {k}": f"trainer.max_staleness={k}" for k in (0, 1, 2)}
        for name, own in streams.items():
            path = f"trainer.default_local_dir={task / name}"
            command = [sys.executable, "-m", "quadriga.cli.main", "train", *given, own, path]
            subprocess.run(command, check=True, stdout=sys.stderr)
            rows = [*read_jsonl(task / name / "metrics.jsonl")]
            # Without the first step, and without the last one, which saves a checkpoint.
            elapsed = [row["progress/elapsed"] for row in rows[1:-1]]
            measured = (elapsed[-1] - elapsed[0]) / (len(elapsed) - 1)
            found[name] = {"measured_s": measured, "simulated_over_measured": {}}
        for source in streams:
            run = read_run(task / source)
            for name, own in streams.items():
                simulated = run.simulated(load_train_config([*given, own])).step_seconds
                ratio = simulated / found[name]["measured_s"]
                found[name]["simulated_over_measured"][f"by the times of {source}"] = ratio
    return found


def goals(speed_up: float, trainer: float, generators: float) -> dict[str, dict[str, object]]:
    """The goals of the published setting at staleness 4, for the shorter responses."""
    values = {
        "speed_up": (speed_up, 2.5),
        "trainer": (trainer, 0.95),
        "generators": (generators, 0.95),
    }
    return {
        name: {"value": value, "goal": goal, "met": value >= goal}
        for name, (value, goal) in values.items()
    }


def main() -> None:
    """Simulate, print JSON, draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--sweep", action="store_true", help="by limit and spread of lengths")
    parser.add_argument("--ray", action="store_true", help="compare with runs on Ray instead")
    parser.add_argument("--engine", help="tokens trained per second with this rollout engine")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="draw the timelines to this picture")
    parser.add_argument("--trace", type=Path, help="write a timeline that Perfetto opens")
    options = parser.parse_args()
    report: dict[str, object]
    if options.engine:
        report = {options.engine: with_engine(options.engine)}
    elif options.sweep:
        report = {"staleness_2_over_synchronous": sweep(24)}
    elif options.ray:
        report = {"ray": on_ray()}
    else:
        steps = 8 if options.quick else 32
        shorter, runs = published(1000, steps)
        report = {"published_speed_up": PUBLISHED, "median 1000": shorter}
        if not options.quick:
            report["median 2000"] = published(2000, steps)[0]
        report["over_sampling"] = over_sampling(steps)
        shares = (0.0, 0.05) if options.quick else (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
        report["long_responses"] = long_responses(shares, steps)
        best, base = runs["staleness 4"], runs["synchronous"]
        speed_up = best.tokens_per_second / base.tokens_per_second
        report["goals"] = goals(speed_up, best.share("trainer"), best.share("replica"))
        if options.plot:
            plot(runs, options.plot)
        if options.trace:
            options.trace.write_text(json.dumps(chrome_trace(runs["staleness 2"].spans)))
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if "goals" in report and not options.quick:
        values = report["goals"]
        assert isinstance(values, dict)
        if not all(goal["met"] for goal in values.values()):
            sys.exit(1)


if __name__ == "__main__":
    main()
