"""Train a part of a model: adapters (LoRA), or all weights but those that are frozen by name.

Frozen parameters have the compute dtype, since they need no precision for small steps. They are
neither reduced nor updated, and a checkpoint does not hold them: they are those of the folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from quadriga.checkpoint.shards import block_of
from quadriga.config.schema import ModelConfig
from quadriga.engines.optimizers import sharded_like
from quadriga.errors import CheckpointError, ConfigError
from quadriga.models.adapters import (
    BASE,
    Adapter,
    add_adapters,
    base_name,
    is_adapter,
    merged,
    parts_of,
    plan_adapter,
)
from quadriga.models.loading import VALUE_HEAD_PREFIX
from quadriga.parallel.distributed import gather_over_ranks, rank

FROZEN = "frozen"
"""Key of the sums of the frozen weights in a checkpoint."""


@dataclass(frozen=True)
class TrainedPart:
    """Which part of a model is trained.

    Attributes:
        adapter: the adapters of the model, if it has any.
        new: name in the model → first value, float32 on the CPU, of parameters that the folder
            does not hold: those of the adapters.
        frozen: whether any parameter is frozen.
    """

    adapter: Adapter | None = None
    new: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: bool = False


def select_trained(model: PreTrainedModel, config: ModelConfig, dtype: torch.dtype) -> TrainedPart:
    """Freeze what `config` says, and add adapters, in place.

    Args:
        model: a model to be trained, loaded or on the meta device, without its adapters.
        dtype: the compute dtype, which frozen parameters get.

    Raises:
        ConfigError: a pattern matches no weight, or nothing is left to train.
        ModelError: the adapter is of another model.
    """
    part = TrainedPart()
    if config.lora.enabled:
        adapter = plan_adapter(model, config.lora)
        part = TrainedPart(adapter, add_adapters(model, adapter), frozen=True)
        for name, parameter in model.named_parameters():
            # The head of a value model is new, so no adapter can make it fit.
            parameter.requires_grad_(is_adapter(name) or name.startswith(VALUE_HEAD_PREFIX))
    elif config.freeze:
        _freeze(model, config.freeze)
        part = TrainedPart(frozen=True)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        wide = torch.promote_types(dtype, torch.float32)
        # FSDP reduces the gradients of a unit together, so trained parameters have one dtype.
        kept = wide if parameter.requires_grad or not part.frozen else dtype
        if parameter.dtype != kept:
            parameter.data = parameter.data.to(kept)
    return part


def _freeze(model: PreTrainedModel, patterns: Iterable[str]) -> None:
    # A tied weight has several names, and a pattern may mean any of them.
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [parameter for name, parameter in named if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(
                f"model.freeze: no weight of {type(model).__name__} has a name like {pattern!r}; "
                f"names are, for example, {named[0][0]} and {named[-1][0]}, and * stands for any "
                "characters",
                key="model.freeze",
            )
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.freeze={list(patterns)} matches all {len(set(model.parameters()))} weights of "
            f"{type(model).__name__}, so nothing would be trained; remove a pattern",
            key="model.freeze",
        )


def check_new_trained(model: nn.Module, new: Iterable[str], config: ModelConfig) -> None:
    """Check that parameters which the folder does not have, and which are 0, are trained.

    Args:
        new: their names: those of a head for values or scores.

    Raises:
        ConfigError: one is frozen.
    """
    frozen = [name for name in new if not model.get_parameter(name).requires_grad]
    if frozen:
        raise ConfigError(
            f"model.freeze={list(config.freeze)} matches {frozen[0]}, which the folder "
            f"{config.path} does not have: it is new and 0, so its outputs would stay 0; remove "
            "the pattern",
            key="model.freeze",
        )


def fill_new(model: nn.Module, part: TrainedPart) -> None:
    """Give the adapters of a model that was loaded whole their first values, on its device."""
    for name, value in part.new.items():
        owner, _, leaf = name.rpartition(".")
        old = model.get_parameter(name)
        parameter = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)
        setattr(model.get_submodule(owner), leaf, parameter)


def merged_weights(
    named: Iterable[tuple[str, Tensor]],
    adapter: Adapter | None,
    whole: Callable[[Tensor], Tensor],
    *,
    adapted: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model, whole tensor): adapted weights merged, adapters left out.

    Args:
        named: the shards of the model, by names in it.
        whole: returns the whole tensor of a shard; all ranks call it in the same order.
        adapted: False: the weights of the base model.
    """
    shards = dict(named)
    for name, shard in shards.items():
        if adapter is None or not (is_adapter(name) or BASE in name):
            yield name, whole(shard)
        elif not is_adapter(name):
            weight = whole(shard)
            if adapted and name.endswith(f"{BASE}.weight"):
                a, b = (whole(shards[part]) for part in parts_of(name))
                weight = _merged_shard(weight, a, b, adapter.scaling)
            yield base_name(name), weight


