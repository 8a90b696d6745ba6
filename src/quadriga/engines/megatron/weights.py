"""The weights of a rank: read from a folder, gathered for a stream, as blocks of a checkpoint.

All of it follows from the layout (`families.megatron_model`): a rank's tensor consists of pieces,
and a piece is a box of a checkpoint weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.checkpoint.shards import Block
from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import loading
from quadriga.engines.attention.choice import kernels_of
from quadriga.engines.attention.kernels import AttentionCall, KernelOf
from quadriga.engines.base import HeadKind
from quadriga.engines.megatron.families import family_of, head_size, megatron_model
from quadriga.engines.megatron.ranks import Ranks
from quadriga.engines.sequence_cost import model_shape
from quadriga.errors import ModelError
from quadriga.models.loading import check_reward_model, model_errors
from quadriga.models.weights import TensorReader, count_not_finite
from quadriga.parallel import layouts
from quadriga.parallel.distributed import on_all_ranks, rank, world_size

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Part:
    """What a rank's tensor has of one part of a weight: a box that its pieces fill.

    Attributes:
        key: the name of the block in a checkpoint: that of the weight, if the rank has one only.
        weight: the weight.
        shape: of the whole weight.
        box: of the weight.
        pieces: of the rank's tensor, with boxes in the weight.
    """

    key: str
    weight: str
    shape: tuple[int, ...]
    box: layouts.Box
    pieces: tuple[layouts.Piece, ...]

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of the part of a rank's tensor."""
        values = tensor.new_empty(layouts.shape_of(self.box))
        for piece in self.pieces:
            values[self._within(piece)] = tensor[layouts.slices(piece.at)]
        return values

    def write(self, values: Tensor, tensor: Tensor) -> None:
        """Copy `values` into the part of a rank's tensor."""
        for piece in self.pieces:
            tensor[layouts.slices(piece.at)] = values[self._within(piece)].to(tensor.dtype)

    def _within(self, piece: layouts.Piece) -> tuple[slice, ...]:
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(piece.box, self.box, strict=True)
        )


