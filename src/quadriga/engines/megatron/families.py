"""Which architectures the Megatron engine computes, and how it stores their weights.

A family says how one `model_type` of transformers is computed by Megatron-core's GPT model, and
`stored_tensors` describes each of its tensors as parts of checkpoint weights. Loading, saving,
streaming and the plan of a weight sync all follow from these descriptions.

    checkpoint (transformers)                      Megatron-core                     split (tensor)
    embed_tokens, lm_head                          word_embeddings, output_layer     rows, padded
    q_proj, k_proj, v_proj                         linear_qkv, by query group        rows
    o_proj, down_proj                              linear_proj, linear_fc2           columns
    gate_proj, up_proj                             linear_fc1                        rows of each
    norms, router                                  the same                          no

A file of the user adds an architecture with `register_family`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError, ModelError
from quadriga.parallel.layouts import Box, Model, Stored, Weight, whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """How an architecture differs from Llama.

    Attributes:
        qkv_bias: whether the projections of queries, keys and values have biases.
        qk_norm: whether queries and keys of each head are normalized.
        experts: whether the layers have experts.
        normalized_top_k: whether the weights of the chosen experts always add up to 1. None: as
            `norm_topk_prob` of the config says.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    normalized_top_k: bool | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "mixtral": Family(experts=True, normalized_top_k=True),
}
"""`model_type` -> how it is computed. All of them were compared with transformers."""

ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary positions whose frequencies depend on the config only."""


def register_family(model_type: str, family: Family) -> None:
    """Add an architecture. A file of the user calls this on every rank.

    Raises:
        ConfigError: the architecture is known already, with other properties.
    """
    known = FAMILIES.setdefault(model_type, family)
    if known != family:
        raise ConfigError(
            f"model_type {model_type!r} is in the table of the Megatron engine already, as {known}"
        )


def family_of(config: PreTrainedConfig) -> Family:
    """Return how the model of a config is computed.

    Raises:
        ModelError: the architecture is not in the table, or the config asks for something that the
            engine does not compute.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"the Megatron engine has no map for model_type {config.model_type!r} (known: "
            f"{', '.join(FAMILIES)}); set engine.name=fsdp, or register one with register_family",
            path=config.name_or_path,
        )
    problem = _not_computed(config, family)
    if problem:
        raise ModelError(
            f"the Megatron engine does not compute {problem} (model_type {config.model_type!r}); "
            "set engine.name=fsdp",
            path=config.name_or_path,
        )
    return family


def _not_computed(config: PreTrainedConfig, family: Family) -> str:
    """Return what the engine does not compute of a model; "" if it computes all of it."""
    rope = rope_type(config)
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}, only 'silu'"
    if rope not in ROPE_TYPES:
        return f"rotary positions of type {rope!r}, only {', '.join(ROPE_TYPES)}"
    if getattr(config, "attention_bias", False):
        return "attention_bias"
    if getattr(config, "mlp_bias", False):
        return "mlp_bias"
    if getattr(config, "attention_dropout", 0.0):
        return "attention_dropout"
    if family.experts:
        if getattr(config, "decoder_sparse_step", 1) != 1 or getattr(config, "mlp_only_layers", ()):
            return "layers without experts beside layers with experts"
        if getattr(config, "router_jitter_noise", 0.0):
            return "router_jitter_noise"
    return ""


def rope_type(config: PreTrainedConfig) -> str:
    """Return the kind of rotary positions of a config."""
    found: str = (config.rope_parameters or {}).get("rope_type", "default")
    return found


def expert_count(config: PreTrainedConfig) -> int:
    """Return the experts of a layer; 0 if the layers have none."""
    family = FAMILIES.get(config.model_type)
    if family is None or not family.experts:
        return 0
    count: int = getattr(config, "num_local_experts", None) or config.num_experts
    return count


def head_size(config: PreTrainedConfig) -> int:
    """Return the elements of a query."""
    found: int = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return found


