"""Which tensors of a model folder belong to which parameter.

`transformers` renames tensors when it loads them, and for some architectures it also computes
parameters from several tensors. The rules are those of its `conversion_mapping`. Parameters that
hold all experts of a layer, of which the folder has tensors for each expert, are matched too
(`joined.py`); other parameters that are computed are a reason to load the model whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from quadriga.models.weight_files import StoredTensor
from quadriga.models.weights.joined import Source, joined_tensor, joins_experts
from quadriga.models.weights.reader import DTYPES


@dataclass(frozen=True)
class WeightNames:
    """The tensors of a folder, by the names of the parameters and buffers that they are copied to.

    Attributes:
        stored: name in the model -> the tensor, or the tensors of all experts. For a tied parameter
            the first of its names.
        new: names in the model for which the folder may have no tensor, and has none.
        reason: why parameters and tensors cannot be matched; empty if they are.
    """

    stored: dict[str, Source] = field(default_factory=dict)
    new: frozenset[str] = frozenset()
    reason: str = ""


def match_names(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor], *, new_prefix: str | None
) -> WeightNames:
    """Match the tensors of a folder with the parameters and saved buffers of a model.

    Args:
        model: on any device, with tied parameters tied.
        tensors: name in the folder -> tensor.
        new_prefix: parameters whose names begin with it need no tensor. None: all do.
    """
    reason = _unsupported(model)
    if reason:
        return WeightNames(reason=reason)
    state: dict[str, Tensor] = model.state_dict()
    rules = get_model_conversion_mapping(model)
    found: dict[str, Source] = {}
    experts: dict[str, _Experts] = {}
    # In this order, because a rule can wait for the name of another rule, and experts are numbered.
    for name in sorted(tensors, key=dot_natural_key):
        tensor = tensors[name]
        target, pattern = _name_in_model(name, state, rules, model.base_model_prefix)
        if pattern is not None:
            rule = _rule_of(pattern, rules)
            if rule is None or tensor.dtype not in DTYPES:
                return WeightNames(reason=f"transformers converts {name}")
            experts.setdefault(target, _Experts(rule)).add(pattern, tensor)
        elif target in state:
            if target in found:
                return WeightNames(reason=f"two tensors are named {target} in the model")
            if tensor.shape != state[target].shape or tensor.dtype not in DTYPES:
                sizes = f"{tensor.dtype} {list(tensor.shape)}"
                return WeightNames(reason=f"{name} is {sizes}, not {list(state[target].shape)}")
            found[target] = tensor
    for target in experts.keys() & state.keys():
        of_layer, shape = experts[target], tuple(state[target].shape)
        joined = joined_tensor(of_layer.rule, of_layer.found, shape)
        if joined is None or target in found:
            return WeightNames(reason=f"the tensors of the experts do not make up {target}")
        found[target] = joined
    return _with_tied_names(model, state, found, new_prefix)


@dataclass
class _Experts:
    """The tensors of a parameter that holds all experts of a layer, by the patterns of the rule."""

    rule: WeightConverter
    found: dict[str, list[StoredTensor]] = field(default_factory=dict)

    def add(self, pattern: str, tensor: StoredTensor) -> None:
        self.found.setdefault(pattern, []).append(tensor)


def _rule_of(pattern: str, rules: Sequence[WeightTransform]) -> WeightConverter | None:
    """Return the rule that has this source pattern; None if its parameter cannot be matched."""
    of_pattern = [
        r for r in rules if isinstance(r, WeightConverter) if pattern in r.source_patterns
    ]
    return of_pattern[0] if len(of_pattern) == 1 and joins_experts(of_pattern[0]) else None


def _unsupported(model: PreTrainedModel) -> str:
    """Return why the rules of names do not hold for this model; empty if they do."""
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return f"{kind.__name__} is not a model of transformers"
    if model.dtype in (torch.float16, torch.bfloat16) and (
        model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    ):
        return f"{kind.__name__} keeps some parameters in float32"
    return ""


def _name_in_model(
    name: str, state: dict[str, Tensor], rules: Sequence[WeightTransform], prefix: str
) -> tuple[str, str | None]:
    """Return the name in the model of a tensor in the folder, and the pattern of the rule by which
    transformers converts it, if it does."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if target not in state and name in state:
        # A rule of names that is not meant for this folder, as `from_pretrained` decides.
        target, pattern = rename_source_key(name, [], [], prefix, state)
    return target, pattern


def _with_tied_names(
    model: nn.Module,
    state: Mapping[str, Tensor],
    found: dict[str, Source],
    new_prefix: str | None,
) -> WeightNames:
    """Check that each parameter and each saved buffer has one tensor."""
    # Tied: {"model.embed_tokens.weight", "lm_head.weight"} are one parameter. A folder that holds
    # both may hold different numbers, and then `from_pretrained` does not tie them.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    buffers = state.keys() - {name for group in names.values() for name in group}
    first_names: dict[str, Source] = {}
    new = set()
    for group in [*names.values(), *([name] for name in buffers)]:
        stored = [name for name in group if name in found]
        if len(stored) > 1:
            return WeightNames(reason=f"{stored[0]} and {stored[1]} are one parameter")
        if not stored:
            if new_prefix is None or not group[0].startswith(new_prefix):
                return WeightNames(reason=f"it has no tensor for {group[0]}")
            new.add(group[0])
        else:
            first_names[group[0]] = found[stored[0]]
    return WeightNames(first_names, frozenset(new))
