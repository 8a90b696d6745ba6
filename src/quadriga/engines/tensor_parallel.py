"""Tensor parallelism: which dimension of each weight of a decoder layer the ranks divide, and how.

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

A weight becomes a `DTensor` on the mesh of these ranks, and FSDP divides it further over the
data-parallel ranks. In a forward pass, a module sees the part of its own rank as a plain tensor, so
its code computes a smaller layer. The gradient of a weight that is whole on all ranks is a part of
a sum (`Partial`), which FSDP adds up before it reduces the gradient.

The checks read the config of a model, no weights, so that they can run before any process starts.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.errors import ConfigError
from quadriga.models.adapters import base_name
from quadriga.models.architectures import architecture_of
from quadriga.models.folder import local_folder
from quadriga.models.loading import model_without_weights, read_config
from quadriga.parallel.model_ranks import ModelRanks, Subgroup
from quadriga.parallel.token_exchange import gather_tokens, sum_tokens

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


PARTIAL_BIAS: Final = "partial bias"
"""The bias of a rowwise layer, which is whole on each rank, and which only one rank adds."""


Plan = Mapping[str, Style]
"""Pattern of a module or weight, relative to the base model → style."""


def tensor_plan(config: PreTrainedConfig) -> Plan:
    """Return the plan of a config.

    Raises:
        ConfigError: the model has none, or was not compared with one rank.
    """
    text = config.get_text_config()
    found = getattr(text, "base_model_tp_plan", None)
    if text.model_type not in TESTED or not found:
        raise ConfigError(
            f"model_type {text.model_type!r} has no plan of tensor parallelism that was compared "
            f"with one rank; those of {', '.join(TESTED)} were. Set tensor_parallel_size=1; "
            "sequence_parallel_size needs no plan"
        )
    styles = {}
    for pattern, style in found.items():
        if not pattern.startswith("layers."):
            continue
        assert style in _STYLES, (pattern, style)
        rowwise_experts = ".experts." in pattern and style == "rowwise"
        styles[pattern] = "experts" if rowwise_experts else _STYLES[style]
    return styles


def style_of(plan: Plan, name: str) -> Style:
    """Return the style of a module or weight by its name in the base model."""
    return next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "whole")


def division(plan: Plan, name: str) -> int | Literal["partial bias"] | None:
    """Return the dimension in which a weight of a decoder layer is divided, by its name in the
    base model; None: each rank has the whole weight."""
    # layers.0.self_attn.o_proj.base_layer.weight -> style of layers.0.self_attn.o_proj
    if style_of(plan, name) == "experts":
        return 0
    module, _, leaf = base_name(name).rpartition(".")
    layer, dot, adapter = module.partition(".lora_")
    style = style_of(plan, layer)
    if dot:
        return _ADAPTERS.get((style, f"lora_{adapter[:1]}"))
    if style == "rowwise":
        return 1 if leaf == "weight" else PARTIAL_BIAS
    return 0 if style == "colwise" else None


def decoder_parts(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return (name in the base model, module) of each decoder layer."""
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    layers = base.get_submodule("layers")
    return [(f"layers.{index}", layer) for index, layer in layers.named_children()]


def check_division(model: PreTrainedModel, size: int, key: str) -> None:
    """Check that the weights of a model divide over `size` ranks. Reads shapes only.

    Args:
        key: the setting of the engine, for the message.

    Raises:
        ConfigError: heads or a weight do not divide. The message has the arithmetic.
    """
    plan = tensor_plan(model.config)
    check_heads(model.config.get_text_config(), size, key)
    for name, layer in decoder_parts(model):
        for leaf, parameter in layer.named_parameters():
            dim = division(plan, f"{name}.{leaf}")
            if isinstance(dim, int) and parameter.shape[dim] % size:
                length = parameter.shape[dim]
                raise ConfigError(
                    f"{key}.tensor_parallel_size={size} does not divide dimension {dim} of "
                    f"{name}.{leaf} {tuple(parameter.shape)} ({_division(length, size)}); choose "
                    "another size",
                    key=key,
                )


