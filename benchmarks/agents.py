"""What episodes cost: many whose environments sleep, and several turns against one turn.

    python benchmarks/agents.py            # prints JSON; minutes
    python benchmarks/agents.py --quick    # seconds
    python benchmarks/agents.py --engine vllm  # the turns alone, on another rollout engine

The environment of each episode sleeps half a second in each turn. The limit is what so many
sleeping environments can do: each a turn in half a second. The first turn of all is not counted.
`memory_mib` is the resident memory of this process before and after the turns.

The second part generates with two small models: responses of the same length in one turn, and in
several turns with an environment that answers at once. What a turn costs beside the model does not
depend on the size of the model, so its share does; the goal is for the larger one, with which
alone other engines than `hf` generate. `seconds` are CPU seconds of this process in the rollout
with one thread, the median of three steps. Both are run in turn, the first pair to warm up; the
overhead is the median of the other pairs. `computed` are the positions that the model has computed
in all steps (`hf`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil

ENVIRONMENT = """
import asyncio

class Environment:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, row): ...

    async def step(self, action):
        await asyncio.sleep(self.seconds)
        return "go on"
"""


SIZES = {"1 M": (), "8 M": (384, 4, 6, 3, 1024)}  # parameters of the model, and its `TinyModel`


def environments(file: Path, episodes: int, turns: int) -> dict[str, float]:
    """Return the share of the limit that `episodes` sleeping environments reach."""
    from quadriga.agents.environments import Action, EnvironmentRef
    from quadriga.agents.pool import EpisodePool

    def acts(count: int) -> list[Action]:
        return [Action("a", turn) for turn in range(1, count + 1)]

    ref = EnvironmentRef(str(file), "Environment", {"seconds": 0.5}).loaded()
    pool = EpisodePool(ref, num_processes=2, timeout_s=60.0)
    process = psutil.Process()

    def played(first: int, last: int) -> float:
        """Play the turns `first` … `last` - 1 of all episodes, and return the seconds."""
        began, done = time.perf_counter(), dict.fromkeys(range(episodes), first)
        for number in done:
            pool.play(number, {}, acts(first))
        while min(done.values()) < last:
            pool.wait(1.0)
            for answer in pool.answers():
                assert answer.status == "observed", answer
                done[answer.episode] += 1
                if done[answer.episode] < last:
                    pool.play(answer.episode, {}, acts(done[answer.episode]))
        return time.perf_counter() - began

    played(0, 2)  # `reset`, and the first turn
    before, seconds = process.memory_info().rss, played(2, 2 + turns)
    after = process.memory_info().rss
    pool.close()
    return {
        "episodes": episodes, "turns": turns, "seconds": round(seconds, 2),
        "share_of_limit": round(0.5 * turns / seconds, 3),
        "memory_mib_before": before >> 20, "memory_mib_after": after >> 20,
    }  # fmt: skip


def rollouts(
    folder: Path, size: str, engine: str, turns: int, tokens: int, rows: int
) -> dict[str, float]:
    """Return what the rollouts of `rows` responses cost, in so many turns of so many tokens."""
    import quadriga
    from quadriga.models.tiny import TinyModel, write_tiny_model
    from quadriga.observability import metrics
    from quadriga.rollout.hf.generation import CachedModel

    write_tiny_model(folder / "model", ["a prompt", "go on"], TinyModel(*SIZES[size]))
    computed, forward = [0], CachedModel.forward

    def counting(self: Any, cache: Any, ids: Any, *arguments: Any) -> Any:
        computed[0] += 0 if ids.is_meta else ids.numel()  # that of the memory plan
        return forward(self, cache, ids, *arguments)

    alone: dict[str, Any] = {"reward": lambda response: float(len(response) % 2)}
    own: dict[str, Any] = alone if turns == 1 else {
        "agent": {"path": str(folder / "sleeping.py"), "max_turns": turns,
                  "max_turn_tokens": tokens},
        "slice_tokens": tokens,
    }  # fmt: skip
    cpu = SimpleNamespace(perf_counter=time.process_time)
    with (
        mock.patch.object(CachedModel, "forward", counting),
        mock.patch.object(metrics, "time", cpu),
    ):
        history = quadriga.GRPO(
            str(folder / "model"),
            data=[{"prompt": f"a prompt {i}"} for i in range(rows // 2)], steps=3, responses=8,
            batch_size=rows // 8, mini_batch_size=rows // 8, test_freq=0, backend="local",
            max_response_length=turns * (tokens + 32) if turns > 1 else tokens,
            folder=str(folder / f"{turns}"), loggers=["jsonl"], overwrite=True,
            **{"actor_rollout_ref.rollout.sampling.ignore_eos": True}, **own,
            **{"actor_rollout_ref.rollout.name": engine},
            **{"trainer.threads_per_worker": 1},  # threads that wait take CPU seconds, too
        ).train().history  # fmt: skip
    return {
        "turns": turns, "rows": rows, "computed": computed[0],
        "tokens": history[-1]["response_length/mean"],
        "seconds": median(row["time/rollout"] for row in history),
    }  # fmt: skip


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engine", help="measure the turns with this rollout engine alone")
    options = parser.parse_args()
    quick, engine = options.quick, options.engine or "hf"
    sizes, rows, tokens = list(SIZES)[: 1 if quick else 2], 16 if quick else 64, 8 if quick else 48
    count = 2 if quick else 6
    if engine != "hf":  # each start takes many seconds
        sizes, count = list(SIZES)[1:], 4
    report: dict[str, Any] = {"engine": engine, "turns": {}}
    values: dict[str, tuple[float, float, bool]] = {}  # and the goal, and whether it is met
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sleeping.py"
        file.write_text(ENVIRONMENT)
        if options.engine is None:
            counts = (50,) if quick else (100, 1000)
            found = [environments(file, count, 2 if quick else 8) for count in counts]
            report["environments"] = found
            share = found[-1]["share_of_limit"]
            values["share of the limit"] = share, 0.9, share >= 0.9
        for size in sizes:
            pairs = report["turns"][size] = []
            for _ in range(count):
                several = rollouts(Path(folder), size, engine, 4, tokens, rows)
                length = round(several["tokens"])
                pairs.append((several, rollouts(Path(folder), size, engine, 1, length, rows)))
    overhead = median(several["seconds"] / one["seconds"] - 1 for several, one in pairs[1:])
    values["overhead of turns"] = overhead, 0.1, overhead <= 0.1
    if engine == "hf":
        computed = median(several["computed"] / one["computed"] for several, one in pairs)
        values["computed over needed"] = computed, 1.05, computed <= 1.05
    names = "value", "goal", "met"
    goals = {name: dict(zip(names, value, strict=True)) for name, value in values.items()}
    print(json.dumps({**report, "goals": goals}, indent=2))


if __name__ == "__main__":
    main()
