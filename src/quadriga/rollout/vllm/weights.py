"""vLLM's parameters by checkpoint name: write them, read them back, compare them with the files.

vLLM joins projections into one parameter and pads the vocabulary. Example, 4 query heads and 2
key-value heads of size 2, vocabulary 97:

    checkpoint name                  vLLM's parameter             rows
    self_attn.q_proj.weight [8, h]   self_attn.qkv_proj.weight    0 to 8
    self_attn.k_proj.weight [4, h]   self_attn.qkv_proj.weight    8 to 12
    self_attn.v_proj.weight [4, h]   self_attn.qkv_proj.weight    12 to 16
    embed_tokens.weight [97, h]      embed_tokens.weight [128,h]  0 to 97

Weights are written to these rows and read from them. vLLM's own loaders have read the model folder
before: `check_files` compares each weight that vLLM loaded with the file, so a table that does not
fit the model is found when the engine starts.

With tensor parallelism a rank holds a slice of most parameters. Reading is then a collective: the
slices of all ranks of the copy are put together along the dimension in which slice and weight
differ. Key-value heads that are fewer than the ranks are held by several ranks. Example, 4 ranks:

    weight      slice       slices in the weight    taken from rank
    [8, h]      [2, h]      4                       0 1 2 3
    [4, h]      [2, h]      2                       0 2
    [h, 8]      [h, 2]      4                       0 1 2 3
    [h]         [h]         1                       0

The adapter of the model is written into vLLM's buffers as weights are.
vLLM computes x Wᵀ + (x Aᵀ) Bᵀ for each request that names an adapter. Here all requests name the
same one. vLLM gets it once from files, with zeros; later A and B are written into its buffers, in
which the parts of a joined projection have A and B of their own:

    name in an adapter's file          vLLM's buffer                            part
    ….self_attn.k_proj.lora_A.weight   self_attn.qkv_proj.lora_a_stacked[1]     [rank, inputs]
    ….self_attn.k_proj.lora_B.weight   self_attn.qkv_proj.lora_b_stacked[1]     [outputs, rank]

The buffers have space for more ranks than the adapter has. The rest stays zero.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from quadriga.errors import ModelError
from quadriga.models.adapters import CONFIG_FILE, WEIGHTS_FILE, Adapter, stored_part
from quadriga.models.weights import TensorReader, file_parts, match_names, stored_tensors
from quadriga.parallel.layouts import Box, narrowed, shape_of, slices, whole
from quadriga.rollout.base import check_weight

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_NAME, _ID, _SLOT = "policy", 1, 0


@dataclass(frozen=True)
class AdapterPlace:
    """Where A or B of one layer is: the first rows and columns of a buffer of vLLM.

    Attributes:
        buffers: "lora_a_stacked" or "lora_b_stacked".
        index: of the layer in a joined projection.
    """

    module: Module
    buffers: str
    index: int
    shape: tuple[int, int]

    def local(self) -> Tensor:
        """Return the part of the buffer, which shares its memory."""
        rows, columns = self.shape
        return self.buffer()[_SLOT, 0, :rows, :columns]

    def buffer(self) -> Tensor:
        """Return the whole buffer. It is looked up each time, because vLLM may replace it."""
        stacked: Tensor = getattr(self.module, self.buffers)[self.index]
        return stacked


def load_adapter(engine: LLMEngine, model: Module, planned: Adapter) -> dict[str, AdapterPlace]:
    """Load an adapter of zeros, which all requests use. Return the places of A and B of its layers.

    Args:
        engine: started with space for adapters.
        model: vLLM's model on this rank.
        planned: rank and layers of the adapter.

    Raises:
        ModelError: vLLM cannot compute one of the layers with an adapter.
    """
    found = dict(_adapter_places(model, planned.rank))
    places: dict[str, AdapterPlace] = {}
    for layer in planned.modules:
        for name in (stored_part(layer, "lora_A"), stored_part(layer, "lora_B")):
            if name not in found:
                raise ModelError(
                    f"vLLM cannot compute layer {layer!r} with an adapter; set "
                    "actor_rollout_ref.rollout.load_adapters=false"
                )
            places[name] = found[name]
    # One layer suffices: vLLM sets the others to zero, and computes with all buffers.
    first = next(iter(places))
    config = {
        "peft_type": "LORA",
        "r": planned.rank,
        "lora_alpha": planned.rank,  # B is multiplied by the scaling before it is sent
        "target_modules": [first.split(".")[-3]],
        "bias": "none",
    }
    with tempfile.TemporaryDirectory(prefix="quadriga_adapter_") as folder:
        names = first, first.replace("lora_A", "lora_B")
        tensors = {name: torch.zeros(places[name].shape) for name in names}
        save_file(tensors, Path(folder) / WEIGHTS_FILE)
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        engine.add_lora(adapter_request(folder))
    engine.pin_lora(_ID)
    return places


def adapter_request(path: str) -> LoRARequest:
    """Return what a request of vLLM needs to be computed with the adapter.

    The path is read once. Later vLLM finds the adapter by its number.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, path)


