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

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.errors import ConfigError, ModelError
from quadriga.parallel.layouts import Box, Degrees, Model, Stored, Weight, whole

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


def megatron_model(
    config: PreTrainedConfig, weights: Mapping[str, Weight], engine: EngineConfig
) -> Model:
    """Describe how Megatron-core stores the weights of a model.

    The tensors of layers have their number in the whole model, not in their stage.

    Args:
        weights: the weights of the model by their names in transformers, tied names left out.

    Raises:
        ModelError: a weight belongs to no tensor, or a tensor needs a weight that is missing.
    """
    tied = "lm_head.weight" not in weights and "score.weight" not in weights
    family, stages = family_of(config), engine.pipeline_parallel_size
    chunks = engine.virtual_pipeline_parallel_size
    layers, last = config.num_hidden_layers, stages - 1
    padded = padded_vocabulary(config, engine.tensor_parallel_size)
    embedding = "model.embed_tokens.weight"
    stored = [Stored("embedding.word_embeddings.weight", (embedding,), 0, stage=0, padded=padded)]
    for layer in range(layers):
        found = _layer(config, family, weights, layer)
        # 8 layers, 2 stages of 2 chunks: the first stage has the layers 0, 1, 4 and 5.
        part = layer * stages * chunks // layers
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
    stored = [
        Stored(own + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
        Stored(own + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        Stored(own + "self_attention.linear_proj.weight", (attention + "o_proj.weight",), 1),
    ]
    for kind in ("weight", "bias") if family.qkv_bias else ("weight",):
        names = tuple(f"{attention}{letter}_proj.{kind}" for letter in "qkv")
        name, groups = f"{own}self_attention.linear_qkv.{kind}", config.num_key_value_heads
        stored.append(Stored(name, names, 0, groups))
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


def ranks_of_expert(engine: EngineConfig) -> int:
    """Return the ranks that split each expert. One of several tensor-parallel ranks: these have
    different experts, and not parts of the same."""
    return engine.expert_tensor_parallel_size or engine.tensor_parallel_size


def check_sizes(config: PreTrainedConfig, engine: EngineConfig, key: str) -> None:
    """Check that a model can be split by the degrees.

    Args:
        key: of the engine's settings.

    Raises:
        ConfigError: a size does not divide by the ranks.
        ModelError: the engine does not compute the model.
    """
    family_of(config)
    tensor, experts = "tensor_parallel_size", expert_count(config)
    layers, stages = config.num_hidden_layers, engine.pipeline_parallel_size
    parts = [
        ("attention heads", config.num_attention_heads, tensor),
        ("key-value heads", config.num_key_value_heads, tensor),
        ("hidden layers", layers, "pipeline_parallel_size"),
        ("hidden layers of a stage", layers // stages, "virtual_pipeline_parallel_size"),
        ("experts", experts, "expert_parallel_size"),
    ]
    if not experts:
        parts.append(("elements of intermediate_size", config.intermediate_size, tensor))
    elif ranks_of_expert(engine) > 1:
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        parts.append(("elements of an expert", width, tensor))
    if not experts and engine.expert_parallel_size > 1:
        raise ConfigError(
            f"{key}.expert_parallel_size={engine.expert_parallel_size}, but model_type "
            f"{config.model_type!r} has no experts; set it to 1",
            key=f"{key}.expert_parallel_size",
        )
    for what, count, name in parts:
        if count % getattr(engine, name):
            raise ConfigError(
                f"{key}.{name}={getattr(engine, name)} does not divide the {count} {what} of the "
                "model",
                key=f"{key}.{name}",
            )
    if experts and engine.tensor_parallel_size > 1 and not engine.sequence_parallel:
        raise ConfigError(
            f"{key}.{tensor}={engine.tensor_parallel_size} of a model with experts needs "
            f"{key}.sequence_parallel=true: Megatron-core gives each tensor-parallel rank its own "
            "tokens for the experts",
            key=f"{key}.sequence_parallel",
        )


# The settings that the engine follows.

PACKAGE = "megatron-core"
VERSION = "0.16.1"
"""The version that the engine was written for. Others have other modules and arguments."""

on_cpu_for_tests = False
"""Whether `tests/megatron_on_cpu.py` has let Megatron-core compute on CPUs."""


def check_engine(
    model: ModelConfig,
    engine: EngineConfig,
    device_type: str | None,
    key: str = "engine",
    model_key: str = "model",
) -> None:
    """Check that Megatron-core can be used, and that its engine follows all settings.

    Args:
        device_type: of the ranks. None: it is not known yet.
        key: of the engine's settings.
        model_key: of the model's settings.

    Raises:
        ConfigError: Megatron-core is missing or does not compute on the device, or a setting is for
            the FSDP engine, or is not built for this one.
    """
    found = _version()
    if found != VERSION:
        state = "it is not installed" if found is None else f"this environment has {found}"
        raise ConfigError(
            f"{key}.name=megatron needs {PACKAGE} {VERSION}, and {state}; install "
            f"quadriga[megatron], or set {key}.name to fsdp",
            key=f"{key}.name",
        )
    if device_type not in (None, "cuda") and not (device_type == "cpu" and on_cpu_for_tests):
        raise ConfigError(
            f"{key}.name=megatron needs CUDA devices, and the device of the ranks is "
            f"{device_type!r}; set {key}.name=fsdp",
            key=f"{key}.name",
        )
    _check_followed(model, engine, key, model_key)
    _check_degrees(engine, key)


def core_flags(device_type: str, config: PreTrainedConfig) -> dict[str, str]:
    """Return what makes Megatron-core faster -> why it is off; "" if it is on.

    The engine passes those that are flags of `TransformerConfig` on, and the plan lists all.
    """
    cpu = "on a CPU" if device_type == "cpu" else ""
    apex, transformer_engine = (
        cpu or ("" if find_spec(package) else f"{package} is not installed")
        for package in ("fused_weight_gradient_mlp_cuda", "transformer_engine")
    )
    found = {
        "overlap_grad_reduce": "",
        "overlap_param_gather": "owners send parameters after the step",
        "gradient_accumulation_fusion": apex,
        "bias_activation_fusion": cpu,
        "bias_dropout_fusion": cpu,
        "apply_rope_fusion": transformer_engine,
        "masked_softmax_fusion": "attention has kernels of engine.attention",
        "moe_permute_fusion": transformer_engine,
        "moe_grouped_gemm": "it stores the weights of all experts in one parameter, transposed",
    }
    return {name: off for name, off in found.items() if expert_count(config) or "moe" not in name}


def _version() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def check_model(model: ModelConfig, engine: EngineConfig, key: str) -> None:
    """Check that the model of a folder is computed, and can be split by the degrees."""
    from quadriga.models.folder import local_folder
    from quadriga.models.loading import read_config  # imports torch

    folder = Path(local_folder(model.path, weights=False))
    config = read_config(folder, trust_remote_code=model.trust_remote_code)
    check_sizes(config.get_text_config(), engine, key)


def _check_followed(model: ModelConfig, engine: EngineConfig, key: str, model_key: str) -> None:
    attention = model.attn_implementation
    refused = {
        f"{model_key}.lora": model.lora.enabled,
        f"{model_key}.freeze": bool(model.freeze),
        f"{model_key}.use_shm": model.use_shm,
        f"{model_key}.trust_remote_code": model.trust_remote_code,
        f"{model_key}.gradient_checkpointing=selective": (
            model.gradient_checkpointing == "selective"
        ),
        f"{model_key}.attn_implementation={attention}": (
            attention != ModelConfig().attn_implementation
        ),
        f"{key}.dtype=float16": engine.dtype == "float16",
    }
    for setting, given in refused.items():
        if given:
            raise ConfigError(
                f"{setting} is not built for {key}.name=megatron; set {key}.name=fsdp, or leave it "
                "out",
                key=setting.split("=")[0],
            )


def _check_degrees(engine: EngineConfig, key: str) -> None:
    """Check degrees that have no meaning without others."""
    tensor, chunks = engine.tensor_parallel_size, engine.virtual_pipeline_parallel_size
    if engine.sequence_parallel and tensor == 1:
        raise ConfigError(
            f"{key}.sequence_parallel splits tokens over the tensor-parallel ranks, and "
            f"{key}.tensor_parallel_size is 1; set it above 1, or sequence_parallel to false",
            key=f"{key}.sequence_parallel",
        )
    if chunks > 1 and engine.pipeline_parallel_size == 1:
        raise ConfigError(
            f"{key}.virtual_pipeline_parallel_size={chunks} divides the layers of a pipeline "
            f"stage, and {key}.pipeline_parallel_size is 1; set it above 1, or "
            "virtual_pipeline_parallel_size to 1",
            key=f"{key}.virtual_pipeline_parallel_size",
        )
    split, setting = ranks_of_expert(engine), f"{key}.expert_tensor_parallel_size"
    if split not in (1, tensor):
        raise ConfigError(
            f"{setting}={split}, but the ranks that split an expert are 1 or the {tensor} of "
            f"{key}.tensor_parallel_size; set it to 1, {tensor} or null",
            key=setting,
        )
    if split < tensor and engine.expert_parallel_size == 1:
        raise ConfigError(
            f"{setting}=1 gives {key}.tensor_parallel_size={tensor} ranks different experts, "
            f"and {key}.expert_parallel_size is 1; set it above 1, or {setting} to null",
            key=setting,
        )


def degrees_of(engine: EngineConfig, ranks: int) -> Degrees:
    """Return the degrees of the weights. Context-parallel ranks have the same weights, so they are
    replicas as data-parallel ranks are.

    Raises:
        ConfigError: the ranks do not divide by the degrees.
    """
    # 8 ranks with tensor 2, pipeline 2, expert 2: 8 / (2 · 2) = 2 ranks with the same layers, which
    # have different experts, so there is 8 / (2 · 2 · 2) = 1 replica of each expert.
    tensor, pipeline, expert = (
        engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size
    )  # fmt: skip
    of_expert = ranks_of_expert(engine)
    _check_divides(ranks, tensor=tensor, pipeline=pipeline, context=engine.context_parallel_size)
    _check_divides(ranks, tensor=of_expert, pipeline=pipeline, expert=expert)
    same_layers = ranks // tensor // pipeline
    if of_expert < tensor:
        # 4 ranks with tensor 2, expert 4: two ranks with the same part of attention, two with the
        # other part, and each of the four has a quarter of the experts.
        return Degrees(tensor=tensor, replicas=same_layers, pipeline=pipeline, spread=expert)
    return Degrees(tensor=tensor, expert=expert, replicas=same_layers // expert, pipeline=pipeline)


def _check_divides(ranks: int, **sizes: int) -> None:
    """Check that the product of the degrees divides the ranks."""
    product = math.prod(sizes.values())
    if ranks % product:
        used = {name: size for name, size in sizes.items() if size > 1}
        names = " × ".join(f"{name}_parallel_size" for name in used)
        values = " × ".join(map(str, used.values()))
        of_product = f"{values} = {product}" if len(used) > 1 else values
        raise ConfigError(f"{names} = {of_product} does not divide the {ranks} ranks")
