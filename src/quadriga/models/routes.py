"""The experts that a mixture of experts computes for each token: recorded in the rollout, and taken
again in training (rollout routing replay, R3, arXiv 2510.11370).

A small difference of the hidden states can change which experts a router prefers, and then the
log-probability of a token changes by much more than by rounding. With replay the training engine
computes a token with the experts of the rollout. Their weights come from the router's own scores at
these experts, so the gradient reaches the router.

Whatever the architecture, a layer chooses by one `torch.topk` of scores [tokens, experts].
`Routers` finds this call while the layer computes, also when activation checkpointing computes it
again.

Shapes: N tokens in the order in which the model computes them, L layers with experts, K experts of
a token, E experts of a layer.
"""

import re
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from quadriga.errors import ModelError

UNKNOWN = -1
"""In place of an expert: padding, or a token that was not computed. The router chooses itself."""

CHOOSE_OTHERWISE = ("deepseek_v4", "jetmoe", "phimoe", "zaya")
"""Architectures whose layers choose experts in another way, or with two kinds of layers."""

_TOP_K = (torch.topk, torch.Tensor.topk)


def take_experts(given: Tensor, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scores, experts), [N, K] each: the experts `given`, or the router's `own` where a
    given one is `UNKNOWN`.

    Args:
        given: [N, K], the experts of the rollout.
        scores: [N, E], of all experts.
        own: [N, K], the experts that the router has chosen.
    """
    given = given.to(own.device, own.dtype)
    chosen = torch.where(given == UNKNOWN, own, given)
    return scores.gather(-1, chosen), chosen


class Routers(TorchFunctionMode):
    """The layers with experts of a model. Their `forward` is wrapped, which changes no weight name.

    Attributes:
        layers: L; 0 of a dense model, and of an architecture of `CHOOSE_OTHERWISE`.
        experts: E.
        dtype: the smallest integer type of expert numbers and `UNKNOWN`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._name = f"{type(model).__name__} (model_type {model.config.model_type!r})"
        refused = model.config.model_type in CHOOSE_OTHERWISE
        named = () if refused else model.named_modules()
        found = {n: m for n, m in named if isinstance(getattr(m, "experts", None), nn.Module)}
        self.layers, self._names, sizes = len(found), list(found), [0]
        for number, layer in enumerate(found.values()):
            layer.forward = partial(self._compute, number, layer.forward)
            sizes += [p.shape[0] for p in layer.experts.parameters() if p.dim() == 3]
        self.experts = max(sizes)
        self.dtype = torch.int8 if self.experts - 1 <= torch.iinfo(torch.int8).max else torch.int16
        self._follows, self._layer = False, 0
        self._routes: Tensor | None = None
        self._chosen: dict[int, Tensor] = {}

    def check(self, found: int | None = None) -> None:
        """Raise `ModelError` if there is no layer with experts, or `found` are not all of them."""
        if not self.layers or found not in (None, self.layers):
            raise ModelError(
                f"{self._name} has {self.layers} layers with experts whose choice can be replayed"
                f"{f', and {found} of them chose' if found else ''}; set "
                "actor_rollout_ref.rollout.replay_routes=false"
            )

    def follow(self, routes: Tensor | None, *, record: bool = False) -> None:
        """Take the experts `routes` [N, L, K] in the next pass, and in what its backward pass
        computes again; None: the routers choose. `record`: `chosen` is read after the pass."""
        self._routes, self._follows = routes, record or routes is not None
        self._chosen = {}

    def chosen(self) -> Tensor:
        """Return the experts of the last pass, [N, L, K] of `dtype`.

        Raises:
            ModelError: a layer has not chosen experts, or chooses them in another way.
        """
        self.check(len(self._chosen))
        return torch.stack([self._chosen[number] for number in range(self.layers)], 1)

    @cached_property
    def decoder_layers(self) -> list[int]:
        """The number of the decoder layer that each layer with experts is in, by its name."""
        return [int(re.findall(r"\.(\d+)\.", name)[0]) for name in self._names]

    def of_decoder_layers(self, found: Tensor) -> Tensor:
        """Return the experts of the layers that have some, [N, L, K] of `dtype`, from those that a
        rollout engine gives for all decoder layers, [N, decoder layers, K]."""
        return found[:, self.decoder_layers].to(self.dtype)

    def __torch_function__(
        self, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """Note what `torch.topk` returns of scores [N, E], or replace it by the given experts."""
        found = function(*args, **(kwargs or {}))
        # DeepSeek first chooses groups of experts, from scores [N, groups, experts] and
        # [N, groups].
        if function not in _TOP_K or args[0].dim() != 2 or args[0].shape[1] < self.experts:
            return found
        values, own = found
        if self._routes is not None:
            values, own = take_experts(self._routes[:, self._layer], args[0], own)
        self._chosen[self._layer] = own.to(self.dtype)
        return torch.return_types.topk((values, own))

    def _compute(self, number: int, forward: Any, *args: object, **kwargs: object) -> object:
        if not self._follows:
            return forward(*args, **kwargs)
        self._layer = number
        with self:
            return forward(*args, **kwargs)
