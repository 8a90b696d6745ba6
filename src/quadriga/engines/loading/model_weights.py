"""The weights of a sharded model: its shards, whole tensors under checkpoint names, its export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from quadriga.checkpoint.hf_export import export_hf
from quadriga.config.schema import ModelConfig
from quadriga.engines.base import HeadKind
from quadriga.engines.loading.model_setup import exported_tokenizer
from quadriga.engines.loading.sharded_loading import LoadedModel
from quadriga.engines.loading.trained_part import merged_weights
from quadriga.errors import ConfigError
from quadriga.models.adapters.lora import export_adapter, is_adapter, scaled_part
from quadriga.models.score_head import padding_token
from quadriga.models.stored_dtypes import stored_dtypes
from quadriga.models.vision.processor import copy_processor
from quadriga.parallel.distributed import rank

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter alone, in the export of a merged model."""


class ModelWeights:
    """The weights of one model. Whole tensors are gathered one at a time, by all ranks together.

    Args:
        config: of the model, with local folders.
        device: where collectives run.
    """

    def __init__(
        self, loaded: LoadedModel, config: ModelConfig, head: HeadKind, device: torch.device
    ) -> None:
        self.module, self.part = loaded.module, loaded.part
        self.tied, self.saved_buffers = loaded.tied, loaded.saved_buffers
        self.config, self.head, self.device = config, head, device
        self.tokenizer_path = exported_tokenizer(config)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and the buffers that are saved, by their names in the model."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self.module.named_buffers():
            if name in self.saved_buffers:
                yield name, buffer

    def trained_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `shards` without those that are frozen, which a checkpoint does not hold."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return ((name, tensor) for name, tensor in self.shards() if name not in frozen)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor of a shard, on the device."""
        # A shard in host memory is copied to the device, where collectives run.
        shard = self._on_device(tensor)
        return shard.full_tensor() if isinstance(shard, DTensor) else shard

    def full(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, whole tensor) once for each weight; adapters are merged.

        `adapted`: False for the weights of the base model.
        """
        return merged_weights(self.shards(), self.part.adapter, self.whole, adapted=adapted)

    def stream(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield `full` with every name of tied weights."""
        return self._with_tied(self.full(adapted=adapted))

    def shard_stream(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield `stream`, with the shards of this rank as `DTensor`s in place of whole tensors.

        Adapters are merged into the shards. Only adapters are gathered.
        """
        adapter = self.part.adapter
        merged = merged_weights(self.shards(), adapter, self._on_device, adapted=adapted)
        return self._with_tied(merged)

    def unmerged_stream(self, *, base: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of every adapter whole, as `scaled_part` names them.

        Before them, if `base`, the weights of the base model as `shard_stream` yields them.

        Raises `ConfigError` if the model has no adapters.
        """
        adapter = self.part.adapter
        if adapter is None:
            raise ConfigError(
                "the rollout engine holds adapters, but the trained model has none; set model.lora "
                "or rollout.load_adapters=false",
                key="actor_rollout_ref.rollout.load_adapters",
            )
        if base:
            yield from self.shard_stream(adapted=False)
        for name, shard in self.shards():
            if is_adapter(name):
                yield scaled_part(name, self.whole(shard), adapter)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _with_tied(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            yield name, tensor
            for alias in self.tied.get(name, ()):
                yield alias, tensor

    def export(self, folder: str | Path, *, adapted: bool) -> None:
        """Write a Hugging Face folder of the merged model, with the adapter alone inside it.

        Raises `ModelError` if the tokenizer that the model was loaded with cannot be loaded.
        """
        dtypes, config = stored_dtypes(self.config.path), self.config
        export_hf(
            folder,
            dtypes.cast(self.full(adapted=adapted)),
            dtypes.config(self._config()),
            generation=getattr(self.module, "generation_config", None),
            tokenizer_path=self.tokenizer_path,
            trust_remote_code=config.trust_remote_code,
            write=rank() == 0,
            extra=self._extra(adapted=adapted),
        )

    def _extra(self, *, adapted: bool) -> Callable[[Path], None]:
        """Return what writes the image processor and the adapter into an export."""
        adapter = self._write_adapter() if adapted else None

        def write(folder: Path) -> None:
            copy_processor(self.config.path, folder)
            if adapter is not None:
                adapter(folder)

        return write

    def _config(self) -> PreTrainedConfig:
        """Return the config of the export: a sequence classifier needs a padding token."""
        config: PreTrainedConfig = deepcopy(self.module.config)
        if self.head == "score":
            config.pad_token_id = padding_token(
                self.config.path,
                self.config.tokenizer_path or self.config.path,
                trust_remote_code=self.config.trust_remote_code,
            )
        return config

    def _write_adapter(self) -> Callable[[Path], None] | None:
        """Return what writes the adapter into an export; None if it would not be complete."""
        adapter, base = self.part.adapter, self.config.path
        if adapter is None or self.head != "lm":  # the head is trained too, and not in an adapter
            return None
        parts = {name: self.whole(p) for name, p in self.shards() if is_adapter(name)}
        return lambda folder: export_adapter(folder / ADAPTER_FOLDER, parts, adapter, base)
