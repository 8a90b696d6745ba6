"""Load, shard and export a model, so that each rank reads and holds only its parameter shards.

    meta device                     fully_shard              device of the rank
    shapes of all parameters  ──►   shapes of the shards ──► shards ◄── rows of the folder's tensors

A model of 7 billion parameters has 28 GB in float32. Eight ranks of a node that load it and then
keep their eighth need 224 GB of host memory; here each allocates 3.5 GB on its device, and 16 MiB
on the host to read into.

This needs tensors in the folder that make up the parameters (`models/weights.py`). If
transformers computes them otherwise, each rank loads the whole model on the CPU.

consumes      a model folder
waits for     the other ranks, before and after the model is sharded, and after the weights are
              read; none of them is in another collective then, because each joins also when it has
              failed
produces      the model, or `ModelError` on all ranks
unblocked by  the call of the last rank
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.checkpoint.hf_export import export_hf
from quadriga.checkpoint.shards import Block, block_of
from quadriga.config.schema import ModelConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers
from quadriga.engines.base import HeadKind
from quadriga.errors import ConfigError, ModelError
from quadriga.models.adapters import Adapter, add_adapters, base_name, is_adapter, plan_adapter
from quadriga.models.folder import local_folder, weight_file_names
from quadriga.models.loading import (
    VALUE_HEAD_PREFIX,
    classifier_name,
    load_causal_lm,
    load_value_model,
    model_errors,
    model_without_weights,
    padding_token,
    without_bias,
)
from quadriga.models.weights import (
    FilePart,
    NotFinite,
    TensorReader,
    WeightNames,
    check_all_finite,
    count_not_finite,
    file_parts,
    match_names,
    stored_dtypes,
    stored_tensors,
)
from quadriga.parallel.distributed import gather_over_ranks, on_all_ranks, rank
from quadriga.parallel.layouts import slices
from quadriga.parallel.node_memory import folder_in_memory

if TYPE_CHECKING:
    from quadriga.engines.sharding import ShardedModel


def load_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> PreTrainedModel:
    """Load the model of a folder on the CPU, in evaluation mode.

    Evaluation mode is without dropout: the first probability ratio is exactly 1.

    A model that is trained has float32 parameters at least. In bfloat16 (8 bits of precision) a
    step of 1e-3 of a weight would be rounded away: 1.0 + 0.001 = 1.0.

    Raises:
        ModelError: the folder does not hold a suitable model.
    """
    loader = load_causal_lm if head == "lm" else load_value_model
    model = loader(config, dtype=_parameter_dtype(dtype, trained=trained))
    return _for_engine(model, config, head, trained=trained)


def empty_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool, buffers: bool = True
) -> PreTrainedModel:
    """Return what `load_model` returns, with parameters on the meta device; see there.

    `buffers`: whether buffers are on the CPU.

    Raises:
        ModelError: the folder does not hold a suitable model.
    """
    model = model_without_weights(
        config,
        value_head=head != "lm",
        dtype=_parameter_dtype(dtype, trained=trained),
        buffers=buffers,
    )
    return _for_engine(model, config, head, trained=trained)


def _parameter_dtype(dtype: torch.dtype, *, trained: bool) -> torch.dtype:
    return torch.float32 if trained and dtype.itemsize < 4 else dtype


def _for_engine(
    model: PreTrainedModel, config: ModelConfig, head: HeadKind, *, trained: bool
) -> PreTrainedModel:
    # `fully_shard` renames the class, and exports must contain the original name.
    model.config.architectures = [type(model).__name__]
    if head == "score":
        model.config.architectures = [classifier_name(model.config)]
        without_bias(model)
    if trained:
        checkpoint_layers(model, config.gradient_checkpointing)
    return model


def simulated_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> PreTrainedModel:
    """Return the model that a forward pass of `load_model` computes with, on the meta device.

    All parameters have the compute dtype, in which FSDP gathers them.

    Raises:
        ModelError: the folder has no config of a suitable model.
    """
    model = empty_model(config, head, dtype, trained=trained, buffers=False)
    model.requires_grad_(trained)
    if trained:
        select_trained(model, config, dtype)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model


def check_trained_part(config: ModelConfig, head: HeadKind) -> None:
    """Check that adapters and patterns fit a model, without its weights.

    Raises:
        ConfigError: a pattern or a name fits no weight or layer, or PEFT is missing.
        ModelError: the adapter is of another model. The message has the sizes of both.
    """
    if not (config.lora.enabled or config.freeze):
        return
    model = simulated_model(config, head, torch.float32, trained=True)
    if config.freeze and head != "lm":
        new = {name for name, _ in model.named_parameters() if name.startswith(VALUE_HEAD_PREFIX)}
        check_new_trained(model, new - stored_tensors(local_folder(config.path)).keys(), config)


def saved_buffer_names(model: nn.Module) -> set[str]:
    """Return the names of the buffers that belong to the model's state dict."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return set(model.state_dict()) - parameters


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each parameter to its other names.

    A tied output layer gives {"model.embed_tokens.weight": ["lm_head.weight"]}.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values()}


