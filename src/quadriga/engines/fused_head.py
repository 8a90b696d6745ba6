"""Replace the output layer of a language model, so that it does not return all the logits.

The output layer of a sharded model has its full weight only while the model runs, so the
log-probabilities must be computed at that moment. `FusedHead` replaces the layer's `forward`. What
the model then returns as its logits is the result of a function of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.engines.loading.sharding import class_name
from quadriga.models.cpu_linear import CpuLinear

HeadFn = Callable[[Tensor, Tensor], Tensor]
"""(hidden states that the output layer receives, its weight [V, D]) -> the model's "logits"."""

MIN_FUSED_LOGITS = 2**26
"""Logits of a micro-batch (tokens × vocabulary) from which on the fused head is used. It costs a
fourth matrix product and saves this many logits, 256 MB in float32."""


class FusedHead:
    """Computes a function in place of the output layer, and the layer itself otherwise."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._layer_forward = layer.forward
        self._function: HeadFn | None = None
        # Only the instance's `forward` is replaced: hooks and the weight's name do not change.
        layer.forward = self._forward  # type: ignore[method-assign, assignment]  # on purpose

    def _forward(self, hidden: Tensor) -> Tensor:
        if self._function is None:
            return self._layer_forward(hidden)
        return self._function(hidden, self._layer.weight)

    @contextmanager
    def replaced_by(self, function: HeadFn) -> Iterator[None]:
        """Within the block, the layer computes `function`."""
        self._function = function
        try:
            yield
        finally:
            self._function = None


def fusable_layer(model: PreTrainedModel, run: Callable[[], Tensor]) -> nn.Linear | str:
    """Return the model's output layer if its logits are hidden @ weightᵀ, else the reason why not.

    `run` returns the model's logits for any input. They must be the very tensor that the output
    layer returned. This test finds every model that scales, caps or slices its logits afterwards,
    without a list of models or settings.
    """
    layer: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # none
    name = class_name(model)
    if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, CpuLinear):
        return f"the output layer of {name} is {type(layer).__name__}, not Linear"
    if layer.bias is not None:
        return f"the output layer of {name} has a bias"
    returned: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: returned.append(output))
    with torch.no_grad():
        logits = run()
    hook.remove()
    if len(returned) != 1 or returned[0] is not logits:
        return f"{name} changes its logits after the output layer"
    return layer
