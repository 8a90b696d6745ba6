"""The adapter of a vLLM engine, which is written into vLLM's buffers as weights are.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from quadriga.errors import ModelError
from quadriga.models.adapters.lora import CONFIG_FILE, WEIGHTS_FILE, Adapter, stored_part

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
        return self._buffer()[_SLOT, 0, :rows, :columns]

    def _buffer(self) -> Tensor:
        # Looked up each time, because vLLM may replace the buffers.
        stacked: Tensor = getattr(self.module, self.buffers)[self.index]
        return stacked

    def write(self, tensor: Tensor) -> None:
        """Copy a tensor into the buffer."""
        self.local().copy_(tensor)

    def clear(self) -> None:
        """Fill the whole buffer with zeros."""
        self._buffer().zero_()


class LoadedAdapter:
    """The adapter that all requests of one engine use. It is zero until it is written.

    Args:
        engine: started with space for adapters.
        planned: rank and layers of the adapter.

    Raises:
        ModelError: vLLM cannot compute one of the layers with an adapter.
    """

    def __init__(self, engine: LLMEngine, planned: Adapter) -> None:
        self._engine, self._rank = engine, planned.rank
        found = dict(_places(self._model(), planned.rank))
        self._places: dict[str, AdapterPlace] = {}
        for layer in planned.modules:
            for name in (stored_part(layer, "lora_A"), stored_part(layer, "lora_B")):
                if name not in found:
                    raise ModelError(
                        f"vLLM cannot compute layer {layer!r} with an adapter; set "
                        "actor_rollout_ref.rollout.load_adapters=false"
                    )
                self._places[name] = found[name]
        self._load_zeros()

    def _model(self) -> Module:
        model: Module = self._engine.model_executor.driver_worker.get_model()
        return model

    def places(self) -> dict[str, AdapterPlace]:
        """Return the place of A and B of every layer of the adapter, by name."""
        return self._places

    def clear(self) -> None:
        """Fill the buffers with zeros, after their memory was dropped."""
        for place in self._places.values():
            place.clear()

    def request(self) -> LoRARequest:
        """Return what a request of vLLM needs to be computed with the adapter."""
        return _request("in memory")

    def _load_zeros(self) -> None:
        # One layer suffices: vLLM sets the others to zero, and computes with all buffers.
        first = next(iter(self._places))
        names = first, first.replace("lora_A", "lora_B")
        config = {
            "peft_type": "LORA",
            "r": self._rank,
            "lora_alpha": self._rank,  # B is multiplied by the scaling before it is sent
            "target_modules": [first.split(".")[-3]],
            "bias": "none",
        }
        with tempfile.TemporaryDirectory(prefix="quadriga_adapter_") as folder:
            tensors = {name: torch.zeros(self._places[name].shape) for name in names}
            save_file(tensors, Path(folder) / WEIGHTS_FILE)
            (Path(folder) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
            self._engine.add_lora(_request(folder))
        self._engine.pin_lora(_ID)


def _request(path: str) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    # The path is read once. Later vLLM finds the adapter by its number.
    return LoRARequest(_NAME, _ID, path)


def _places(model: Module, rank: int) -> Iterator[tuple[str, AdapterPlace]]:
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
