"""The output layer of a language model, made to give what is wanted instead of all the logits.

A sharded model's output layer has its weights only while the model runs, so the work is done there:
`FusedHead` takes the place of the layer's `forward`, and what the model returns as its logits is
what the task made of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Task = Callable[[Tensor, Tensor], Tensor]
"""(hidden states as the layer is given them, weight [V, D]) -> what the model is to return."""

SMALLEST_FUSED = 2**26
"""Logits of a micro-batch (tokens × vocabulary) from which on the fused head is worth its fourth
matrix product: 256 MB in float32."""


class FusedHead:
    """Stands in the layer's place while a task is set, and leaves it as it is otherwise."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._plain = layer.forward
        self._task: Task | None = None
        layer.forward = self._forward  # type: ignore[method-assign, assignment]

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._task is None:
            return self._plain(hidden)
        return self._task(hidden, self._layer.weight)

    @contextmanager
    def doing(self, task: Task) -> Iterator[None]:
        """Within the block the layer does `task`."""
        self._task = task
        try:
            yield
        finally:
            self._task = None


def output_layer(model: PreTrainedModel) -> Any:
    """The module that makes logits of hidden states."""
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]


def why_not_fused(model: PreTrainedModel, run: Callable[[], Tensor]) -> str | None:
    """Why this model's logits are not simply hidden @ weightᵀ; None if they are.

    `run` gives the model's logits of any input. They must be what the output layer gave, the very
    tensor: a model that scales, caps or cuts them afterwards is found out whatever it is called.
    """
    layer = output_layer(model)
    name = type(model).__name__
    if type(layer) is not nn.Linear:
        return f"the output layer of {name} is {type(layer).__name__}, not Linear"
    if layer.bias is not None:
        return f"the output layer of {name} has a bias"
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        logits = run()
    hook.remove()
    if len(seen) != 1 or seen[0] is not logits:
        return f"{name} changes its logits after the output layer"
    return None
