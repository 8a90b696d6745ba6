"""Load a model for a training engine: dtype, dropout, activation checkpointing, weight names."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config.schema import ModelConfig
from quadriga.engines.base import HeadKind
from quadriga.models.loading import load_causal_lm, load_value_model


def load_model(
    config: ModelConfig, head: HeadKind, dtype: torch.dtype, *, trained: bool
) -> PreTrainedModel:
    """Load the model of a folder on the CPU, without dropout.

    A model that is trained has float32 parameters at least. In bfloat16 (8 bits of precision) a
    step of 1e-3 of a weight would be rounded away: 1.0 + 0.001 = 1.0.

    Raises:
        ModelError: the folder does not hold a suitable model.
    """
    if trained and dtype.itemsize < 4:
        dtype = torch.float32
    loader = load_causal_lm if head == "lm" else load_value_model
    model = loader(
        config.path,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    # `fully_shard` renames the class, and exports must contain the original name.
    model.config.architectures = [type(model).__name__]
    _disable_dropout(model)
    if config.gradient_checkpointing and trained:
        _enable_checkpointing(model)
        model.train()  # checkpointing is active in training mode only
    return model


def _enable_checkpointing(model: PreTrainedModel) -> None:
    # Newer versions of transformers have a new name for this method.
    new_name = getattr(model, "activation_checkpointing_enable", None)
    (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0.

    A log-probability must be a function of the weights: the first probability ratio is exactly 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  # not declared by nn.Module


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
