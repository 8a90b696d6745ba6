"""Which layers of a model can have an adapter, and which of them the settings name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quadriga.errors import ConfigError
from quadriga.models.cpu_linear import CpuLinear
from quadriga.models.loading import VALUE_HEAD

ALL_LINEAR = "all-linear"
_FORWARDS = (nn.Linear.forward, CpuLinear.forward)
_SAME_PRODUCT = ("FalconLinear",)
"""Subclasses of `nn.Linear` that compute x Wᵀ + b in a forward of their own."""
_WEIGHT_USED: dict[str, tuple[str, ...]] = {
    "falcon_h1": ("out_proj",),
    "falcon_mamba": ("out_proj", "dt_proj"),
    "jamba": ("dt_proj",),
    "longcat_flash": ("classifier",),
    "mamba": ("out_proj", "dt_proj"),
    "mamba2": ("out_proj",),
    "nemotron_h": ("out_proj",),
}
"""Model type → ends of names of layers whose weight the model gives to another function.

It does not call the layer, so an adapter would change nothing. With `out_proj` only the fused
kernels of Mamba do so, and PEFT refuses it in these models.
"""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that can have an adapter.

    The output layer has none. Nor has a layer that computes something else than x Wᵀ + b, such as
    a router that returns a tuple, or that the model does not call.
    """
    output: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # none
    heads = (output, getattr(model, VALUE_HEAD, None))
    not_called = _WEIGHT_USED.get(model.config.model_type, ())
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
        and _is_product(module)
        and name.rpartition(".")[2] not in not_called
        and not any(module is head for head in heads)
    }


def _is_product(module: nn.Linear) -> bool:
    """Return whether the model calls a layer that computes x Wᵀ + b."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # `nn.MultiheadAttention` uses the weight of its `out_proj`
    kind = type(module)
    return kind.forward in _FORWARDS or kind.__name__ in _SAME_PRODUCT


def targets(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Linear],
    wanted: Iterable[str] | None,
    excluded: Iterable[str],
) -> list[str]:
    """Return the names of the layers that are wanted and not excluded.

    Raises:
        ConfigError: a name fits no layer, or no layer is left.
    """
    names = [ALL_LINEAR] if wanted is None else list(wanted)
    everything = ALL_LINEAR in names
    named = [name for name in names if name != ALL_LINEAR]
    for key, given in (("target_modules", named), ("exclude_modules", list(excluded))):
        for name in given:
            if not any(_fits(layer, name) for layer in layers):
                ends = sorted({layer.rpartition(".")[2] for layer in layers})
                raise ConfigError(
                    f"model.lora.{key}: {type(model).__name__} has no linear layer {name!r} that "
                    f"can have an adapter; it has {', '.join(ends) or 'none'}",
                    key=f"model.lora.{key}",
                )
    found = [
        layer
        for layer in layers
        if (everything or any(_fits(layer, name) for name in names))
        and not any(_fits(layer, name) for name in excluded)
    ]
    if not layers and any(isinstance(module, Conv1D) for module in model.modules()):
        raise ConfigError(
            f"model.lora: {type(model).__name__} has no nn.Linear layer for an adapter: its layers "
            "are Conv1D of transformers, whose weights are transposed; train without model.lora",
            key="model.lora",
        )
    if not found:
        key, remedy = (
            ("exclude_modules", "exclude fewer") if names else ("target_modules", "name some")
        )
        raise ConfigError(
            f"model.lora leaves no layer of {type(model).__name__} for an adapter: "
            f"target_modules={names}, exclude_modules={list(excluded)}; {remedy}",
            key=f"model.lora.{key}",
        )
    return found


def check_not_shared(
    model: PreTrainedModel, layers: Mapping[str, nn.Linear], modules: Iterable[str]
) -> None:
    """Check that no weight of the layers `modules` is also that of another layer.

    Raises:
        ConfigError: one is. Merged into it, an adapter of one layer would change the other one.
    """
    names: dict[int, list[str]] = {}
    for name, layer in layers.items():
        names.setdefault(id(layer.weight), []).append(name)
    for name in modules:
        shared = names[id(layers[name].weight)]
        if len(shared) > 1:
            raise ConfigError(
                f"{shared[0]} and {shared[1]} of {type(model).__name__} are one weight, which "
                "cannot have an adapter; add both to model.lora.exclude_modules, or set another "
                "model.lora.path",
                key="model.lora.exclude_modules",
            )


def _fits(layer: str, name: str) -> bool:
    """Return whether a name of the settings means this layer: all of its name, or its end."""
    return layer == name or layer.endswith(f".{name}")