def _division(count: int, size: int) -> str:
    """Return the arithmetic: "5 = 2 × 2 + 1"."""
    return f"{count} = {count // size} × {size} + {count % size}"


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
                f"model_type {text.model_type!r} ({_division(count, size)}); choose a divisor of "
                f"{count}, and {key}.sequence_parallel_size for other ranks",
                key=key,
            )


def divide_layers(model: PreTrainedModel, ranks: ModelRanks, mesh: DeviceMesh | None) -> None:
    """Divide the weights of the decoder layers of `model` in place, before FSDP shards it.

    Args:
        mesh: of the ranks of tensor parallelism. None: for the memory plan, each weight becomes a
            plain tensor of the size that one rank has.

    Raises:
        ConfigError: the model has no plan, or its weights do not divide.
    """
    tensor = ranks.tensor
    check_division(model, tensor.size, "engine")
    plan = tensor_plan(model.config)
    for name, layer in decoder_parts(model):
        for path, module in layer.named_modules():
            prefix = f"{name}.{path}" if path else name
            _divide_weights(module, prefix, plan, tensor, mesh)
        for child, block in layer.named_children():
            weights = [f"{name}.{child}.{leaf}" for leaf, _ in block.named_parameters()]
            if not any(isinstance(division(plan, weight), int) for weight in weights):
                continue  # no block
            _exchange_around(block, tensor)
            for path, inner in block.named_modules():
                if style_of(plan, f"{name}.{child}.{path}.gate_up_proj") == "experts":
                    _divide_experts(inner, tensor)


def _divide_weights(
    module: nn.Module, prefix: str, plan: Plan, ranks: Subgroup, mesh: DeviceMesh | None
) -> None:
    own = list(module.named_parameters(recurse=False))
    divisions = [division(plan, f"{prefix}.{leaf}") for leaf, _ in own]
    for (leaf, parameter), dim in zip(own, divisions, strict=True):
        data, placement = parameter.detach(), cast("Placement", Replicate())
        if isinstance(dim, int):
            part, placement = data.chunk(ranks.size, dim)[ranks.index], Shard(dim)
            data = part.clone(memory_format=torch.contiguous_format)
        if mesh is not None:
            data = DTensor.from_local(data, mesh, [placement], run_check=False)
        divided = nn.Parameter(data, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, divided)
    if own:
        _use_own_part(module, PARTIAL_BIAS not in divisions or ranks.index == 0)


class _OwnPart(nn.Module):
    """A module that computes with the part of its weights that this rank has."""

    _adds_bias: bool

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value  # not a weight, or the shard of one that FSDP has not gathered
        placement = value.placements[0]
        if not placement.is_replicate():
            return value.to_local()
        own = value.to_local(grad_placements=[Partial()])
        # The sum over ranks has the bias of a rowwise layer once. A product with 0 keeps the
        # gradient, which all ranks must have.
        return own if name != "bias" or self._adds_bias else own * 0.0


def _use_own_part(module: nn.Module, adds_bias: bool) -> None:
    """Let `module` read its weights as `_OwnPart` does."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (_OwnPart, kind), {})
    vars(module)["_adds_bias"] = adds_bias


def _exchange_around(block: nn.Module, ranks: Subgroup) -> None:
    """Let a block compute the tokens of all ranks, and return its part of the sums."""

    def gather(
        module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        assert isinstance(hidden, Tensor)
        whole = gather_tokens(hidden[0], ranks)[None]  # [1, n / t, D] -> [1, n, D]
        if args:
            return (whole, *args[1:]), {**kwargs}
        return args, {**kwargs, "hidden_states": whole}

    def add(module: nn.Module, args: object, output: object) -> object:
        hidden, *others = output if isinstance(output, tuple) else (output,)
        assert isinstance(hidden, Tensor)
        own = sum_tokens(hidden[0], ranks)[None]  # [1, n, D] -> [1, n / t, D]
        return (own, *others) if isinstance(output, tuple) else own

    block.register_forward_pre_hook(gather, with_kwargs=True)
    block.register_forward_hook(add)


def _divide_experts(experts: nn.Module, ranks: Subgroup) -> None:
    """Let experts compute the tokens of those that this rank has."""
    # 4 experts on 2 ranks, and a token of experts 1 and 3. Rank 0 has experts 0 1, rank 1 has 2 3.
    # Number 2 stands for an expert of another rank:
    #
    #   rank 0   1 2 with the weights w1 0         rank 1   2 1 with the weights 0 w3
    count = experts.num_experts
    assert isinstance(count, int)
    own = count // ranks.size
    # Transformers leaves tokens of number `num_experts` out.
    vars(experts).update(num_experts=own, _is_expert_parallel=True)

    def choose(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, index, weights = args
        local = index - ranks.index * own
        here = (local >= 0) & (local < own)
        return hidden, torch.where(here, local, own), weights * here

    experts.register_forward_pre_hook(choose)


_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the longest position of a pass."""


