"""Wrapping a model in FSDP2."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

# A head with a bias ends in a view; nothing here changes a model's output in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

SMALLEST_UNIT = 4_000_000
"""Parameters. Layers below this stay in the root unit: below it a collective costs more than the
memory it frees, and a small model pays for its hooks."""


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    smallest_unit: int = SMALLEST_UNIT,
) -> None:
    """Shard `model` in place over `mesh`, one unit a layer, and make gradients *sums* over ranks.

    FSDP averages gradients by default. Losses here are shares that add up to the mini-batch's
    loss (`engines.base.LossFn`), so the divide factor is set to 1.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for layer in repeated_layers(model):
        if sum(p.numel() for p in layer.parameters()) >= smallest_unit:
            fully_shard(
                layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
            )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        # Gloo has no reduction that scales as it sums.
        unit.set_force_sum_reduction_for_comms(True)


def units(model: nn.Module) -> list[FSDPModule]:
    """The FSDP units of a sharded model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that the model's author names as not to be split: its decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
