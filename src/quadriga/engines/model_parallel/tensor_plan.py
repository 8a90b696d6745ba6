"""Which dimension of each weight of a decoder layer the ranks of tensor parallelism divide.

The plan is that of transformers (`base_model_tp_plan` in the config of a model). A *block* is a
part of a decoder layer with divided weights: its attention, its feed-forward part. Between blocks,
each rank has a slice of the tokens (Megatron's sequence parallelism, arXiv 2205.05198):

                  t ranks, n tokens together          weight of each rank
    norms         n / t tokens                        whole
    gather        n tokens
    colwise       n tokens, outputs / t               rows / t        q k v, gate, up
    rowwise       n tokens, a part of each sum        columns / t     o, down
    sum           n / t tokens

Whatever a rank computes of a weight that is whole on all ranks, its gradient is a part of the sum
over ranks: of other tokens outside of blocks, of other heads or sums inside. Embeddings, the last
norm and the head are outside of the plan: they work token by token, and FSDP divides them over all
ranks. So a tied output layer needs no plan.

Experts are divided by number: a rank has E / t whole experts, where transformers would divide each
of them. Gate and up projection of an expert are one weight, which has no contiguous halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.errors import ConfigError
from quadriga.models.adapters.lora import base_name

Style = Literal["colwise", "rowwise", "experts", "whole"]

TESTED = (
    "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""The values of `model_type` whose updates were compared with those of one rank."""

_STYLES: Mapping[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "packed_colwise": "experts",  # gate and up projection of experts
    "moe_tp_experts": "whole",  # the module of the experts, without weights of its own
    "replicated_with_grad_allreduce": "whole",
}
_ADAPTERS = {("colwise", "lora_B"): 0, ("rowwise", "lora_A"): 1}
"""(style of the layer, part of its adapter) → the dimension that is divided."""


@dataclass(frozen=True)
class Division:
    """How a weight is divided.

    Attributes:
        dim: the dimension; None: each rank has the whole weight.
        partial_bias: whether it is a bias of a rowwise layer, which only one rank adds.
    """

    dim: int | None
    partial_bias: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one model.

    Attributes:
        styles: pattern of a module or weight, relative to the base model → style.
    """

    styles: Mapping[str, Style]

    @staticmethod
    def of(config: PreTrainedConfig) -> TensorPlan:
        """Return the plan of a config.

        Raises:
            ConfigError: the model has none, or was not compared with one rank.
        """
        text = config.get_text_config()
        found = getattr(text, "base_model_tp_plan", None)
        if text.model_type not in TESTED or not found:
            raise ConfigError(
                f"model_type {text.model_type!r} has no plan of tensor parallelism that was "
                f"compared with one rank; those of {', '.join(TESTED)} were. Set "
                "tensor_parallel_size=1; sequence_parallel_size needs no plan"
            )
        styles = {}
        for pattern, style in found.items():
            if not pattern.startswith("layers."):
                continue
            assert style in _STYLES, (pattern, style)
            rowwise_experts = ".experts." in pattern and style == "rowwise"
            styles[pattern] = "experts" if rowwise_experts else _STYLES[style]
        return TensorPlan(styles)

    def style(self, name: str) -> Style:
        """Return the style of a module or weight by its name in the base model."""
        found = (style for p, style in self.styles.items() if fnmatchcase(name, p))
        return next(found, "whole")

    def division(self, name: str) -> Division:
        """Return how a weight of a decoder layer is divided, by its name in the base model."""
        # layers.0.self_attn.o_proj.base_layer.weight -> style of layers.0.self_attn.o_proj
        own = self.style(name)
        if own == "experts":
            return Division(0)
        module, _, leaf = base_name(name).rpartition(".")
        layer, dot, adapter = module.partition(".lora_")
        style = self.style(layer)
        if dot:
            return Division(_ADAPTERS.get((style, f"lora_{adapter[:1]}")))
        if style == "colwise":
            return Division(0)
        if style == "rowwise":
            return Division(1) if leaf == "weight" else Division(None, partial_bias=True)
        return Division(None)


def base_model(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that a plan names, without its head."""
    inner = getattr(model, model.base_model_prefix, model)
    assert isinstance(inner, nn.Module)
    return inner


def decoder_parts(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return (name in the base model, module) of each decoder layer."""
    layers = base_model(model).get_submodule("layers")
    return [(f"layers.{index}", layer) for index, layer in layers.named_children()]


def blocks_of(plan: TensorPlan, name: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of each block of a decoder layer: its children with divided weights."""
    for child, module in layer.named_children():
        weights = (f"{name}.{child}.{weight}" for weight, _ in module.named_parameters())
        if any(plan.division(weight).dim is not None for weight in weights):
            yield f"{name}.{child}", module


def check_division(model: PreTrainedModel, size: int, key: str) -> None:
    """Check that the weights of a model divide over `size` ranks. Reads shapes only.

    Args:
        key: the setting of the engine, for the message.

    Raises:
        ConfigError: heads or a weight do not divide. The message has the arithmetic.
    """
    plan = TensorPlan.of(model.config)
    check_heads(model.config.get_text_config(), size, key)
    for name, layer in decoder_parts(model):
        for leaf, parameter in layer.named_parameters():
            dim = plan.division(f"{name}.{leaf}").dim
            if dim is not None and parameter.shape[dim] % size:
                length = parameter.shape[dim]
                raise ConfigError(
                    f"{key}.tensor_parallel_size={size} does not divide dimension {dim} of "
                    f"{name}.{leaf} {tuple(parameter.shape)} ({length} = {length // size} × "
                    f"{size} + {length % size}); choose another size",
                    key=key,
                )


def check_heads(text: PreTrainedConfig, size: int, key: str) -> None:
    """Check that the heads of a text config divide over `size` ranks.

    Raises:
        ConfigError: they do not. The message has the arithmetic.
    """
    heads = {"attention heads": text.num_attention_heads, "key heads": text.num_key_value_heads}
    for what, count in heads.items():
        if count % size:
            raise ConfigError(
                f"{key}.tensor_parallel_size={size} does not divide the {count} {what} of "
                f"model_type {text.model_type!r} ({count} = {count // size} × {size} + "
                f"{count % size}); choose a divisor of {count}, and "
                f"{key}.sequence_parallel_size for other ranks",
                key=key,
            )
