"""The weights of a model folder: which tensor belongs to which parameter, and reading parts.

A rank that holds a shard of a parameter needs its rows only. The rows of a tensor are neighbours in
a safetensors file, so that they are read as one range of bytes:

    file     │ header │ embedding, 6 rows of 2 numbers in BF16  │ other tensors │
    byte              120     128     136     144
    shards of 3 ranks   rows 0-1│rows 2-3│rows 4-5

The files are read, not mapped. A mapping loads the pages around each range too, and each of them by
an interrupt of the process, which is slow on a network file system.

transformers renames tensors when it loads them, and for some architectures it also computes
parameters from several tensors, by the rules of its `conversion_mapping`. In most mixtures of
experts, a parameter holds all experts of a layer, and the folder has tensors for each of them. Two
experts with gates and ups of 3 rows:

    gate_up_proj [2, 6, D]    expert 0: 3 rows │ 3 rows       expert 1: 3 rows │ 3 rows
    tensors of the folder     0.gate_proj      │ 0.up_proj    1.gate_proj      │ 1.up_proj

So the parameter consists of the elements of the tensors, one tensor after another. Parameters that
are computed in another way are a reason to load the model whole.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from quadriga.errors import ModelError
from quadriga.models.folder import StoredTensor, local_folder, read_header, weight_file_names
from quadriga.parallel.device import STORED_DTYPES
from quadriga.parallel.layouts import Box, count, whole


@dataclass(frozen=True)
class NotFinite:
    """How many of the `size` elements of a tensor are NaN and infinite."""

    nan: int
    infinite: int
    size: int


def count_not_finite(tensor: Tensor) -> NotFinite:
    """Count the elements of a tensor without gradient that are not finite."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return NotFinite(0, 0, tensor.numel())
    # The smallest and the largest value show NaN and infinity without a mask of the same size.
    least, largest = (float(value) for value in torch.aminmax(tensor))
    if math.isfinite(least) and math.isfinite(largest):
        return NotFinite(0, 0, tensor.numel())
    return NotFinite(int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())


def check_all_finite(folder: Path, counts: Mapping[str, NotFinite]) -> None:
    """Check the counts of the parameters of a model.

    Raises:
        ModelError: a weight is not finite.
    """
    wrong = {name: count for name, count in counts.items() if count.nan or count.infinite}
    if wrong:
        name, count = next(iter(wrong.items()))
        raise ModelError(
            f"the weights in {folder} are not finite: {name} has {count.nan} NaN and "
            f"{count.infinite} infinite values of {count.size}"
            + (f", and {len(wrong) - 1} other tensors have some" if len(wrong) > 1 else "")
        )


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors of a folder whose elements, one tensor after another, make up a parameter.

    Attributes:
        shape: of the parameter, in row-major order.
        parts: the tensors. All have the same dtype.
    """

    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the tensors, as safetensors names it."""
        return self.parts[0].dtype

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first element of each part, and of the one behind the last part."""
        return [0, *accumulate(math.prod(part.shape) for part in self.parts)]

    def ranges(self, first: int, count: int) -> Iterator[tuple[StoredTensor, int, int]]:
        """Yield which elements of which parts are the elements from `first` on.

        Yields:
            (part, index of its first element, number of elements).
        """
        # Parts of 6 elements each, first = 4 and 5 elements: 4 and 5 of part 0, 0 to 2 of part 1.
        number = bisect_right(self._starts, first) - 1
        while count > 0:
            start, stop = self._starts[number : number + 2]
            size = min(stop - first, count)
            yield self.parts[number], first - start, size
            first, count, number = first + size, count - size, number + 1


Source = StoredTensor | JoinedTensor
"""Where the elements of a parameter are in a folder."""


def joins_experts(rule: WeightConverter) -> bool:
    """Return whether a rule of transformers stacks the tensors of experts, and does nothing else.

    It stacks a tensor of each expert in dimension 0; or several, one after another in dimension 1.
    """
    operations = list(rule.operations)
    kinds = [type(operation) for operation in operations]
    if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return False
    dims = [getattr(operation, "dim", None) for operation in operations]
    return dims == [0, 1][: len(dims)] and len(rule.target_patterns) == 1


def joined_tensor(
    rule: WeightConverter, found: Mapping[str, Sequence[StoredTensor]], shape: tuple[int, ...]
) -> JoinedTensor | None:
    """Return the tensors of a parameter in their order; None if they are not all its elements.

    Args:
        rule: for which `joins_experts` is true.
        found: source pattern of the rule -> its tensors, in the order of the experts.
        shape: of the parameter, [experts, rows, ...].
    """
    kinds = [found.get(pattern, ()) for pattern in rule.source_patterns]
    if any(len(tensors) != shape[0] for tensors in kinds):
        return None
    experts = list(zip(*kinds, strict=True))
    parts = tuple(tensor for of_expert in experts for tensor in of_expert)
    if len({tensor.dtype for tensor in parts}) != 1:
        return None
    if any(not t.shape or t.shape[1:] != shape[2:] for t in parts):
        return None
    fits = all((sum(t.shape[0] for t in of_expert),) == shape[1:2] for of_expert in experts)
    return JoinedTensor(shape, parts) if fits else None


PIECE_BYTES = 16 * 2**20
"""How much is read at once. The memory for it is all that reading needs beside its target."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's weight files by their names. Reads the headers only.

    Raises:
        ModelError: a file cannot be read or is no safetensors file, or two files hold a tensor of
            the same name.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_file_names(folder):
        header = read_header(folder, file)
        twice = found.keys() & header.keys()
        if twice:
            name = min(twice)
            raise ModelError(
                f"tensor {name!r} is in two files of {folder}: {found[name].file} and {file}"
            )
        found |= header
    return found


