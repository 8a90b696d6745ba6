"""Decoder layers whose weights are divided over the ranks of tensor parallelism.

A weight becomes a `DTensor` on the mesh of these ranks, and FSDP divides it further over the
data-parallel ranks. In a forward pass, a module sees the part of its own rank as a plain tensor, so
its code computes a smaller layer. The gradient of a weight that is whole on all ranks is a part of
a sum (`Partial`), which FSDP adds up before it reduces the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from quadriga.engines.model_parallel.tensor_plan import (
    TensorPlan,
    blocks_of,
    check_division,
    decoder_parts,
)
from quadriga.parallel.model_parallel.model_ranks import ModelRanks, Subgroup
from quadriga.parallel.model_parallel.token_exchange import gather_tokens, sum_tokens


def divide_layers(model: PreTrainedModel, ranks: ModelRanks, mesh: DeviceMesh | None) -> None:
    """Divide the weights of the decoder layers of `model` in place, before FSDP shards it.

    Args:
        mesh: of the ranks of tensor parallelism. None: for the memory plan, each weight becomes a
            plain tensor of the size that one rank has.

    Raises:
        ConfigError: the model has no plan, or its weights do not divide.
    """
    tensor = ranks.tensor
    check_division(model, tensor.size, "engine")
    plan = TensorPlan.of(model.config)
    for name, layer in decoder_parts(model):
        for path, module in layer.named_modules():
            prefix = f"{name}.{path}" if path else name
            _divide_weights(module, prefix, plan, tensor, mesh)
        for block, module in blocks_of(plan, name, layer):
            _exchange_around(module, tensor)
            for path, inner in module.named_modules():
                if plan.styles and plan.style(f"{block}.{path}.gate_up_proj") == "experts":
                    _divide_experts(inner, tensor)


def whole_weights(model: PreTrainedModel) -> Iterator[int]:
    """Yield the `id` of each weight of a decoder layer that the ranks do not divide."""
    plan = TensorPlan.of(model.config)
    for name, layer in decoder_parts(model):
        for leaf, parameter in layer.named_parameters():
            if plan.division(f"{name}.{leaf}").dim is None:
                yield id(parameter)


def _divide_weights(
    module: nn.Module, prefix: str, plan: TensorPlan, ranks: Subgroup, mesh: DeviceMesh | None
) -> None:
    own = list(module.named_parameters(recurse=False))
    partial_bias = False
    for leaf, parameter in own:
        division = plan.division(f"{prefix}.{leaf}")
        partial_bias |= division.partial_bias
        data, dim = parameter.detach(), division.dim
        if dim is not None:
            data = data.chunk(ranks.size, dim)[ranks.index].clone(
                memory_format=torch.contiguous_format
            )
        placement: Placement = Replicate() if dim is None else Shard(dim)
        value = (
            data if mesh is None else DTensor.from_local(data, mesh, [placement], run_check=False)
        )
        divided = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, divided)
    if own:
        bias_here = not partial_bias or ranks.index == 0
        _use_own_part(module, bias_here)


class _OwnPart(nn.Module):
    """A module that computes with the part of its weights that this rank has."""

    _adds_bias: bool

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value  # not a weight, or the shard of one that FSDP has not gathered
        placement = value.placements[0]
        if not placement.is_replicate():
            return value.to_local()
        own = value.to_local(grad_placements=[Partial()])
        # The sum over ranks has the bias of a rowwise layer once. A product with 0 keeps the
        # gradient, which all ranks must have.
        return own if name != "bias" or self._adds_bias else own * 0.0


def _use_own_part(module: nn.Module, adds_bias: bool) -> None:
    """Let `module` read its weights as `_OwnPart` does."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (_OwnPart, kind), {})
    vars(module)["_adds_bias"] = adds_bias


def _exchange_around(block: nn.Module, ranks: Subgroup) -> RemovableHandle:
    """Let a block compute the tokens of all ranks, and return its part of the sums."""

    def gather(
        module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if args:
            return (_gathered(args[0], ranks), *args[1:]), {**kwargs}
        return args, {**kwargs, "hidden_states": _gathered(kwargs["hidden_states"], ranks)}

    def add(module: nn.Module, args: object, output: object) -> object:
        if isinstance(output, tuple):
            return (_summed(output[0], ranks), *output[1:])
        return _summed(output, ranks)

    block.register_forward_pre_hook(gather, with_kwargs=True)
    return block.register_forward_hook(add)


def _gathered(hidden: object, ranks: Subgroup) -> Tensor:
    """Return the tokens of all ranks: [1, n / t, D] -> [1, n, D]."""
    assert isinstance(hidden, Tensor)
    return gather_tokens(hidden[0], ranks)[None]


def _summed(hidden: object, ranks: Subgroup) -> Tensor:
    """Return the sums of the own tokens: [1, n, D] -> [1, n / t, D]."""
    assert isinstance(hidden, Tensor)
    return sum_tokens(hidden[0], ranks)[None]


def _divide_experts(experts: nn.Module, ranks: Subgroup) -> None:
    """Let experts compute the tokens of those that this rank has."""
    # 4 experts on 2 ranks, and a token of experts 1 and 3. Rank 0 has experts 0 1, rank 1 has 2 3.
    # Number 2 stands for an expert of another rank:
    #
    #   rank 0   1 2 with the weights w1 0         rank 1   2 1 with the weights 0 w3
    count = experts.num_experts
    assert isinstance(count, int)
    own = count // ranks.size
    # Transformers leaves tokens of number `num_experts` out.
    vars(experts).update(num_experts=own, _is_expert_parallel=True)

    def choose(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        local = index - ranks.index * own
        here = (local >= 0) & (local < own)
        return hidden, torch.where(here, local, own), weights * here

    experts.register_forward_pre_hook(choose)
