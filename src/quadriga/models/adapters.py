"""Adapters (LoRA) of a model, in PEFT's layers and in PEFT's format on disk.

An adapted linear layer computes x Wᵀ + scaling · (x Aᵀ) Bᵀ, where W [out, in] is frozen, and
A [rank, in] and B [out, rank] are trained (Hu et al. 2021, arXiv 2106.09685, section 4.1). The
scaling is alpha / rank, or alpha / √rank for an adapter that was made so (arXiv 2312.03732). B is
zero at the start, so a new adapter changes nothing. Merged, the layer has the weight
W + scaling · B A.

         in the model                    in the file of an adapter
    W    L.base_layer.weight             (none)
    A    L.lora_A.default.weight         base_model.model.L.lora_A.weight
    B    L.lora_B.default.weight         base_model.model.L.lora_B.weight

for the layer L, whose weight in the base model is L.weight.

Importing this file does not import PEFT.
"""

import importlib.util
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quadriga.config.schema import LoraConfig
from quadriga.errors import ConfigError, ModelError
from quadriga.models.cpu_linear import CpuLinear
from quadriga.models.folder import JsonValue, local_folder, read_header, read_json
from quadriga.models.loading import VALUE_HEAD
from quadriga.models.weights import check_all_finite, count_not_finite

ADAPTER = "default"
"""The name of the adapter in PEFT's layers."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE = ".base_layer"
_STORED_PREFIX = "base_model.model."
_A, _B = "lora_A", "lora_B"
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "layers_to_transform": (None,),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    # Of PiSSA, OLoRA and others, the weights of the base are changed too.
    "init_lora_weights": (True, False, None, "gaussian"),
}
"""Key of an adapter's config → its values that are supported."""


@dataclass(frozen=True)
class Adapter:
    """The adapters of one model.

    Attributes:
        modules: names in the model of the linear layers that have one.
        folder: from which A and B are read; None: they are new.
    """

    modules: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool = False
    folder: Path | None = None

    @property
    def scaling(self) -> float:
        """The factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def plan_adapter(model: PreTrainedModel, lora: LoraConfig) -> Adapter:
    """Return the adapters that the settings ask for. `model` may be on the meta device.

    Raises:
        ConfigError: PEFT is missing, a setting fits no layer, or differs from the adapter's own.
        ModelError: the adapter in `lora.path` cannot be read, or is of another model.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            'model.lora needs the package peft; install it with pip install "quadriga[lora]", or '
            "remove model.lora",
            key="model.lora",
        )
    layers = linear_layers(model)
    if lora.path is None:
        rank = lora.rank or 0
        alpha = 2.0 * rank if lora.alpha is None else lora.alpha
        modules = targets(model, layers, lora.target_modules, lora.exclude_modules)
        check_not_shared(model, layers, modules)
        return Adapter(tuple(modules), rank, alpha, lora.dropout)
    folder = local_folder(lora.path)
    stored = _stored_config(folder)
    rank, alpha = int(_number(folder, stored, "r")), _number(folder, stored, "lora_alpha")
    for key, given, own in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if given is not None and given != own:
            raise ConfigError(
                f"model.lora.{key}={given:g}, but the adapter in {folder} has {own:g}; remove "
                f"model.lora.{key}, which is then that of the adapter",
                key=f"model.lora.{key}",
            )
    if lora.target_modules not in (None, (ALL_LINEAR,)) or lora.exclude_modules:
        raise ConfigError(
            f"the file of the adapter in {folder} names its layers; remove "
            "model.lora.target_modules and model.lora.exclude_modules",
            key="model.lora.target_modules",
        )
    modules = _stored_modules(folder, rank, layers)
    check_not_shared(model, layers, modules)
    rslora = bool(stored.get("use_rslora"))
    return Adapter(tuple(modules), rank, alpha, lora.dropout, rslora, folder)


