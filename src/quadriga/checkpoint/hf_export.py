"""A trained model as an ordinary Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig

from quadriga.checkpoint.files import flush

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def export_hf(
    folder: str | Path,
    weights: Iterable[tuple[str, Tensor]],
    config: PreTrainedConfig,
    *,
    generation: GenerationConfig | None = None,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    write: bool = True,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config, safetensors (in `dtype`; None: as they come) and tokenizer to `folder`.

    Every rank must run the stream of `weights` to its end; only the one with `write` keeps and
    writes them. An older folder of that name is replaced once the new one is whole. A model
    folder without a tokenizer gives an export without one.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in weights:
        if write:
            kept[name] = tensor.detach().to("cpu", dtype=dtype, copy=True).contiguous()
    if not write:
        return
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_torch_state_dict(kept, partial, metadata={"format": "pt"})
    config.save_pretrained(partial)
    if generation is not None:
        generation.save_pretrained(partial)
    if tokenizer_path is not None and _has_tokenizer(tokenizer_path):
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_path, trust_remote_code=trust_remote_code
        )
        tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def _has_tokenizer(path: str) -> bool:
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
