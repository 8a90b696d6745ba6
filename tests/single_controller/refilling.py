"""Workers with coroutine methods that reuse the buffer of their result."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import torch

from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

SIZE = 2**20


@dataclass
class Wrapped:
    """An object of the user's that contains an array."""

    array: np.ndarray


class Refiller(Worker):
    """Each call fills one buffer and returns it in some form."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(1, SIZE)
        self.objects = np.array([[0] * 1000, None], dtype=object)[:1]
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
        self.objects[0][:] = [i] * 1000
        return {
            "batch": lambda: DataProto.from_dict({"x": self.tensor}),
            "objects": lambda: DataProto(non_tensor_batch={"x": self.objects}),
            "meta": lambda: DataProto(meta_info={"x": self.numbers}),
            "tensor": lambda: self.tensor,
            "arrays": lambda: {"x": [self.tensor.numpy()]},
            "wrapped": lambda: Wrapped(self.tensor.numpy()),
            "numbers": lambda: self.numbers,
        }[kind]()


def numbers_in(value) -> set[float]:
    """The different numbers in a result of `Refiller`."""
    if isinstance(value, int | float):
        return {value}
    if isinstance(value, DataProto):
        halves = (value.batch or {}), value.non_tensor_batch, value.meta_info
        value = [half["x"] for half in halves if "x" in half]
    elif isinstance(value, dict):
        value = value["x"]
    elif isinstance(value, Wrapped):
        value = value.array
    if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        return set(np.unique(np.asarray(value)).tolist())
    return set().union(*map(numbers_in, value))
