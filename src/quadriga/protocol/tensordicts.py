"""The classes of tensordict, imported without the compiler of torch.

tensordict marks three functions for `torch.compile`, and a mark imports the compiler: twice the
time of `import torch`, in each process. Here the functions stay without marks. This changes a
`torch.compile` of code that copies or locks a TensorDict: such a program imports tensordict before
Quadriga.
"""

from typing import TypeVar
from unittest.mock import patch

import torch.compiler

FunctionT = TypeVar("FunctionT")


def _unmarked(function: FunctionT) -> FunctionT:
    return function


with patch.multiple(torch.compiler, allow_in_graph=_unmarked, assume_constant_result=_unmarked):
    from tensordict import (
        NonTensorData as NonTensorData,
        NonTensorStack as NonTensorStack,
        TensorDict as TensorDict,
        TensorDictBase as TensorDictBase,
    )