@dataclass(frozen=True)
class OwnTensor:
    """A tensor of this rank.

    Attributes:
        name: in Megatron-core's module.
        shape: in the layout, which may have a first dimension of size 1 more.
        parts: of which it consists; none if it is all padding.
        counted: whether this rank is the first one with it among tensor-parallel ranks and stages.
        of_expert: whether it is the tensor of an expert. Its replicas are fewer ranks.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    counted: bool
    of_expert: bool


class RankWeights:
    """The part of a model's weights that this rank has.

    Attributes:
        model: how all ranks together store the weights.
        tied: name -> weight of which it is another name.
    """

    def __init__(self, folder: FolderModel, ranks: Ranks) -> None:
        self.model = model = megatron_model(folder.config, folder.weights, ranks.engine)
        self.ranks, self.tied = ranks, folder.tied
        # Replicas have the same tensors, so the layout of one of them is enough.
        spread = ranks.degrees.spread > 1
        self._degrees = ranks.degrees if spread else replace(ranks.degrees, replicas=1)
        self.layout: layouts.Layout = layouts.parallel_layout(model, self._degrees)
        self._stored = {stored.name: stored for stored in model.stored}
        place = ranks.place
        own = _rank_of(self._degrees, place if spread else replace(place, replica=0))
        layers = {_layer_number(stored.name) for stored in model.stored} - {None}
        experts = {stored.expert for stored in model.stored} - {None}
        self._layers_per_part = len(layers) // ranks.degrees.pipeline // ranks.chunks
        self._experts_per_rank = max(1, len(experts) // ranks.engine.expert_parallel_size)
        self.tensors = tuple(self._own_tensor(t, own) for t in self.layout.ranks[own])
        self._senders = self._find_senders()

    def _own_tensor(self, tensor: layouts.StoredTensor, own: int) -> OwnTensor:
        stored = self._stored[tensor.name]
        whole_expert = stored.expert is not None and self._degrees.spread > 1
        first = whole_expert or stored.split is not None or self.ranks.place.tensor == 0
        copied = any(
            self._stored[other.name].weights == stored.weights and other.name != tensor.name
            for number, tensors in self.layout.ranks.items()
            if self._degrees.place(number).stage < self._degrees.place(own).stage
            for other in tensors
        )
        return OwnTensor(
            self._local_name(stored),
            tensor.shape,
            tuple(_parts(self.model, stored, tensor)),
            counted=first and not copied,
            of_expert=stored.expert is not None,
        )

    def first_copy(self, tensor: OwnTensor) -> bool:
        """Whether this rank is the first one of all that has a tensor of its own."""
        _, expert_replica = self.ranks.degrees.expert_place(
            _rank_of(self.ranks.degrees, self.ranks.place)
        )
        number = expert_replica if tensor.of_expert else self.ranks.replica_rank
        return tensor.counted and number == 0

    def _local_name(self, stored: layouts.Stored) -> str:
        """Return the name of a tensor in the module of its stage, which numbers experts from 0, and
        layers from 0 over its chunks."""
        # 8 layers, 2 stages of 2 chunks: layers 2, 3, 6 and 7 of the model are 0 to 3 of stage 1.
        parts, layer = stored.name.split("."), _layer_number(stored.name)
        if layer is not None:
            part, within = divmod(layer, self._layers_per_part)
            chunk = part // self.ranks.degrees.pipeline
            parts[2] = str(chunk * self._layers_per_part + within)
        if stored.expert is not None:
            place = parts.index("local_experts") + 1
            parts[place] = str(stored.expert % self._experts_per_rank)
        return ".".join(parts)

    def _find_senders(self) -> dict[str, list[tuple[int, layouts.Box]]]:
        """Return for each weight the boxes of which it consists, each with the rank that sends it:
        the first one that has it."""
        found: dict[str, dict[layouts.Box, int]] = {name: {} for name in self.model.weights}
        for number, tensors in self.layout.ranks.items():
            sender = _rank_of(self.ranks.degrees, self._degrees.place(number))
            for tensor in tensors:
                for part in _parts(self.model, self._stored[tensor.name], tensor):
                    found[part.weight].setdefault(part.box, sender)
        return {
            name: [(sender, box) for box, sender in boxes.items()] for name, boxes in found.items()
        }

    def fill(self, read: Callable[[Part], Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Set the parameters of this rank; padding becomes 0.

        Args:
            read: returns the values of a part.
            parameters: those of this rank, or some of them, or tensors with their names.
        """
        for own in self.tensors:
            if own.name not in parameters:
                continue
            target = parameters[own.name].view(own.shape)
            target.zero_()
            for part in own.parts:
                part.write(read(part), target)

    def stream(self, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of every weight, tied names included.

        All ranks must exhaust it: each box is broadcast by the first rank that has it.
        """
        own = self._own_parts(parameters)
        for name in self.model.weights:
            yield from self._with_tied(name, self._whole(name, own, parameters))

    def shard_stream(
        self, parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor | Block]]:
        """Yield `stream` with the block of this rank in place of a whole tensor, without a
        collective. Experts are not one block, so their weights are gathered."""
        own = self._own_parts(parameters)
        of_experts = {w for s in self.model.stored if s.expert is not None for w in s.weights}
        example = next(iter(parameters.values()))
        for name, weight in self.model.weights.items():
            if name in of_experts:
                yield from self._with_tied(name, self._whole(name, own, parameters))
                continue
            found = [(part, tensor) for (of, _), (part, tensor) in own.items() if of == name]
            nothing, offset = example.new_empty([0] * len(weight.shape)), (0,) * len(weight.shape)
            block = Block(nothing, weight.shape, offset, False)
            for part, tensor in found:
                offset = tuple(start for start, _ in part.box)
                block = Block(part.read(tensor), weight.shape, offset, False)
            yield from self._with_tied(name, block)

    def _own_parts(
        self, parameters: Mapping[str, Tensor]
    ) -> dict[tuple[str, layouts.Box], tuple[Part, Tensor]]:
        """Return (weight, box) -> the part of this rank, and the tensor that has it."""
        return {
            (part.weight, part.box): (part, parameters[tensor.name].view(tensor.shape))
            for tensor in self.tensors
            for part in tensor.parts
        }

    def _whole(
        self,
        name: str,
        own: Mapping[tuple[str, layouts.Box], tuple[Part, Tensor]],
        parameters: Mapping[str, Tensor],
    ) -> Tensor:
        full = next(iter(parameters.values())).new_empty(self.model.weights[name].shape)
        for sender, box in self._senders[name]:
            if sender == rank():
                part, tensor = own[name, box]
                values = part.read(tensor)
            else:
                values = full.new_empty(layouts.shape_of(box))
            if world_size() > 1:
                dist.broadcast(values, src=sender)
            full[layouts.slices(box)] = values
        return full

    def _with_tied(self, name: str, value: ValueT) -> Iterator[tuple[str, ValueT]]:
        yield name, value
        yield from ((alias, value) for alias, first in self.tied.items() if first == name)

    def blocks(
        self,
        prefix: str,
        tensors: Mapping[str, Tensor],
        *,
        written: Callable[[OwnTensor], bool] | None,
    ) -> dict[str, Block]:
        """Return the parts of `tensors`, which have the names of parameters, as blocks.

        Args:
            written: which of them this rank writes into a checkpoint; the values are copied. None:
                memory to read a checkpoint into.
        """
        found = {}
        for own in self.tensors:
            if own.name not in tensors:
                continue
            tensor = tensors[own.name].view(own.shape)
            for part in own.parts:
                if written is None:
                    data, first = tensor.new_empty(layouts.shape_of(part.box)), False
                elif first := written(own):
                    data = part.read(tensor)
                else:
                    continue
                offset = tuple(start for start, _ in part.box)
                found[prefix + part.key] = Block(data, part.shape, offset, first)
        return found

    def take(self, prefix: str, blocks: Mapping[str, Block], tensors: Mapping[str, Tensor]) -> None:
        """Copy what was read into `blocks` to `tensors`."""
        self.fill(lambda part: blocks[prefix + part.key].data, tensors)


def _rank_of(degrees: layouts.Degrees, place: layouts.Place) -> int:
    """Return the rank with these coordinates; the inverse of `Degrees.place`."""
    rest = place.stage * degrees.replicas + place.replica
    return (rest * degrees.expert + place.expert) * degrees.tensor + place.tensor


def _parts(
    model: layouts.Model, stored: layouts.Stored, tensor: layouts.StoredTensor
) -> Iterator[Part]:
    """Yield what a rank's tensor has of each part of `stored`."""
    for index, name in enumerate(stored.weights):
        full = layouts.whole(model.weights[name].shape)
        box = stored.boxes[index] if stored.boxes else full
        pieces = [
            piece for piece in tensor.pieces if piece.weight == name and _inside(piece.box, box)
        ]
        if not pieces:
            continue
        # The pieces of one part are neighbours: query groups in order, or one shard.
        own = tuple(
            (min(p.box[dim][0] for p in pieces), max(p.box[dim][1] for p in pieces))
            for dim in range(len(box))
        )
        assert layouts.count(own) == sum(layouts.count(p.box) for p in pieces), (tensor.name, name)
        # An expert's tensor has one or two boxes of the weights that hold all experts.
        key = name if stored.expert is None else f"{name}#{stored.expert}.{index}"
        yield Part(key, name, layouts.shape_of(full), own, tuple(pieces))


def _inside(inner: layouts.Box, outer: layouts.Box) -> bool:
    return all(a >= c and b <= d for (a, b), (c, d) in zip(inner, outer, strict=True))


def _layer_number(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("decoder.layers.") else None


class FolderModel:
    """The model of a folder, without values.

    Args:
        settings: of the folder.
        head: see `HeadKind`.

    Attributes:
        config: of the model.
        weights: the weights by their names in transformers, tied names left out.
        tied: name -> weight of which it is another name.

    Raises:
        ModelError: the folder does not hold a model that the Megatron engine computes.
    """

    def __init__(self, settings: ModelConfig, head: HeadKind, *, trained: bool) -> None:
        self._settings, self._head = settings, head
        folder = Path(settings.path)
        if head == "score" and not trained:
            check_reward_model(settings.path, trust_remote_code=False)
        # On the meta device.
        self._module = module = loading.empty_model(settings, head, torch.float32, trained=False)
        self.config: PreTrainedConfig = module.config.get_text_config()
        family_of(self.config)  # raises for an architecture that Megatron-core does not compute
        self.weights = {
            name: layouts.Weight(name, tuple(p.shape), p.dtype)
            for name, p in module.named_parameters()
        }
        self.tied = {n: first for first, names in loading.tied_names(module).items() for n in names}
        with model_errors(folder, "model"):
            names = loading.names_in_folder(settings, module, head, trained=trained)
        if names.reason:
            raise ModelError(
                f"the Megatron engine cannot read the weights in {folder}: {names.reason}; set "
                "engine.name=fsdp",
                path=str(folder),
            )
        self._stored = names.stored  # others are new, and begin as zeros

    def read_into(self, weights: RankWeights, parameters: Mapping[str, Tensor]) -> None:
        """Read the parameters of this rank, and nothing else of the files. All ranks call it.

        Raises:
            ModelError: on any rank, the files cannot be read; or a weight is not finite.
        """
        folder = Path(self._settings.path)

        def fill() -> loading.Counts:
            counts: loading.Counts = {}
            with model_errors(folder, "model"), TensorReader(folder) as reader:

                def read(part: Part) -> Tensor:
                    values = torch.zeros(layouts.shape_of(part.box))
                    if part.weight in self._stored:
                        values = reader.read_box(self._stored[part.weight], part.box)
                    counts[part.weight, part.box] = count_not_finite(values)
                    return values

                weights.fill(read, parameters)
            return counts

        loading.check_finite_over_ranks(folder, on_all_ranks(fill))

    def kernels(self, engine: EngineConfig, dtype: torch.dtype, device: torch.device) -> KernelOf:
        """Choose the kernels of attention.

        Raises:
            ConfigError: the settings name a kernel that cannot compute this model here.
        """
        size = head_size(self.config)
        one = AttentionCall(
            dtype,
            self.config.num_attention_heads // engine.tensor_parallel_size,
            self.config.num_key_value_heads // engine.tensor_parallel_size,
            size,
            size,
            part=engine.context_parallel_size > 1,
        )
        calls = {
            replace(one, mask="causal" if window is None else "window")
            for window in model_shape(self.config).windows
        }
        return kernels_of(lambda: calls, engine.attention, device, device.type)

    def export(self, folder: str | Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write a Hugging Face folder. All ranks exhaust `weights`; rank 0 writes.

        Raises `ModelError` if the tokenizer that the model was loaded with cannot be loaded.
        """
        loading.export_model(folder, weights, self._module, self._settings, self._head)