def padded_vocabulary(config: PreTrainedConfig, tensor_ranks: int) -> int:
    """Return the rows of the embedding with padding, so that tensor-parallel ranks divide them."""
    size: int = config.vocab_size
    return -(-size // tensor_ranks) * tensor_ranks


def megatron_model(config: PreTrainedConfig, weights: Mapping[str, Weight], sizes: Sizes) -> Model:
    """Describe how Megatron-core stores the weights of a model.

    The tensors of layers have their number in the whole model, not in their stage.

    Args:
        weights: the weights of the model by their names in transformers, tied names left out.

    Raises:
        ModelError: a weight belongs to no tensor, or a tensor needs a weight that is missing.
    """
    tied = "lm_head.weight" not in weights and "score.weight" not in weights
    family, stages = family_of(config), sizes.pipeline
    layers, last = config.num_hidden_layers, stages - 1
    padded = padded_vocabulary(config, sizes.tensor)
    embedding = "model.embed_tokens.weight"
    stored = [Stored("embedding.word_embeddings.weight", (embedding,), 0, stage=0, padded=padded)]
    for layer in range(layers):
        found = _layer(config, family, weights, layer)
        # 8 layers, 2 stages of 2 chunks: the first stage has the layers 0, 1, 4 and 5.
        part = layer * stages * sizes.chunks // layers
        stored += [replace(each, stage=part % stages) for each in found]
    stored.append(Stored("decoder.final_layernorm.weight", ("model.norm.weight",), stage=last))
    if "score.weight" in weights:
        stored += [
            Stored(name, (name,), stage=last)
            for name in ("score.weight", "score.bias")
            if name in weights
        ]
    elif not tied or stages > 1:
        head = embedding if tied else "lm_head.weight"
        stored.append(Stored("output_layer.weight", (head,), 0, stage=last, padded=padded))
    _check_complete(config, weights, stored)
    return Model(weights, tuple(stored))


def _layer(
    config: PreTrainedConfig, family: Family, weights: Mapping[str, Weight], layer: int
) -> list[Stored]:
    hf, own = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention = hf + "self_attn."
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    stored = [
        Stored(own + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        Stored(own + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        Stored(own + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), 1),
    ]
    for kind in ("weight", "bias") if family.qkv_bias else ("weight",):
        names = tuple(f"{attention}{letter}_proj.{kind}" for letter in "qkv")
        stored.append(
            Stored(f"{own}self_attention.linear_qkv.{kind}", names, 0, "query groups", heads)
        )
    for letter in "qk" if family.qk_norm else "":
        name = f"{own}self_attention.{letter}_layernorm.weight"
        stored.append(Stored(name, (f"{attention}{letter}_norm.weight",)))
    if family.experts:
        return stored + _experts(weights, hf, own, expert_count(config))
    gate_up = (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight")
    return [
        *stored,
        Stored(own + "mlp.linear_fc1.weight", gate_up, 0),
        Stored(own + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), 1),
    ]


def _experts(weights: Mapping[str, Weight], hf: str, own: str, count: int) -> list[Stored]:
    """Describe the experts of a layer: expert 1 is row 1 of the weights that hold all experts.

    Its tensors have a first dimension of size 1 here, which Megatron-core's have not.
    """
    gate_up, down = hf + "mlp.experts.gate_up_proj", hf + "mlp.experts.down_proj"
    stored = [Stored(own + "mlp.router.weight", (hf + "mlp.gate.weight",))]
    for expert in range(count):
        name = f"{own}mlp.experts.local_experts.{expert}."
        row = (expert, expert + 1)
        both, half = weights[gate_up].shape, weights[gate_up].shape[1] // 2
        boxes: tuple[Box, ...] = (
            (row, (0, half), (0, both[2])),
            (row, (half, 2 * half), (0, both[2])),
        )
        stored += [
            Stored(name + "linear_fc1.weight", (gate_up,) * 2, 1, boxes=boxes, expert=expert),
            Stored(
                name + "linear_fc2.weight", (down,), 2, expert=expert,
                boxes=((row, *whole(weights[down].shape[1:])),),
            ),
        ]  # fmt: skip
    return stored


def _check_complete(
    config: PreTrainedConfig, weights: Mapping[str, Weight], stored: list[Stored]
) -> None:
    named = {name for each in stored for name in each.weights}
    if named != weights.keys():
        wrong = min(named ^ weights.keys())
        state = "is not in its map" if wrong in weights else "is in its map, but not in the model"
        raise ModelError(
            f"weight {wrong!r} of model_type {config.model_type!r} {state} in the Megatron engine; "
            "set engine.name=fsdp",
            path=config.name_or_path,
        )


@dataclass(frozen=True)
class Sizes:
    """The degrees of the Megatron engine, as its settings have them."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    chunks: int = 1
    expert_tensor: int | None = None
    context: int = 1

    @property
    def spread_experts(self) -> bool:
        """Whether tensor-parallel ranks have different experts, and not parts of the same."""
        return self.expert_tensor is not None and self.expert_tensor < self.tensor


def check_sizes(config: PreTrainedConfig, sizes: Sizes, key: str) -> None:
    """Check that a model can be split by the degrees.

    Args:
        key: of the engine's settings.

    Raises:
        ConfigError: a size does not divide by the ranks.
        ModelError: the engine does not compute the model.
    """
    family_of(config)
    tensor, experts = f"{key}.tensor_parallel_size", expert_count(config)
    layers, stages = config.num_hidden_layers, f"{key}.pipeline_parallel_size"
    chunks = f"{key}.virtual_pipeline_parallel_size"
    of_expert = f"{key}.expert_parallel_size"
    parts = [
        ("attention heads", config.num_attention_heads, tensor, sizes.tensor),
        ("key-value heads", config.num_key_value_heads, tensor, sizes.tensor),
        ("hidden layers", layers, stages, sizes.pipeline),
        ("hidden layers of a stage", layers // sizes.pipeline, chunks, sizes.chunks),
        ("experts", experts, of_expert, sizes.expert),
    ]
    if experts:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        ranks = 1 if sizes.spread_experts else sizes.tensor
        parts.append(("elements of an expert", width, tensor, ranks))
    else:
        width = config.intermediate_size
        parts.append(("elements of intermediate_size", width, tensor, sizes.tensor))
        if sizes.expert > 1:
            raise ConfigError(
                f"{of_expert}={sizes.expert}, but model_type {config.model_type!r} has no experts; "
                "set it to 1",
                key=of_expert,
            )
    for what, count, setting, ranks in parts:
        if count % ranks:
            raise ConfigError(
                f"{setting}={ranks} does not divide the {count} {what} of the model", key=setting
            )
    if experts and sizes.tensor > 1 and not sizes.sequence_parallel:
        raise ConfigError(
            f"{tensor}={sizes.tensor} of a model with experts needs {key}.sequence_parallel=true: "
            "Megatron-core gives each tensor-parallel rank its own tokens for the experts",
            key=f"{key}.sequence_parallel",
        )
