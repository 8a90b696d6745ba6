"""A group on Ray that outlives its program, and a second program that finds it by its names.

Run: python examples/controller/detached_group.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray

from quadriga.backends import get_backend
from quadriga.backends.ray import RayClassWithInitArgs, RayWorkerGroup
from quadriga.single_controller import Dispatch, Worker, register


class Counter(Worker):
    """Count calls."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        self.value += 1
        return self.value


def find(address: str, namespace: str, *names: str) -> None:
    """Connect to the cluster, find the ranks, call them and end them: the second program."""
    backend = get_backend("ray")
    backend.start(address=address, namespace=namespace)
    group = RayWorkerGroup.from_detached(
        worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Counter)
    )
    print("the second program counts", group.count())
    group.shutdown()
    backend.shutdown()


def main() -> str:
    backend = get_backend("ray")
    backend.start(num_cpus=2, namespace="examples")
    pool = backend.resource_pool([2], use_gpu=False)
    group = backend.worker_group(
        pool, backend.class_with_args(Counter), detached=True, name_prefix="lasting_"
    )
    print("the first program counts", group.count())
    context = ray.get_runtime_context()
    # With `ray start --head`, this program may end before the second one starts.
    second = subprocess.run(
        [sys.executable, __file__, context.gcs_address, context.namespace, *group.worker_names],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    print(second.stdout, end="")
    pool.release()
    backend.shutdown()
    return second.stdout


if __name__ == "__main__":
    find(*sys.argv[1:]) if sys.argv[1:] else main()
