"""Load a model for a training engine: dtype, activation checkpointing, weight names."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config.schema import ModelConfig, OptimConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers
from quadriga.engines.base import HeadKind
from quadriga.engines.loading.trained_part import check_new_trained, select_trained
from quadriga.engines.optimizers.choice import check_fits_parameters, rule_of_each
from quadriga.models.folder import has_tokenizer, local_folder
from quadriga.models.loading import (
    VALUE_HEAD_PREFIX,
    load_causal_lm,
    load_value_model,
    model_without_parameters,
    model_without_weights,
)
from quadriga.models.score_head import classifier_name, without_bias
from quadriga.models.weights.reader import stored_tensors


def in_local_folders(config: ModelConfig) -> ModelConfig:
    """Return the settings with folders in place of names of the hub (`hf://owner/name`).

    A name can stand for other files at the end of a run than at its start. The export takes the
    tokenizer and the dtypes from the files that were loaded.
    """
    tokenizer = config.tokenizer_path
    return replace(
        config,
        path=str(local_folder(config.path)),
        tokenizer_path=None if tokenizer is None else str(local_folder(tokenizer)),
    )


def exported_tokenizer(config: ModelConfig) -> str | None:
    """Return the folder of the tokenizer that exports get; None if the model came without one.

    An engine asks when it is built, so a tokenizer that is gone at the export is an error there.
    """
    if config.tokenizer_path is not None:
        return config.tokenizer_path
    return config.path if has_tokenizer(config.path) else None


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
    model = loader(
        config.path,
        dtype=_parameter_dtype(dtype, trained=trained),
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
        use_shm=config.use_shm,
    )
    return _for_engine(_with_head(model, head), config, trained=trained)


def empty_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> PreTrainedModel:
    """Return what `load_model` returns, with parameters on the meta device; see there.

    Raises:
        ModelError: the folder does not hold a suitable model.
    """
    model = model_without_parameters(
        config.path,
        value_head=head != "lm",
        dtype=_parameter_dtype(dtype, trained=trained),
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    return _for_engine(_with_head(model, head), config, trained=trained)


def _with_head(model: PreTrainedModel, head: HeadKind) -> PreTrainedModel:
    # `fully_shard` renames the class, and exports must contain the original name.
    model.config.architectures = [type(model).__name__]
    if head == "score":
        model.config.architectures = [classifier_name(model.config)]
        without_bias(model)
    return model


def _parameter_dtype(dtype: torch.dtype, *, trained: bool) -> torch.dtype:
    return torch.float32 if trained and dtype.itemsize < 4 else dtype


def _for_engine(model: PreTrainedModel, config: ModelConfig, *, trained: bool) -> PreTrainedModel:
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
    model = model_without_weights(
        config.path,
        value_head=head != "lm",
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    _with_head(model, head)
    model.requires_grad_(trained)
    if trained:
        checkpoint_layers(model, config.gradient_checkpointing)
        select_trained(model, config, dtype)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model


def check_trained_part(
    config: ModelConfig,
    head: HeadKind,
    optim: OptimConfig | None = None,
    optim_key: str = "optim",
) -> None:
    """Check that adapters, patterns and the optimizer fit a model, without its weights.

    Raises:
        ConfigError: a pattern or a name fits no weight or layer, the optimizer fits no parameter,
            or PEFT is missing.
        ModelError: the adapter is of another model. The message has the sizes of both.
    """
    chosen = optim is not None and optim.name != "adamw"
    if not (config.lora.enabled or config.freeze or chosen):
        return
    model = simulated_model(config, head, torch.float32, trained=True)
    if config.freeze and head != "lm":
        new = {name for name, _ in model.named_parameters() if name.startswith(VALUE_HEAD_PREFIX)}
        check_new_trained(model, new - stored_tensors(local_folder(config.path)).keys(), config)
    if optim is not None and chosen:
        check_fits_parameters(model, optim.name, optim_key)


def fits_8bit(config: ModelConfig, head: HeadKind) -> bool:
    """Return whether `optim.name=adamw_8bit` fits a trained parameter of the model."""
    model = simulated_model(config, head, torch.float32, trained=True)
    return "adamw_8bit" in rule_of_each(model, "adamw_8bit").values()


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
