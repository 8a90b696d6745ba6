"""Four ranks, each with its own state. Run: python examples/controller/accumulator.py [ray]"""

from __future__ import annotations

import sys

from quadriga.backends import get_backend
from quadriga.single_controller import Dispatch, Worker, register


class Accumulator(Worker):
    """Keep a sum that starts at the number of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.value = self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        """Add x on every rank and return the sum of the rank."""
        self.value += x
        return self.value


def main(backend_name: str = "local") -> list[int]:
    backend = get_backend(backend_name)
    backend.start(num_cpus=4)
    pool = backend.resource_pool([4], use_gpu=False)
    group = backend.worker_group(pool, backend.class_with_args(Accumulator))
    sums: list[int] = group.add(1)
    print("after adding 1:", sums)
    group.shutdown()
    backend.shutdown()
    return sums


if __name__ == "__main__":
    main(*sys.argv[1:])
