"""What slow environments cost: many episodes whose environments sleep, without a model.

    python benchmarks/agents.py            # prints JSON; minutes
    python benchmarks/agents.py --quick    # seconds

The environment of each episode sleeps half a second in each turn. The limit is what so many
sleeping environments can do: each a turn in half a second. The first turn of all is not counted.
`memory_mib` is the resident memory of this process before and after the turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

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


def environments(file: Path, episodes: int, turns: int) -> dict[str, float]:
    """Return the share of the limit that `episodes` sleeping environments reach."""
    from quadriga.agents.environments import EnvironmentRef
    from quadriga.agents.pool import EpisodePool

    ref = EnvironmentRef(str(file), "Environment", {"seconds": 0.5}).loaded()
    pool = EpisodePool(ref, num_processes=2, timeout_s=60.0)
    process = psutil.Process()

    def played(first: int, last: int) -> float:
        """Play the turns `first` … `last` - 1 of all episodes, and return the seconds."""
        began, done = time.perf_counter(), dict.fromkeys(range(episodes), first)
        for number in done:
            pool.play(number, {}, ["a"] * first)
        while min(done.values()) < last:
            pool.wait(1.0)
            for answer in pool.answers():
                assert answer.status == "observed", answer
                done[answer.episode] += 1
                if done[answer.episode] < last:
                    pool.play(answer.episode, {}, ["a"] * done[answer.episode])
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


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sleeping.py"
        file.write_text(ENVIRONMENT)
        counts = (50,) if quick else (100, 1000)
        found = [environments(file, count, 2 if quick else 8) for count in counts]
    share = found[-1]["share_of_limit"]
    goals = {"share of the limit": {"value": share, "goal": 0.9, "met": share >= 0.9}}
    print(json.dumps({"environments": found, "goals": goals}, indent=2))


if __name__ == "__main__":
    main()
