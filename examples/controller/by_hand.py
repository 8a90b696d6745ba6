"""Two workers that no group starts. Each reads its place from the variables that torchrun sets.

Run: python examples/controller/by_hand.py
Or:  torchrun --nproc-per-node 2 examples/controller/by_hand.py rank
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from quadriga.single_controller import Dispatch, Worker, register


class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def total(self, numbers: Sequence[int]) -> int:
        """Return the sum of this rank's numbers. A method is called like any other one."""
        return sum(numbers[self.rank :: self.world_size])


def run_rank() -> int:
    """Make the worker of this process and call it."""
    worker = Adder()
    total: int = worker.total(range(8))
    print(f"rank {worker.rank} of {worker.world_size}: {total}")
    return total


def main() -> list[str]:
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    print(*lines, sep="\n")
    return lines


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else main()
