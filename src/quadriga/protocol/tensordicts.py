"""The classes of tensordict, imported without the compiler of torch.

tensordict marks three functions for `torch.compile`, and a mark imports the compiler: twice the
time of `import torch`, in each process. Here the functions stay without marks. This changes a
`torch.compile` of code that copies or locks a TensorDict: such a program imports tensordict before
Quadriga.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.compiler

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


@contextmanager
def _without_marks() -> Iterator[None]:
    names = "allow_in_graph", "assume_constant_result"
    marks = {name: getattr(torch.compiler, name) for name in names}
    for name in names:
        setattr(torch.compiler, name, _unmarked)
    try:
        yield
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


def _unmarked(function: FunctionT) -> FunctionT:
    return function


with _without_marks():
    from tensordict import (
        NonTensorData as NonTensorData,
        NonTensorStack as NonTensorStack,
        TensorDict as TensorDict,
        TensorDictBase as TensorDictBase,
    )
