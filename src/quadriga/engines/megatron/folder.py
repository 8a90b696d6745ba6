"""A model folder as the Megatron engine reads and writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.checkpoint.hf_export import export_hf
from quadriga.config.schema import AttentionName, ModelConfig
from quadriga.engines.attention.check import kernel_problem
from quadriga.engines.attention.choice import (
    CAPABILITY,
    AttentionCall,
    KernelOf,
    choose_kernels,
    sdpa_only,
)
from quadriga.engines.base import HeadKind
from quadriga.engines.loading.model_setup import empty_model, exported_tokenizer, tied_names
from quadriga.engines.megatron.families import (
    Sizes,
    family_of,
    head_size,
    windows,
)
from quadriga.engines.megatron.weights import RankWeights
from quadriga.errors import ModelError
from quadriga.models.loading import VALUE_HEAD_PREFIX, model_errors
from quadriga.models.score_head import check_reward_model, padding_token
from quadriga.models.stored_dtypes import stored_dtypes
from quadriga.models.weights.finite import NotFinite, check_all_finite, count_not_finite
from quadriga.models.weights.joined import Source
from quadriga.models.weights.names import match_names
from quadriga.models.weights.reader import TensorReader, stored_tensors
from quadriga.parallel.distributed import gather_over_ranks, rank
from quadriga.parallel.layouts.boxes import Box
from quadriga.parallel.layouts.layout import Weight


@dataclass(frozen=True)
class FolderModel:
    """The model of a folder, without values.

    Attributes:
        config: of the model.
        module: the model of transformers on the meta device.
        settings: of the folder.
        head: see `HeadKind`.
        weights: the weights by their names in transformers, tied names left out.
        tied: name -> weight of which it is another name.
        sources: weight -> where it is stored. None: it is new, and begins as zeros.
        tokenizer_path: see `exported_tokenizer`.
    """

    config: PreTrainedConfig
    module: PreTrainedModel
    settings: ModelConfig
    head: HeadKind
    weights: Mapping[str, Weight]
    tied: Mapping[str, str]
    sources: Mapping[str, Source | None]
    tokenizer_path: str | None

    @staticmethod
    def of(settings: ModelConfig, head: HeadKind, *, trained: bool) -> FolderModel:
        """Read the headers of a folder.

        Raises:
            ModelError: it does not hold a model that the Megatron engine computes.
        """
        folder = Path(settings.path)
        if head == "score" and not trained:
            check_reward_model(settings.path, trust_remote_code=False)
        module = empty_model(settings, head, torch.float32, trained=False)
        config = module.config.get_text_config()
        family_of(config)  # raises for an architecture that Megatron-core does not compute
        weights = {
            name: Weight(name, tuple(p.shape), p.itemsize) for name, p in module.named_parameters()
        }
        tied = {name: first for first, names in tied_names(module).items() for name in names}
        with model_errors(folder, "model"):
            tensors = stored_tensors(folder)
        new_prefix = VALUE_HEAD_PREFIX if head == "value" or (head == "score" and trained) else None
        names = match_names(module, tensors, new_prefix=new_prefix)
        if names.reason:
            raise ModelError(
                f"the Megatron engine cannot read the weights in {folder}: {names.reason}; set "
                "engine.name=fsdp",
                path=str(folder),
            )
        sources: dict[str, Source | None] = dict(names.stored)
        sources |= dict.fromkeys(names.new)
        missing = weights.keys() - sources.keys()
        if missing:
            raise ModelError(
                f"the weights in {folder} lack {len(missing)} tensors of the model, among them "
                f"{min(missing)!r}",
                path=str(folder),
            )
        return FolderModel(
            config, module, settings, head, weights, tied, sources, exported_tokenizer(settings)
        )

    def read_into(self, weights: RankWeights, parameters: Mapping[str, Tensor]) -> None:
        """Read the parameters of this rank, and nothing else of the files. All ranks call it.

        Raises:
            ModelError: on any rank, the files cannot be read; or a weight is not finite.
        """
        folder = Path(self.settings.path)
        counts: dict[tuple[str, Box], NotFinite] = {}
        error: ModelError | None = None
        try:
            with model_errors(folder, "model"), TensorReader(folder) as reader:

                def read(name: str, box: Box) -> Tensor:
                    values = self._read(reader, name, box)
                    counts[name, box] = count_not_finite(values)
                    return values

                weights.fill(read, parameters)
        except ModelError as raised:
            error = raised
        gathered = gather_over_ranks((counts, error))
        for number, (_, other) in enumerate(gathered):
            if other is not None:
                text = f"rank {number} cannot load the model: {other}"
                raise error or ModelError(text, path=str(folder))
        everywhere = {key: count for found, _ in gathered for key, count in found.items()}
        check_all_finite(folder, {name: count for (name, _), count in everywhere.items()
                                  if count.nan or count.infinite})  # fmt: skip

    def _read(self, reader: TensorReader, name: str, box: Box) -> Tensor:
        """Return a box of a weight."""
        source = self.sources[name]
        if source is None:
            return torch.zeros([stop - start for start, stop in box])
        return reader.read_box(source, box)

    def kernels(
        self, setting: AttentionName, sizes: Sizes, dtype: torch.dtype, device: torch.device
    ) -> KernelOf:
        """Choose the kernels of attention.

        Raises:
            ConfigError: the settings name a kernel that cannot compute this model here.
        """
        if setting == "sdpa" or (setting == "auto" and device.type != "cuda"):
            return sdpa_only
        on_cuda, size = device.type == "cuda", head_size(self.config)
        one = AttentionCall(
            dtype,
            self.config.num_attention_heads // sizes.tensor,
            self.config.num_key_value_heads // sizes.tensor,
            size,
            size,
            part=sizes.context > 1,
        )
        calls = {
            replace(one, mask="causal" if window is None else "window")
            for window in windows(self.config)
        }
        chosen = choose_kernels(
            calls,
            setting,
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if on_cuda else CAPABILITY,
            check=partial(kernel_problem, device=device) if on_cuda else _not_checked,
        )
        return lambda call: chosen.get(call, "sdpa")

    def export(self, folder: str | Path, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Write a Hugging Face folder. All ranks exhaust `weights`; rank 0 writes.

        Raises `ModelError` if the tokenizer that the model was loaded with cannot be loaded.
        """
        settings, dtypes = self.settings, stored_dtypes(self.settings.path)
        tokenizer = settings.tokenizer_path or settings.path
        config = deepcopy(self.module.config)
        if self.head == "score":
            config.pad_token_id = padding_token(settings.path, tokenizer, trust_remote_code=False)
        export_hf(
            folder,
            dtypes.cast(weights),
            dtypes.config(config),
            generation=getattr(self.module, "generation_config", None),
            tokenizer_path=self.tokenizer_path,
            write=rank() == 0,
        )


def _not_checked(kernel: object, call: AttentionCall) -> None:
    """Stand for `kernel_problem` where there is no device to run a kernel on."""