def _adapter_places(model: Module, rank: int) -> Iterator[tuple[str, AdapterPlace]]:
    """Yield (name in an adapter's file, place) of A and B of every layer."""
    joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for path, module in model.named_modules():
        # Those of embeddings and of the output layer, which have no adapters here, are no tuples.
        if not isinstance(getattr(module, "lora_a_stacked", None), tuple):
            continue
        parent, _, leaf = path.rpartition(".")
        parts = joined.get(leaf, [leaf])
        if len(parts) != len(module.lora_a_stacked):
            continue
        for index, part in enumerate(parts):
            layer = f"{parent}.{part}"
            outputs = module.lora_b_stacked[index].shape[-2]
            inputs = module.lora_a_stacked[index].shape[-1]
            a = AdapterPlace(module, "lora_a_stacked", index, (rank, inputs))
            b = AdapterPlace(module, "lora_b_stacked", index, (outputs, rank))
            yield stored_part(layer, "lora_A"), a
            yield stored_part(layer, "lora_B"), b


@dataclass(frozen=True)
class _Place:
    """Where a weight is: rows `start` to `stop` of a parameter of vLLM on this rank.

    Attributes:
        padded: the rows of all ranks together can be more than those of the weight.
        expert: the rows are of this expert of a parameter of all experts.
    """

    module: Module
    attribute: str
    start: int
    stop: int
    padded: bool = False
    expert: int | None = None

    @property
    def parameter(self) -> Parameter:
        # Looked up each time, because vLLM may replace the parameter object.
        return self.module.get_parameter(self.attribute)

    def local(self) -> Tensor:
        data = self.parameter.data
        return (data if self.expert is None else data[self.expert])[self.start : self.stop]