# What is trained: adapters (LoRA), or all weights but those that are frozen by name. Frozen
# parameters have the compute dtype, since they need no precision for small steps. They are neither
# reduced nor updated, and a checkpoint does not hold them: they are those of the folder.


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


_log = logging.getLogger(__name__)
Counts = dict[tuple[str, object], NotFinite]
"""(weight, which part of it) -> its elements that are not finite."""


@dataclass(frozen=True)
class FolderWeights:
    """The weights of a folder, for a model whose parameters are on the meta device.

    `part`: has the first values of the adapters, which are not in the folder.
    """

    folder: Path
    names: WeightNames
    use_shm: bool
    part: TrainedPart

    def read_into(
        self, model: ShardedModel, device: torch.device, *, on_host: bool = False
    ) -> None:
        """Allocate this rank's parameter shards on `device`, or on the host, and read them.

        Raises:
            ModelError: on any rank, the shards cannot be allocated or the files not be read; or a
                weight is not finite.
        """
        place = torch.device("cpu") if on_host else device
        check_finite_over_ranks(self.folder, on_all_ranks(lambda: self._read(model, device, place)))

    def _read(self, model: ShardedModel, device: torch.device, place: torch.device) -> Counts:
        """Read the saved buffers to `device` and the shards to `place`."""
        source: AbstractContextManager[Path] = nullcontext(self.folder)
        if self.use_shm:
            source = folder_in_memory(self.folder, weight_file_names)
        found: Counts = {}
        with torch.no_grad(), model_errors(self.folder, "model"), source as folder:
            # Tied parameters remain tied, because torch changes a sharded parameter in place.
            model._apply(partial(_allocated, device, place))  # type: ignore[no-untyped-call]  # none
            with TensorReader(folder) as reader:
                for name, buffer in model.named_buffers():
                    if name in self.names.stored:
                        reader.read(self.names.stored[name], 0, buffer)
                for name, parameter in model.named_parameters():
                    shard = block_of(parameter.detach(), rank())
                    self._read_shard(reader, name, shard)
                    found[name, shard.offset] = count_not_finite(shard.data)
        return found

    def _read_shard(self, reader: TensorReader, name: str, shard: Block) -> None:
        box = [(a, a + size) for a, size in zip(shard.offset, shard.data.shape, strict=True)]
        if name in self.names.new:
            shard.data.zero_()
        elif name in self.part.new:
            shard.data.copy_(self.part.new[name][tuple(slice(*span) for span in box)])
        elif shard.data.numel():
            stored = self.names.stored[base_name(name)]
            # FSDP cuts dimension 0. Row 2 of a tensor of rows with 5 elements begins at element 10.
            if shard.data.shape[1:] == shard.shape[1:]:
                first = shard.offset[0] * math.prod(shard.shape[1:]) if shard.offset else 0
                reader.read(stored, first, shard.data)
            else:  # tensor parallelism cuts dimension 1
                shard.data.copy_(reader.read_box(stored, box))


def check_finite_over_ranks(folder: Path, own: Counts) -> None:
    """Raise `ModelError` if a rank has read a weight that is not finite. All ranks call it."""
    found: Counts = {}
    for counts in gather_over_ranks(own):
        found |= counts  # replicas read the same parts, which are counted once
    totals: dict[str, NotFinite] = {}
    for (name, _), part in found.items():
        so_far = totals.get(name, NotFinite(0, 0, 0))
        totals[name] = NotFinite(
            so_far.nan + part.nan, so_far.infinite + part.infinite, so_far.size + part.size
        )
    check_all_finite(folder, totals)


