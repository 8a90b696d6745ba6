"""Which rule updates which parameter.

Which rule updates which parameter, and the optimizer of an engine.

The bytes of optimizer states, for the memory plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from quadriga.config.schema import OptimConfig, OptimizerName
from quadriga.engines.optimizers import check_optimizer_packages
from quadriga.engines.optimizers.muon import Muon
from quadriga.engines.optimizers.rules import (
    MOMENTS,
    SMALLEST_BLOCK,
    SMALLEST_PARAMETER,
    AdamW,
    AdamW8bit,
    UpdateRule,
    block_size,
)
from quadriga.engines.optimizers.sharded import ShardedOptimizer
from quadriga.errors import ConfigError
from quadriga.models.loading import VALUE_HEAD

_FITTING: dict[OptimizerName, str] = {
    "adamw": "all of them",
    "adamw_8bit": f"those with {SMALLEST_PARAMETER} elements or more, in rows of a multiple of "
    f"{SMALLEST_BLOCK}",
    "muon": "the matrices of hidden layers",
}
"""Optimizer → the parameters that it is for."""
_NOT_HIDDEN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def rule_of_each(model: PreTrainedModel, name: OptimizerName) -> dict[str, OptimizerName]:
    """Return parameter → the rule that updates it, for each trained parameter of `model`.

    With `adamw_8bit` and `muon`, the parameters that they are not made for have `adamw`.
    """
    hidden = _hidden_matrices(model) if name == "muon" else set()
    found: dict[str, OptimizerName] = {}
    for key, parameter in model.named_parameters():
        fits = name == "adamw_8bit" and block_size(parameter.shape) is not None
        if parameter.requires_grad:
            found[key] = name if fits or id(parameter) in hidden else "adamw"
    return found


def check_fits_parameters(model: PreTrainedModel, name: OptimizerName, key: str = "optim") -> None:
    """Check that the optimizer fits a trained parameter of `model`. `key`: its section.

    Raises:
        ConfigError: it fits none.
    """
    names = rule_of_each(model, name)
    if name not in names.values():
        model_class = type(model).__name__.removeprefix("FSDP")  # put before it by `fully_shard`
        raise ConfigError(
            f"{key}.name={name} fits none of the {len(names)} trained parameters of "
            f"{model_class} ({_FITTING[name]}); set {key}.name=adamw",
            key=f"{key}.name",
        )


def _hidden_matrices(model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights of hidden linear layers, experts included.

    Embeddings, output layers, norms, convolutions and biases are not among them.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not annotated there
    outputs = (head, getattr(model, VALUE_HEAD, None))
    hidden: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        unsuitable = isinstance(module, _NOT_HIDDEN) or any(module is o for o in outputs)
        for name, parameter in module.named_parameters(recurse=False):
            # `weight` [A, B] of a linear layer, or [E, A, B] of E experts under any name. Other
            # parameters with two dimensions are biases of experts, states of a recurrence, …
            matrix = (parameter.dim() == 2 and name == "weight") or (
                parameter.dim() == 3 and "bias" not in name
            )
            suitable = matrix and not unsuitable and min(parameter.shape[-2:]) > 1
            (hidden if suitable else others).add(id(parameter))
    return hidden - others  # a tied output layer is an embedding


def build_optimizer(
    model: PreTrainedModel,
    config: OptimConfig,
    total_steps: int | None,
    *,
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
) -> ShardedOptimizer:
    """Build the optimizer that `config.name` names, for the trained parameters of `model`.

    Raises:
        ConfigError: a package is missing, or the optimizer fits no parameter.
    """
    check_optimizer_packages("optim", config)
    check_fits_parameters(model, config.name)
    names = rule_of_each(model, config.name)
    trained = [(name, p) for name, p in model.named_parameters() if name in names]
    rules: list[UpdateRule] = []
    for rule in dict.fromkeys(names.values()):
        named = [(name, p) for name, p in trained if names[name] == rule]
        if rule == "muon":
            rules.append(Muon(named, config, shard_group=shard_group, device=device))
        else:
            rules.append(AdamW8bit(named, config) if rule == "adamw_8bit" else AdamW(named, config))
    return ShardedOptimizer(rules, config, total_steps, shard_group=shard_group, device=device)


def state_bytes(rule: OptimizerName, shape: Sequence[int], rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the state of `rows` rows of a parameter.

    Args:
        shape: of the whole parameter.
        dtype: of the parameter.
    """
    # A matrix [1024, 4096] in float32: AdamW has two moments of 16 MiB. Muon has one. With 8 bits
    # a moment has 4 MiB of codes, and 16 scales of 4 bytes in each of 1024 rows: 64 KiB.
    row = math.prod(shape[1:])
    if rule == "muon":
        return rows * row * dtype.itemsize
    block = block_size(shape) if rule == "adamw_8bit" else None
    if block is None:
        return len(MOMENTS) * rows * row * dtype.itemsize
    return len(MOMENTS) * rows * (row + row // block * torch.float32.itemsize)