class TensorReader:
    """Reads ranges of the tensors of one folder. A context manager, which closes the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, FileIO] = {}
        self._stack = ExitStack()
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, tensor: Source, first: int, target: Tensor) -> None:
        """Copy `target.numel()` elements from index `first` on into `target`, in its dtype.

        Args:
            tensor: has one of the `STORED_DTYPES`.
            first: the index of an element in row-major order.
            target: contiguous, on any device.

        Raises:
            ModelError: the file ends before the last element.
        """
        if isinstance(tensor, JoinedTensor):
            flat = target.view(-1)
            for part, start, count in tensor.ranges(first, len(flat)):
                self.read(part, start, flat[:count])
                flat = flat[count:]
            return
        dtype, flat = STORED_DTYPES[tensor.dtype], target.view(-1)
        size = dtype.itemsize
        step = PIECE_BYTES // size
        for begin in range(0, len(flat), step):
            count = min(step, len(flat) - begin)
            piece = self._piece[: count * size]
            self._fill(piece, tensor.file, tensor.start + (first + begin) * size)
            flat[begin : begin + count].copy_(piece.view(dtype))

    def read_box(
        self, tensor: StoredTensor | JoinedTensor, box: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return a box of a tensor, given as (start, stop) of each dimension, on the CPU.

        Only the elements of the box are read, each run of neighbours at once.

        Raises:
            ModelError: as `read`.
        """
        # The box of rows 1 to 3 and columns 0 to 2 of a tensor [4, 6] is two runs of 2 elements,
        # which begin at 6 and 12. With all 6 columns it is one run of 12, which begins at 6.
        sizes = [stop - start for start, stop in box]
        cut = [dim for dim, size in enumerate(tensor.shape) if sizes[dim] != size]
        runs = sizes[: cut[-1]] if cut else []
        values = torch.empty(sizes, dtype=STORED_DTYPES[tensor.dtype])
        flat = values.view(math.prod(runs), -1)
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(sizes))]
        start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
        for row, index in enumerate(product(*map(range, runs))):
            offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
            self.read(tensor, start + offset, flat[row])
        return values

    def _fill(self, piece: Tensor, file: str, position: int) -> None:
        """Read the bytes of a file from `position` on into `piece`."""
        if file not in self._files:
            opened = FileIO(self._folder / file)
            self._files[file] = self._stack.enter_context(opened)
        source, memory, done = self._files[file], piece.numpy().data, 0
        source.seek(position)
        while done < len(memory):
            count = source.readinto(memory[done:])  # the system may read less than it is asked for
            if not count:
                raise ModelError(
                    f"the model in {self._folder} cannot be loaded: {file} ends at byte "
                    f"{position + done}, and its header says that it has at least "
                    f"{position + len(memory)}"
                )
            done += count


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
    experts: dict[str, tuple[WeightConverter, dict[str, list[StoredTensor]]]] = {}
    # In this order, because a rule can wait for the name of another rule, and experts are numbered.
    for name in sorted(tensors, key=dot_natural_key):
        tensor = tensors[name]
        target, pattern = _name_in_model(name, state, rules, model.base_model_prefix)
        if pattern is not None:
            rule = _rule_of(pattern, rules)
            if rule is None or tensor.dtype not in STORED_DTYPES:
                return WeightNames(reason=f"transformers converts {name}")
            _, of_pattern = experts.setdefault(target, (rule, {}))
            of_pattern.setdefault(pattern, []).append(tensor)
        elif target in state:
            if target in found:
                return WeightNames(reason=f"two tensors are named {target} in the model")
            if tensor.shape != state[target].shape or tensor.dtype not in STORED_DTYPES:
                sizes = f"{tensor.dtype} {list(tensor.shape)}"
                return WeightNames(reason=f"{name} is {sizes}, not {list(state[target].shape)}")
            found[target] = tensor
    for target in experts.keys() & state.keys():
        joined = joined_tensor(*experts[target], tuple(state[target].shape))
        if joined is None or target in found:
            return WeightNames(reason=f"the tensors of the experts do not make up {target}")
        found[target] = joined
    return _with_tied_names(model, state, found, new_prefix)


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
    model: nn.Module, state: Mapping[str, Tensor], found: dict[str, Source], new_prefix: str | None
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


