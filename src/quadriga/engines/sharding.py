"""Shard a model with FSDP2.

An *FSDP unit* is a module to which `fully_shard` is applied. Its parameters are gathered together
before it runs, and their gradients are reduced together.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from quadriga.engines.optimizers import local_shard
from quadriga.parallel.model_ranks import ShardMeshes

if TYPE_CHECKING:

    class ShardedModel(PreTrainedModel, FSDPModule):  # type: ignore[no-untyped-call]  # as a base
        """The type of a model after `shard_model`."""


# A head with a bias returns a view. FSDP2 warns because a later in-place change of a view would
# break its backward hooks; no engine changes a model's output in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

MIN_UNIT_PARAMETERS = 4_000_000
"""Layers with fewer parameters stay in the root unit. For such a layer a collective costs more time
than the memory it frees is worth, and a small model would spend its time in FSDP's hooks."""

MAX_UNSHARDED_BYTES = 4 * 2**30
"""A rank keeps whole gradients and gathered parameters between micro-batches up to this size."""


def shard_model(
    model: PreTrainedModel,
    meshes: ShardMeshes,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    on_host: bool = False,
    min_unit_parameters: int = MIN_UNIT_PARAMETERS,
) -> ShardedModel:
    """Shard `model` in place over `meshes`, one FSDP unit for each large layer, and return it.

    With tensor parallelism each layer is a unit, because the root is divided over other ranks.

    With `on_host`, parameter shards and their gradients are in host memory. A unit is copied to the
    device when it is gathered, and each reduced gradient is copied back and added on the host.

    Gradients become sums over ranks. FSDP averages them by default, but a loss here is a share of
    the mini-batch's loss (`engines.base.LossFn`), and shares must be added.
    """
    # Three ranks with the shares .2, .3 and .1 of the loss: the mini-batch's loss is .6. FSDP's
    # default divides by the world size and would give the gradient of .2.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    place = OffloadPolicy()
    if on_host:
        # Copies from and to pinned memory overlap with computation.
        place = CPUOffloadPolicy(pin_memory=meshes.whole.device_type != "cpu")
    for layer in decoder_layers(model):
        size = sum(p.numel() for p in layer.parameters())
        if size >= min_unit_parameters or meshes.tensor is not None:
            fully_shard(
                layer, mesh=meshes.layers, mp_policy=policy, offload_policy=place,
                reshard_after_forward=reshard_after_forward,
            )  # fmt: skip
    fully_shard(model, mesh=meshes.whole, mp_policy=policy, offload_policy=place)
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        # Gloo has no reduce operation that also scales, so FSDP must use a plain sum.
        unit.set_force_sum_reduction_for_comms(True)
    # `fully_shard` changed the class of `model` to a subclass of its own class and FSDPModule.
    return cast("ShardedModel", model)


def reduces_each_micro_batch(
    model: nn.Module, setting: bool | None, compute_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> bool:
    """Return whether gradients are reduced after each micro-batch, by the setting or by their size.

    Otherwise a rank holds all trained gradients and gathered parameters between micro-batches.

    Args:
        model: before `shard_model`. Tensor parallelism may have divided its layers.
        setting: `engine.reduce_each_micro_batch`.
    """
    # 7 billion parameters in bfloat16, reduced in float32: 7e9 · (2 + 4) = 42 GB on every rank,
    # whatever the number of ranks. On 8 ranks, shards of the gradients take 7e9 · 4 / 8 = 3.5 GB.
    gathered = trained = 0
    for parameter in model.parameters():
        elements = local_shard(parameter.detach()).numel()
        gathered += elements * compute_dtype.itemsize
        trained += elements * reduce_dtype.itemsize if parameter.requires_grad else 0
    return gathered + trained > MAX_UNSHARDED_BYTES if setting is None else setting


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units of a sharded model, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def forget_failed_pass(model: ShardedModel) -> None:
    """Forget a forward or backward pass that raised: its gradients, and FSDP's state of it.

    Otherwise the next step would add its gradients to those of the failed step, and FSDP would take
    a forward pass for the recomputation that a backward pass makes, and reduce no gradients of it.
    """
    for unit in fsdp_units(model):
        group = unit._get_fsdp_state()._fsdp_param_group
        for parameter in () if group is None else group.fsdp_params:
            parameter.sharded_param.grad = None
            # Those that are not reduced yet, for which FSDP has no public name.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it was gathered once
                parameter._unsharded_param.grad = None
    ran = model._get_fsdp_state()._is_root is not None  # FSDP has no state before the first pass
    if ran:
        model.reset_iter_state()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers that can be FSDP units.

    The model lists their classes in `_no_split_modules`. A module inside such a layer is no unit
    of its own (Mamba lists the mixer inside the block too). Layers that share parameters (Zamba)
    are no units, because only one unit can hold a parameter.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if type(module).__name__ in names and id(module) not in inside:
            layers.append(module)
            inside |= {id(part) for part in module.modules()}
    owners = Counter(id(p) for layer in layers for p in set(layer.parameters()))
    return [x for x in layers if all(owners[id(p)] == 1 for p in x.parameters())]


def class_name(model: nn.Module) -> str:
    """Return the name of the model's class; `fully_shard` puts a class of its own before it."""
    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))