class EngineWeights:
    """The weights of a vLLM model by the names of the model's files.

    Args:
        model: vLLM's model on this rank, with all weights unpacked.
        reference: the transformers model of the same folder on the meta device.
        path: the model folder, for messages.
        copy_group: the ranks that hold one copy together; None: this rank alone.
        adapters: A and B of the adapter of the model, by their names in its file.

    Raises:
        ModelError: some weight of one model has no counterpart of its shape in the other.
    """

    def __init__(
        self,
        model: Module,
        reference: PreTrainedModel,
        path: str,
        copy_group: dist.ProcessGroup | None,
        adapters: Mapping[str, AdapterPlace],
    ) -> None:
        self.path = path
        self._reference = reference
        self._group = copy_group
        self._parts = file_parts(reference)
        self._shapes = {part.name: part.shape for own in self._parts.values() for part in own}
        self._cuts: dict[str, tuple[int, int]] = {}
        self._places = self._match(dict(_places(model)), _own_name(model))
        self.adapters = adapters
        self._written: set[str] = set()
        self._written_shapes = {
            **{name: place.shape for name, place in self.adapters.items()},
            **self._shapes,
        }

    def _match(
        self, places: Mapping[str, _Place], own_name: Callable[[str], str]
    ) -> dict[str, _Place]:
        found: dict[str, _Place] = {}
        for name, shape in self._shapes.items():
            names = name, own_name(name), self._tied_name(name)
            place = next((places[known] for known in names if known in places), None)
            if place is None:
                raise self._unknown(f"vLLM's model has no weight {name!r}")
            cut = _slices(place, shape, self._ranks)
            if cut is None:
                raise self._unknown(
                    f"weight {name!r} has shape {list(shape)}, and vLLM holds a tensor of shape "
                    f"{list(place.local().shape)} on each of {self._ranks} ranks"
                )
            found[name], self._cuts[name] = place, cut
        # A layer can be reached by two paths: a router is a part of its layer and of its experts.
        known = {id(place.parameter) for place in found.values()}
        rest = sorted(name for name, place in places.items() if id(place.parameter) not in known)
        if rest:
            raise self._unknown(f"vLLM's model has a weight {rest[0]!r} that transformers' has not")
        return found

    @property
    def _ranks(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    def _tied_name(self, name: str) -> str:
        """Return the name of the parameter to which the output head is tied, else ""."""
        model = self._reference
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # none
        embedding = model.get_input_embeddings()
        names = {id(module): n for n, module in model.named_modules()}
        tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        if not tied or head is None or name != f"{names.get(id(head))}.weight":
            return ""
        return f"{names[id(embedding)]}.weight"

    def _unknown(self, problem: str) -> ModelError:
        return ModelError(
            f"the weights of the model in {self.path} cannot be updated in vLLM: {problem}. Use "
            "actor_rollout_ref.rollout.name=hf",
            path=self.path,
        )

    def check_files(self, folder: Path) -> None:
        """Compare every weight that vLLM loaded with the model folder.

        Raises:
            ModelError: one differs, so names or rows are not those of this model.
        """
        names = match_names(self._reference, stored_tensors(folder), new_prefix=None)
        if names.reason:
            raise self._unknown(names.reason)
        with TensorReader(folder) as reader:
            for stored, part in ((s, p) for n, s in names.stored.items() for p in self._parts[n]):
                held = self.read(part.name)
                expected = reader.read_box(stored, part.box).reshape(part.shape).to(held.dtype)
                if not torch.equal(_bits(expected), _bits(held.cpu())):
                    raise self._unknown(f"weight {part.name!r} differs from the file after loading")

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy a weight of the training engine to its place.

        Raises:
            ModelError: there is no weight of that name and shape.
        """
        check_weight(name, tensor, self._written_shapes)
        self.write_box(
            name, tensor[slices(self._own_box(name))] if name in self._places else tensor
        )

    def boxes(self) -> dict[str, Box]:
        """Return the box of each weight that this rank holds; {} if it holds a copy alone.

        Adapters are whole on every rank.
        """
        if self._group is None:
            return {}
        return {name: self._own_box(name) for name in self._places}

    def _own_box(self, name: str) -> Box:
        """Return the box of a weight that this rank of a copy holds."""
        box, (dim, count) = whole(tuple(self._shapes[name])), self._cuts[name]
        if count == 1:
            return box
        # With 4 ranks and 2 slices, ranks 0 and 1 hold the first slice. The last ranks of a padded
        # vocabulary can hold fewer rows of the weight, or none.
        step, rows = self._places[name].local().shape[dim], self._shapes[name][dim]
        start = min(dist.get_rank(self._group) // (self._ranks // count) * step, rows)
        return narrowed(box, dim, start, min(start + step, rows))

    def write_box(self, name: str, tensor: Tensor) -> None:
        """Copy the values of this rank's box of a weight (`boxes`) to their place.

        Raises:
            ModelError: there is no weight of that name, or its box has another shape.
        """
        place = self._places.get(name)
        part = "" if self._group is None else f" on rank {dist.get_rank(self._group)} of a copy"
        shape = self._written_shapes.get(name) if place is None else shape_of(self._own_box(name))
        check_weight(name, tensor, {} if shape is None else {name: shape}, part=part)
        local = (place or self.adapters[name]).local()
        with torch.no_grad():
            local[: len(tensor)].copy_(tensor)
            local[len(tensor) :].zero_()  # padding of the vocabulary
        self._written.add(name)

    def read(self, name: str) -> Tensor:
        """Return the whole weight. All ranks of the copy call this for the same names in order.

        The result can share memory with the model.
        """
        if name in self.adapters:
            return self.adapters[name].local()
        place, shape = self._places[name], self._shapes[name]
        local, (dim, count) = place.local(), self._cuts[name]
        if count > 1:
            parts = [torch.empty_like(local) for _ in range(self._ranks)]
            dist.all_gather(parts, local.contiguous(), group=self._group)
            # With 4 ranks and 2 slices, ranks 0 and 2 hold one copy and ranks 1 and 3 another. Each
            # rank reads its own, so that a wrong slice is in the digest of its rank.
            copies = self._ranks // count
            local = torch.cat(parts[dist.get_rank(self._group) % copies :: copies], dim)
        return local[: shape[0]] if place.padded else local

    def clear_adapters(self) -> None:
        """Fill the buffers of the adapter with zeros, after their memory was dropped."""
        for place in self.adapters.values():
            place.buffer().zero_()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every weight."""
        held = {name: place.parameter.dtype for name, place in self._places.items()}
        return held | {name: place.local().dtype for name, place in self.adapters.items()}

    def names_that_are_sent(self) -> set[str]:
        """Return the names that a sync of everything sends: layers without an adapter are zero."""
        return {*self._places, *(self.adapters.keys() & self._written)}

    def names(self) -> tuple[str, ...]:
        """Return the names of all weights, each name of a tied weight included."""
        return (*self._places, *self.adapters)


def _own_name(model: Any) -> Callable[[str], str]:
    """Return vLLM's table of names: from the name of a tensor in the files to its own."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    renamed = mapper.get_rename_mapper().map_name
    return lambda name: renamed(name) or ""


def _places(model: Module) -> Iterator[tuple[str, _Place]]:
    """Yield (checkpoint name, place) of every parameter, or part of a joined one."""
    joined: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for found, module in model.named_modules(remove_duplicate=False):
        path = found.removesuffix(".base_layer")  # of a layer that can have an adapter
        parent, _, leaf = path.rpartition(".")
        if hasattr(module, "get_expert_mapping") and hasattr(module, "layer_name"):
            yield from _places_of_experts(module)
            continue
        for attribute, parameter in module.named_parameters(recurse=False):
            padded = hasattr(module, "org_vocab_size")
            place = _Place(module, attribute, 0, len(parameter), padded=padded)
            yield f"{path}.{attribute}", place  # the files can have the joined one, as of GLM-4
            parts = joined.get(leaf, [])
            sizes: list[int] = list(getattr(module, "output_partition_sizes", []))
            if len(parts) < 2 or len(parts) != len(sizes):
                continue
            start = 0
            for part, size in zip(parts, sizes, strict=True):
                yield f"{parent}.{part}.{attribute}", _Place(module, attribute, start, start + size)
                start += size


def _places_of_experts(module: Any) -> Iterator[tuple[str, _Place]]:
    """Yield the places of the experts of a layer, which are in two parameters, by vLLM's table.

    w13_weight [experts, 2 I, D] has the rows of w1, the gate, and then those of w3; w2_weight
    [experts, D, I] those of w2.
    """
    layer = module.layer_name.removesuffix("experts")
    for parameter_prefix, name, expert, shard in module.get_expert_mapping():
        for attribute, parameter in module.named_parameters(recurse=False):
            kind = attribute.removeprefix(parameter_prefix.removeprefix("experts."))
            if kind == attribute or expert >= len(parameter):
                continue
            rows = parameter.shape[1]
            start, stop = {"w1": (0, rows // 2), "w2": (0, rows), "w3": (rows // 2, rows)}[shard]
            yield f"{layer}{name}{kind}", _Place(module, attribute, start, stop, expert=expert)


def _slices(place: _Place, shape: tuple[int, ...], ranks: int) -> tuple[int, int] | None:
    """Return (dimension, number of slices) into which a weight is cut; None if it does not fit."""
    local = place.local().shape
    if len(local) != len(shape):
        return None
    if place.padded:
        fits = local[1:] == shape[1:] and local[0] * ranks >= shape[0]
        return (0, ranks) if fits else None
    cut = [dim for dim in range(len(shape)) if local[dim] != shape[dim]]
    if not cut:
        return 0, 1
    count = shape[cut[0]] // local[cut[0]] if local[cut[0]] else 0
    fits = len(cut) == 1 and count * local[cut[0]] == shape[cut[0]] and count > 1
    return (cut[0], count) if fits and ranks % count == 0 else None


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that equal means equal bits."""
    return tensor.contiguous().view(-1).view(torch.uint8)