def export_model(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    module: PreTrainedModel,
    settings: ModelConfig,
    head: HeadKind,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a Hugging Face folder with the dtypes of the folder that the model was loaded from.
    Its tensors have the names that `save_pretrained` writes, unless transformers computes them.

    All ranks exhaust `weights`; rank 0 writes. Raises `ModelError` if the tokenizer of `settings`
    cannot be loaded.
    """
    dtypes, config = stored_dtypes(settings.path), deepcopy(module.config)
    trusted = settings.trust_remote_code
    if head == "score":  # a sequence classifier needs a padding token
        config.pad_token_id = padding_token(settings)
    parts: Mapping[str, tuple[FilePart, ...]] = {}
    empty = model_without_weights(settings, value_head=head != "lm")
    with suppress(ModelError):  # transformers computes some of its tensors
        parts = file_parts(empty)
    named = (
        (part.name, tensor[slices(part.box)].reshape(part.shape)) if part else (name, tensor)
        for name, tensor in weights
        for part in parts.get(name, (None,))
    )
    export_hf(
        folder, dtypes.cast(named), dtypes.config(config),
        generation=getattr(module, "generation_config", None),
        tokenizer_path=settings.tokenizer_path, trust_remote_code=trusted, write=rank() == 0,
        extra=write_more,
    )  # fmt: skip


def prepared_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> tuple[PreTrainedModel, FolderWeights | None, TrainedPart]:
    """Return a model to be sharded, the weights that are to be read after that, and what is
    trained.

    The weights are None, and the whole model is on the CPU, if the tensors of the folder cannot be
    matched with the model's parameters.

    Raises:
        ModelError: on any rank, the folder does not hold a suitable model.
    """
    prepared = _with_folder_weights(config, head, dtype, trained=trained)
    own_reason = prepared if isinstance(prepared, str) else None
    reasons = [reason for reason in gather_over_ranks(own_reason) if reason is not None]
    if isinstance(prepared, tuple) and not reasons:
        return *prepared, prepared[1].part
    if rank() == 0:
        _log.info("each rank loads the whole model in %s: %s", config.path, reasons[0])

    def load_whole() -> tuple[PreTrainedModel, TrainedPart]:
        model = load_model(config, head, dtype, trained=trained)
        part = select_trained(model, config, dtype) if trained else TrainedPart()
        fill_new(model, part)
        return model, part

    model, part = on_all_ranks(load_whole)
    return model, None, part


def whole_load_reason(config: ModelConfig, head: HeadKind, trained: bool) -> str:
    """Return why each rank loads the whole model of a folder; "" if it reads its shards only, or if
    the folder has no weights that could be looked at.

    Reads headers only.
    """
    folder = local_folder(config.path, weights=False)
    if not any(folder.glob("*.safetensors")):
        return ""
    local = replace(config, path=str(folder))
    found = _with_folder_weights(local, head, torch.float32, trained=trained)
    return found if isinstance(found, str) else ""


def _with_folder_weights(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> tuple[PreTrainedModel, FolderWeights] | str:
    """Return the model without parameters and its weights, or the reason for loading it whole.

    An error is a reason too: loading the model whole raises the same, or knows more.
    """
    try:
        with model_errors(Path(config.path), "model"):
            model = empty_model(config, head, dtype, trained=trained)
            names = names_in_folder(config, model, head, trained=trained)
        if names.reason:
            return names.reason
        # After the names are matched, because adapters change names.
        part = select_trained(model, config, dtype) if trained else TrainedPart()
        if trained and config.freeze:
            check_new_trained(model, names.new, config)
    except ModelError as error:
        return str(error)
    return model, FolderWeights(Path(config.path), names, config.use_shm, part)


def names_in_folder(
    config: ModelConfig, model: PreTrainedModel, head: HeadKind, *, trained: bool
) -> WeightNames:
    """Match the parameters of a model with the tensors of its folder."""
    # A reward model that is only computed has its head in the folder.
    may_be_new = head == "value" or (head == "score" and trained)
    prefix = VALUE_HEAD_PREFIX if may_be_new else None
    return match_names(model, stored_tensors(Path(config.path)), new_prefix=prefix)


def _allocated(device: torch.device, place: torch.device, tensor: Tensor) -> Tensor:
    """Return a buffer on `device`, and memory in `place` for a parameter that has none."""
    return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(device)
