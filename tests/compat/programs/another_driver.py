"""Drivers of their own: `accumulator`, and `attach ADDRESS NAMESPACE PREFIX`."""

import sys

import quadriga.compat.verl  # noqa: F401

# isort: split
import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class Accumulator(Worker):
    def __init__(self):
        super().__init__()
        self.value = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        self.value += x
        return self.value + self.rank


def accumulator():
    """`ray.init` is not called: the group connects to Ray."""
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(cls=Accumulator), device_name="cpu")
    print("sums", [group.add(x=i) for i in range(3)])
    ray.shutdown()


def attach(address, namespace, prefix):
    """Find a detached group by the names of its workers."""
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    names = [f"{prefix}Calculator_0:{rank}" for rank in range(2)]
    group = RayWorkerGroup.from_detached(name_prefix=prefix, worker_names=names)
    print("total", group.add(5), ray.get(group.execute_rank_zero_async("rank_plus", 1)))
    ray.shutdown()


if __name__ == "__main__":
    {"accumulator": accumulator, "attach": attach}[sys.argv[1]](*sys.argv[2:])