def _merged_shard(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return `merged`, of DTensors with the shard of W; all ranks of a mesh call it together."""
    if not (isinstance(weight, DTensor) and isinstance(a, DTensor) and isinstance(b, DTensor)):
        return merged(weight, a, b, scaling)
    block = block_of(weight, 0)
    rows, columns = (
        slice(first, first + size)
        for first, size in zip(block.offset, block.data.shape, strict=True)
    )
    whole_a, whole_b = a.full_tensor(), b.full_tensor()
    shard = merged(block.data, whole_a[:, columns], whole_b[rows], scaling)
    return sharded_like(shard, weight)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block, `model` computes what its base model computes."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # PEFT's own switch also changes `requires_grad`, which FSDP has read once for all steps.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def dropout_on(model: nn.Module, adapter: Adapter | None) -> Iterator[None]:
    """Within the block, adapters drop inputs with the probability of the settings.

    The rest of the model stays in evaluation mode. Outside of an update nothing is dropped, so that
    a log-probability is a function of the weights.
    """
    names = ".lora_dropout."
    layers = []
    if adapter is not None and adapter.dropout:
        layers = [module for name, module in model.named_modules() if names in f"{name}."]
    for layer in layers:
        layer.train(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(False)


def frozen_scalars(part: TrainedPart, model: nn.Module) -> dict[str, object]:
    """Return what a checkpoint holds of the frozen weights: dtype → a checksum, under `FROZEN`.

    {} if nothing is frozen. A checksum is the sum of the bits of all elements, as integers modulo
    2**64, so it does not depend on how the weights are sharded. Waits for: the other ranks.
    """
    if not part.frozen:
        return {}
    own = Counter[str]()
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        block = block_of(parameter.detach(), rank())
        if not block.is_first_copy or not block.data.numel():
            continue
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = block.data.contiguous().view(integers[block.data.element_size()])
        own[str(parameter.dtype).removeprefix("torch.")] += int(bits.sum(dtype=torch.int64))
    totals = Counter[str]()
    for sums in gather_over_ranks(own):
        totals.update(sums)
    return {FROZEN: {name: value % 2**64 for name, value in totals.items()}}


def check_frozen(saved: Mapping[str, object], own: Mapping[str, object], folder: object) -> None:
    """Check that a checkpoint was trained on the frozen weights of this model.

    Args:
        saved: the scalars of the checkpoint.
        own: `frozen_scalars` of this model.

    Another compute dtype rounds them differently, so then nothing can be compared.

    Raises:
        CheckpointError: they are others.
    """
    before, now = saved.get(FROZEN), own.get(FROZEN)
    comparable = isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys()
    if comparable and before != now:
        raise CheckpointError(
            f"the checkpoint in {folder} holds trained weights only, and its frozen weights were "
            "others than those of this model; set model.path (and model.freeze or model.lora) to "
            "what they were in that run",
            path=str(folder),
        )