NOT_COMPARED = ("gemma3n_text",)
"""Architectures with packed rows whose gradients were not equal to those of one rank: in a small
model, some of them are not finite, and padding tokens change which."""


def check_model_parallel(
    config: PreTrainedConfig, engine: EngineConfig, key: str, *, packed: bool | None = None
) -> None:
    """Check that the ranks of a model-parallel group can divide the work of a model.

    Args:
        key: the setting of the engine, for the message.
        packed: whether rows are packed; None: if the model supports it.

    Raises:
        ConfigError: they cannot. The message has the arithmetic.
    """
    if engine.model_parallel_size == 1:
        return
    kind = config.model_type
    setting = f"{key}.{engine.model_parallel_text()}"
    text = config.get_text_config()
    lengths = [name for name in _rope_types(config) if name in _BY_LENGTH]
    if packed is False or architecture_of(config).rows != "packed":
        problem = (
            f" splits packed rows, and model_type {kind!r} is computed with padded rows "
            "(docs/concepts/architectures.md)"
        )
    elif kind in NOT_COMPARED:
        problem = f": gradients of model_type {kind!r} were not found equal to those of one rank"
    elif engine.sequence_parallel_size * engine.context_parallel_size > 1 and lengths:
        problem = (
            f" gives each rank a part of the positions, and rope_type {lengths[0]!r} of "
            f"model_type {kind!r} depends on the longest of all"
        )
    else:
        if engine.tensor_parallel_size > 1:
            tensor_plan(config)
            check_heads(text, engine.tensor_parallel_size, key)
        return _check_sequence(text, engine, key)
    raise ConfigError(f"{setting}{problem}; set it to 1", key=key)


def _check_sequence(config: PreTrainedConfig, engine: EngineConfig, key: str) -> None:
    size, tensor = engine.sequence_parallel_size, engine.tensor_parallel_size
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads) // tensor
    heads //= tensor
    whose = "attention heads" + (" of each tensor rank" if tensor > 1 else "")
    whose += f" of model_type {config.model_type!r}"
    setting, instead = f"{key}.sequence_parallel_size={size}", f"{key}.context_parallel_size={size}"
    repeated = key_heads * (size // math.gcd(key_heads, size))  # a multiple of `size`
    if heads % repeated:
        raise ConfigError(
            f"{setting} does not divide the {heads} {whose} ({_division(heads, size)}), or they do "
            f"not divide by its {key_heads} key heads repeated to {repeated}; choose a divisor, or "
            f"set {instead} instead",
            key=key,
        )


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """Return the kinds of rotary positions; a config can have one for each kind of layers."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, Mapping))]
    return [str(kind) for part in each if (kind := part.get("rope_type") or part.get("type"))]


def check_model(model: ModelConfig, engine: EngineConfig, key: str) -> None:
    """Check the same for the model of a folder; see `check_model_parallel`."""
    if engine.model_parallel_size == 1:
        return
    folder = local_folder(model.path, weights=False)
    trusted = model.trust_remote_code
    check_model_parallel(read_config(Path(folder), trust_remote_code=trusted), engine, key)
    if engine.tensor_parallel_size > 1:
        shapes = model_without_weights(replace(model, path=str(folder)))
        check_division(shapes, engine.tensor_parallel_size, key)