# The way back: from the parameters of a model to the tensors of a checkpoint


@dataclass(frozen=True)
class FilePart:
    """A tensor of a checkpoint, and the box of a model's parameter or buffer that it holds.

    Attributes:
        name: in the files of the checkpoint.
        box: of the parameter.
        dims: the dimensions of the parameter that the tensor has; the box has one index of others.
    """

    name: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.box[dim][1] - self.box[dim][0] for dim in self.dims)


def file_parts(model: PreTrainedModel) -> dict[str, tuple[FilePart, ...]]:
    """Return for each parameter and saved buffer the tensors that `save_pretrained` writes for it.

    transformers' own conversion is run on tensors without numbers. What it makes are views, whose
    offset and strides say which elements they are. Two experts with gates and ups of 3 rows:

        gate_up_proj [2, 6, D]   → experts.1.gate_proj.weight [3, D], box (1, 2), (0, 3), (0, D)

    Raises:
        ModelError: a tensor is no box of a parameter, so its values would have to be computed.
    """
    state = {n: torch.empty_like(t, device="meta") for n, t in model.state_dict().items()}
    with _Views():
        found = revert_weight_conversion(model, dict(state))
    origins = {id(tensor): name for name, tensor in state.items()}
    parts: dict[str, list[FilePart]] = {name: [] for name in state}
    for name, tensor in found.items():
        base = tensor if tensor._base is None else tensor._base
        part = _part_of_view(name, tensor, base) if id(base) in origins else None
        if part is None:
            raise _no_way_back(model, name)
        parts[origins[id(base)]].append(part)
    for name, own in parts.items():
        if sum(count(part.box) for part in own) != state[name].numel() or not own:
            raise _no_way_back(model, name)
    return {name: tuple(own) for name, own in parts.items()}


class _Views(TorchFunctionMode):
    """Without copies of views that are not contiguous."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _part_of_view(name: str, view: Tensor, base: Tensor) -> FilePart | None:
    """Return the box of a contiguous tensor that a view of it holds; None if it is not one."""
    if view is base or not base.numel():
        return FilePart(name, whole(tuple(base.shape)), tuple(range(base.ndim)))
    left, offset = list(zip(view.shape, view.stride(), strict=True)), int(view.storage_offset())
    box, dims = list[tuple[int, int]](), list[int]()
    for dim, stride in enumerate(base.stride()):
        first, offset = divmod(offset, stride)
        size = 1
        if left and left[0][1] == stride:
            size = left.pop(0)[0]
            dims.append(dim)
        box.append((first, first + size))
    return None if left else FilePart(name, tuple(box), tuple(dims))


def _no_way_back(model: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"transformers computes {name!r} of {type(model).__name__} when it reads or writes the "
        "files of a model, so new weights cannot be sent under the names of the files; use "
        "actor_rollout_ref.rollout.name=hf"
    )


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes of the weights of a folder.

    Attributes:
        by_name: checkpoint name -> dtype.
        default: the dtype of most elements, for weights of other names (a new value head, or a
            weight that transformers renames when it loads). None: the folder has no floats.
    """

    by_name: dict[str, torch.dtype]
    default: torch.dtype | None

    def cast(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each floating-point weight in its stored dtype, and other tensors unchanged."""
        for name, tensor in weights:
            dtype = self.by_name.get(name, self.default)
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            yield name, tensor

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a copy of `config` that names the default dtype."""
        config = deepcopy(config)
        if self.default is not None:
            config.dtype = self.default
        return config


def stored_dtypes(path: str | Path) -> StoredDtypes:
    """Read the dtypes of the weights in a model folder. Reads headers only.

    Quantized weights have dtypes that are left out; their layers are exported in the default dtype.
    """
    by_name: dict[str, torch.dtype] = {}
    elements: Counter[torch.dtype] = Counter()
    for name, tensor in stored_tensors(local_folder(path)).items():
        dtype = STORED_DTYPES.get(tensor.dtype)
        if dtype is not None and dtype.is_floating_point:
            by_name[name] = dtype
            elements[dtype] += math.prod(tensor.shape)
    most = elements.most_common(1)
    return StoredDtypes(by_name, most[0][0] if most else None)
