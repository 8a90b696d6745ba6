"""A rank whose calls interleave on an event loop: a result does not change after its call."""

import asyncio

import numpy as np
import pytest
import torch

from group_fixtures import group_on_ray
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

SIZE = 2**20


class Refiller(Worker):
    """Each call fills one buffer and returns it in some form."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(1, SIZE)
        self.numbers = [0] * 1000

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def fill_later(self, kind, i):
        await asyncio.sleep(0.001)
        return self.result(kind, i)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fill(self, kind, i):
        return self.result(kind, i)

    def result(self, kind, i):
        self.tensor.fill_(i)
        self.numbers[:] = [i] * 1000
        return {
            "batch": lambda: DataProto.from_dict({"x": self.tensor}),
            "arrays": lambda: {"x": [self.tensor.numpy()]},
            "numbers": lambda: self.numbers,
        }[kind]()


def numbers_in(value) -> set[float]:
    """The different numbers in a result of `Refiller`."""
    if isinstance(value, int | float):
        return {value}
    if isinstance(value, DataProto):
        value = value.batch
    if not isinstance(value, list | np.ndarray | torch.Tensor):
        value = value["x"]
    if isinstance(value, np.ndarray | torch.Tensor):
        return set(np.unique(np.asarray(value)).tolist())
    return set().union(*map(numbers_in, value))


refiller = group_on_ray(Refiller, 1)


@pytest.mark.parametrize("kind", ["batch", "arrays", "numbers"])
def test_a_result_does_not_change_when_the_next_call_fills_the_same_buffer(refiller, kind):
    for method in (refiller.fill, refiller.fill_later):
        futures = [method(kind, i) for i in range(20)]
        seen = [numbers_in(future.get()[0]) for future in futures]
        assert seen == [{i} for i in range(20)]