def add_adapters(model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """Put the adapters into `model`, in place, on the meta device; freeze all other parameters.

    The adapters are in evaluation mode: an update turns their dropout on for itself.

    Returns:
        Name in the model → its first value, float32 on the CPU, equal on all ranks: A is uniform
        with variance 1 / (3 · in), B is 0, as PEFT initialises them; or both are read.

    Raises:
        ConfigError: PEFT cannot adapt a layer.
        ModelError: a value that is read is not finite.
    """
    from peft import LoraConfig as PeftConfig, inject_adapter_in_model

    config = PeftConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # PEFT's own code takes a float too
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        target_modules=[f"0.{name}" for name in adapter.modules],
    )
    # In a model with a config, PEFT reads names of layers as transformers v4 wrote them, and takes
    # some for experts. In this container it takes them as they are.
    container = nn.Sequential(model)
    try:
        # Empty weights: PEFT would draw from the random generator of the process.
        inject_adapter_in_model(config, container, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(
            f"model.lora: PEFT has no adapters for the layers of {type(model).__name__} that "
            f"model.lora.target_modules names: {error}; name others",
            key="model.lora.target_modules",
        ) from error
    model.train(False)
    stored = {} if adapter.folder is None else load_file(adapter.folder / WEIGHTS_FILE)
    values: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            given = stored.get(_name_in_file(name))
            values[name] = _new_value(name, parameter.shape) if given is None else given.float()
    assert {name.partition(".lora_")[0] for name in values} == set(adapter.modules)
    if adapter.folder is not None:
        check_all_finite(adapter.folder, {name: count_not_finite(v) for name, v in values.items()})
    return values


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a model with adapters is part of one."""
    return f".{_A}.{ADAPTER}." in name or f".{_B}.{ADAPTER}." in name


def base_name(name: str) -> str:
    """Return the checkpoint name of a parameter of the base model."""
    return name.replace(f"{BASE}.", ".")


def parts_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B for the weight of an adapted layer, `….base_layer.weight`."""
    layer = weight.removesuffix(f"{BASE}.weight")
    return f"{layer}.{_A}.{ADAPTER}.weight", f"{layer}.{_B}.{ADAPTER}.weight"


def is_stored_part(name: str) -> bool:
    """Return whether a checkpoint name names A or B of an adapter, as in its file."""
    return name.startswith(_STORED_PREFIX)


def stored_part(layer: str, part: Literal["lora_A", "lora_B"]) -> str:
    """Return the name of A or B of a layer of the model, as in the file of an adapter."""
    return f"{_STORED_PREFIX}{layer}.{part}.weight"


def scaled_part(name: str, tensor: Tensor, adapter: Adapter) -> tuple[str, Tensor]:
    """Return (name as in the file, tensor) of a parameter A or B of the model, for an engine that
    computes x Wᵀ + (x Aᵀ) Bᵀ: B is multiplied by the scaling."""
    factor = adapter.scaling if f".{_B}." in name else 1.0
    return _name_in_file(name), tensor if factor == 1 else tensor * factor


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + scaling · B A, in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scaling)


def export_adapter(
    folder: str | Path, weights: Mapping[str, Tensor], adapter: Adapter, base_path: str
) -> None:
    """Write the adapter alone, in PEFT's format. `PeftModel.from_pretrained` reads it.

    Args:
        weights: name in the model → full tensor, of A and B.
        base_path: the folder or hub name of the base model.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(adapter.modules),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {_name_in_file(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _stored_config(folder: Path) -> Mapping[str, JsonValue]:
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ModelError(
                f"model.lora.path: the folder {folder} has no {file}; an adapter in PEFT's format "
                f"has {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
    config = read_json(folder, CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"the adapter in {folder} is of type {config.get('peft_type')!r}, expected 'LORA'"
        )
    for key, allowed in _UNSUPPORTED.items():
        if config.get(key) not in allowed:
            raise ModelError(
                f"the adapter in {folder} has {key}={config.get(key)!r} in {CONFIG_FILE}, which is "
                "not supported; merge it into its base model with PEFT, and train from that"
            )
    return config


def _number(folder: Path, config: Mapping[str, JsonValue], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(
            f"the adapter in {folder} has {key}={value!r} in {CONFIG_FILE}, expected a number "
            "above 0"
        )
    return float(value)


def _stored_modules(folder: Path, rank: int, layers: Mapping[str, nn.Linear]) -> list[str]:
    """Return the layers of an adapter's file, after a check that the model has them.

    Raises:
        ModelError: the adapter is of another model. The message has the sizes of both.
    """
    shapes = {name: t.shape for name, t in read_header(folder, WEIGHTS_FILE).items()}
    modules: dict[str, None] = {}
    for name in shapes:
        layer, _, part = name.removeprefix(_STORED_PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight") or layer not in layers:
            problem = f"the model has no linear layer {layer or name!r} that can have one"
            raise _of_another_model(folder, problem)
        modules[layer] = None
    for layer in modules:
        out, inner = layers[layer].weight.shape
        for part, expected in ((_A, (rank, inner)), (_B, (out, rank))):
            found = shapes.get(f"{_STORED_PREFIX}{layer}.{part}.weight")
            if found is None or tuple(found) != expected:
                raise _of_another_model(
                    folder,
                    f"{layer} has {inner} inputs and {out} outputs in the model, so with rank "
                    f"{rank} its {part} must be {list(expected)}, and the adapter has "
                    f"{'none' if found is None else list(found)}",
                )
    if not modules:
        raise _of_another_model(folder, "it has no tensors")
    return list(modules)


def _of_another_model(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"the adapter in {folder} does not belong to this base model: {reason}; set model.path to "
        "the base of the adapter, or another model.lora.path"
    )


def _name_in_file(name: str) -> str:
    """Return the name in an adapter's file of a parameter A or B of the model."""
    return _STORED_PREFIX + name.replace(f".{ADAPTER}.weight", ".weight")


def _new_value(name: str, shape: torch.Size) -> Tensor:
    """Return A uniform in ± 1 / √in, which depends on the seed of the process and the name; B 0."""
    value = torch.zeros(shape)
    if f".{_A}." in name:
        # A generator of its own: all ranks draw equal values, and no other draw changes.
        seed = (torch.initial_seed() + zlib.crc32(name.encode())) % 2**63
        bound = 1.0 / math.sqrt(shape[1])
        value.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    return value


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
        key = "exclude_modules" if names else "target_modules"
        raise ConfigError(
            f"model.lora leaves no layer of {type(model).__name__} for an adapter: "
            f"target_modules={names}, exclude_modules={list(excluded)}; change model.lora.{key}",
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
    """Return whether a name or pattern of the settings means this layer: all of it, or its end."""
    return fnmatchcase(layer, name) or fnmatchcase(layer, f"*.{name}")
