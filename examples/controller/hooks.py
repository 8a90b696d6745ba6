"""Functions that run before and after each call of a group.

Run: python examples/controller/hooks.py [ray]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from quadriga.backends import get_backend
from quadriga.single_controller import Dispatch, Worker, register, with_hooks


class Adder(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        """Return the sum of x and the rank."""
        return self.rank + x


class CallLog:
    """Notes the arguments and the result of each call."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def before(self, label: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self.lines.append(f"{label} receives {[*args, *kwargs.values()]}")

    def after(self, label: str, value: object) -> None:
        self.lines.append(f"{label} returns {value}")


def main(backend_name: str = "local") -> list[str]:
    backend = get_backend(backend_name)
    backend.start(num_cpus=2)
    pool = backend.resource_pool([2], use_gpu=False)
    log = CallLog()
    group = backend.worker_group(
        pool, backend.class_with_args(Adder), method_factory=with_hooks(log.before, log.after)
    )
    group.add(5)
    print(*log.lines, sep="\n")
    group.shutdown()
    backend.shutdown()
    return log.lines


if __name__ == "__main__":
    main(*sys.argv[1:])
