"""The weights of a model: memory of its own, or tensors that a training engine owns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quadriga.errors import ModelError

# A weight in three states. The training engine's tensor is at address 900:
#
#                          module's parameter   memory    after an optimizer step
#   loaded                 own                  100       as it was
#   copied                 own                  100       as it was
#   shared                 of the tensor        900       the new values, and `changed` says so
#
# `changed` compares digests of some elements of each weight. Torch's counter of in-place changes
# would not do, because an optimizer may write through another tensor on the same memory.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 1024
"""Elements of a weight that are compared. An optimizer step changes nearly all elements."""


@dataclass(frozen=True)
class _Shared:
    """A parameter in foreign memory, and the digest of its sample when it was shared."""

    parameter: nn.Parameter
    digest: Tensor


class ModelWeights:
    """The weights of `module`, by the names of its `state_dict`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shared: dict[str, _Shared] = {}

    @property
    def shared_bytes(self) -> int:
        """The bytes of the weights that are shared. Tied names count once."""
        sizes = {s.parameter.data_ptr(): s.parameter.nbytes for s in self._shared.values()}
        return sum(sizes.values())

    def copy(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the values of tensors to weights, in memory of their own.

        Raises:
            ModelError: the model has no weight of that name and shape.
        """
        weights = self._by_name()
        for name, tensor in stream:
            self._copy(weights, name, tensor)

    def share(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Use tensors themselves as weights if dtype, device and layout fit, else copy them.

        Raises:
            ModelError: as `copy`.
        """
        weights = self._by_name()
        for name, tensor in stream:
            weight = _find(weights, name, tensor)
            fits = (
                isinstance(weight, nn.Parameter)
                and (weight.dtype, weight.device) == (tensor.dtype, tensor.device)
                and tensor.is_contiguous()
                and not tensor.is_inference()
            )
            if not fits:
                self._copy(weights, name, tensor)
                continue
            if not _aliases(weight, tensor):
                self._replace(weights, name, tensor.detach())
            self._note(name, weights[name])

    def _copy(self, weights: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        weight = _find(weights, name, tensor)
        if _aliases(weight, tensor):
            # A tied name, or a training engine that sends what is shared already.
            if name in self._shared:
                self._note(name, weight)
        elif name in self._shared:
            values = torch.empty_like(weight).copy_(tensor.detach())
            self._replace(weights, name, values)
        else:
            with torch.no_grad():
                weight.copy_(tensor)

    def changed(self) -> str | None:
        """Return the name of a shared weight that was changed in place since, or None."""
        if not self._shared:
            return None
        before = torch.stack([shared.digest for shared in self._shared.values()])
        now = torch.stack([_sample_digest(shared.parameter) for shared in self._shared.values()])
        # One comparison for all weights, because each one waits for the device.
        different = (before != now).tolist()
        return next((n for n, found in zip(self._shared, different, strict=True) if found), None)

    def unshare(self) -> None:
        """Forget which weights are shared, at the end of the engine."""
        self._shared.clear()

    def _note(self, name: str, weight: Tensor) -> None:
        """Count the values of a shared weight as those of the current version."""
        assert isinstance(weight, nn.Parameter)
        self._shared[name] = _Shared(weight, _sample_digest(weight))

    def _by_name(self) -> dict[str, Tensor]:
        return dict(self._module.state_dict(keep_vars=True))

    def _replace(self, weights: dict[str, Tensor], name: str, new: Tensor) -> None:
        """Put `new` in every place of a parameter; tied weights have several."""
        old, parameter = weights[name], nn.Parameter(new, requires_grad=False)
        for module in self._module.modules():
            for attribute, value in list(module._parameters.items()):
                if value is old:
                    setattr(module, attribute, parameter)
        tied = [other for other, weight in weights.items() if weight is old]
        weights.update(dict.fromkeys(tied, parameter))
        for other in tied:
            self._shared.pop(other, None)


def _sample_digest(weight: Tensor) -> Tensor:
    """Return the digest [] int64 of at most `_SAMPLE` elements, evenly spread over a weight."""
    flat = weight.detach().view(-1)
    step = -(-flat.numel() // _SAMPLE)
    bits = flat[:: max(step, 1)].clone().view(_BITS[weight.element_size()]).to(torch.int64)
    return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()


def _find(weights: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    if name not in weights:
        raise ModelError(
            f"received a weight {name!r}, which the rollout model does not have; "
            "trainer and rollout must load the same model folder"
        )
    weight = weights[name]
    if weight.shape != tensor.shape:
        raise ModelError(
            f"received weight {name!r} with shape {tuple(tensor.shape)}, but in the rollout "
            f"model it has shape {tuple(weight.shape)}"
        )
    return weight


def _aliases(weight: Tensor, tensor: Tensor) -> bool:
    """Return whether both are the same memory in the same form."""
    return (
        weight.data_ptr() == tensor.data_ptr()
        and (weight.dtype, weight.device) == (tensor.dtype, tensor.device)
        and weight.stride() == tensor.stride()
        and weight.numel() > 0
    )
