"""Recompute activations in the backward pass instead of keeping them.

What a layer keeps between its forward and its backward pass:

    false       every tensor that its backward pass reads
    selective   its input, and the outputs of matrix products and attention
    true        its input

The backward pass computes the rest again. With `true` that is the whole layer, about a third more
floating point operations. With `selective` it is the operations between the products (norms,
activation functions, rotations), which take little time and make most of the tensors.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from quadriga.config.schema import Checkpointing
from quadriga.errors import ModelError

PRODUCTS = frozenset({"mm", "addmm", "_scaled_mm", "_linear_pointwise"})
"""Products of activations and weights; the last one is that of `models/cpu_linear.py`. `bmm` is not
one of them: its output can be attention scores of all pairs of tokens."""

GROUPED = "grouped_mm"
"""Part of the names of products of grouped rows: a mixture of experts."""

ATTENTION_WORDS = ("attention", "attn")
"""Parts of the names of attention kernels: those of torch, of flex attention and of libraries."""


def checkpoint_layers(model: PreTrainedModel, form: Checkpointing) -> None:
    """Let the layers of `model` keep what `form` says (see above). False changes nothing.

    Transformers checkpoints layers in training mode only. In that mode some models drop whole
    layers, add noise to their router, or read dropout probabilities from their config. The model
    stays in evaluation mode, so that a log-probability is a function of the weights.

    Raises:
        ModelError: the model does not say what its layers are.
    """
    if form is False:
        return
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not support activation checkpointing; set "
            "model.gradient_checkpointing=false",
            path=model.config.name_or_path,
        )
    for layer in layers:
        recompute: Callable[..., object] = partial(checkpoint, use_reentrant=False)
        if form == "selective":
            policy = partial(_kept_or_recomputed, not _has_biases_of_experts(layer))
            contexts = partial(create_selective_checkpoint_contexts, policy)
            recompute = partial(recompute, context_fn=contexts)
        # Only the instance's `forward` is replaced: hooks and weight names do not change.
        layer.forward = partial(recompute, layer.forward)


def _has_biases_of_experts(layer: nn.Module) -> bool:
    """Return whether experts have biases, [E, columns].

    Transformers adds them to the product in place, so the product cannot be kept.
    """
    return any("bias" in name and p.dim() == 2 for name, p in layer.named_parameters())


def is_expensive(name: str) -> bool:
    """Return whether selective checkpointing keeps the output of this operator: "aten::mm"."""
    short, _, overload = name.rpartition("::")[2].partition(".")
    if overload == "out":  # compiled code writes into buffers that it uses again
        return False
    words = (*ATTENTION_WORDS, GROUPED)
    return short in PRODUCTS or any(word in short for word in words)


def _kept_or_recomputed(
    keeps_grouped: bool,
    context: SelectiveCheckpointContext,
    operator: torch._ops.OpOverload | torch._ops.HigherOrderOperator,
    *args: object,
    **kwargs: object,
) -> CheckpointPolicy:
    name: str = operator.name()  # type: ignore[no-untyped-call]  # torch has no annotations here
    if is_expensive(name) and (keeps_grouped or GROUPED not in name):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
