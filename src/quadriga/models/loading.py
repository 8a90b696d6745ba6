"""Tokenizers and models from a folder, or from the hub where a name starts with `hf://`.

Every loader checks the folder first, so that a mistake is a `ModelError` of one line that names
the folder and what it lacks; `check_model_folder` does the same without loading any weights, for
use before a worker starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from quadriga.errors import ModelError
from quadriga.models.folder import check_model_folder, local_folder
from quadriga.models.quiet import quiet_libraries

VALUE_HEAD = "score"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, padding on the left, with a padding token.

    Where the tokenizer names no padding token, the end token serves as one.

    Raises `ModelError` when the folder holds no tokenizer, or one without an end token.
    """
    folder = local_folder(path)
    check_model_folder(folder, weights=False, trust_remote_code=trust_remote_code)
    with quiet_libraries(), _naming(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, padding_side="left"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} has no end token, so no answer could ever end; "
            "set eos_token in its tokenizer_config.json",
            path=str(folder),
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The causal language model of a folder, on the CPU, in evaluation mode.

    `dtype` is "float32", "bfloat16", "float16", "auto" (as the folder's config says) or a
    torch dtype. Raises `ModelError` when the folder is not a causal model's, or its weights do not
    cover the model.
    """
    model, missing = _load(
        AutoModelForCausalLM, path, dtype, attn_implementation, trust_remote_code
    )
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors of the model its config.json "
            f"describes, among them {min(missing)!r}",
            path=str(path),
        )
    return model


def load_value_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal backbone with a scalar head on every token: `model(...).logits` is [B, T, 1].

    The folder is a causal language model's (the head is then new and zero, so that the first
    values are 0 on every rank) or one that a value model was saved to with `save_pretrained`.

    Raises `ModelError` when the folder's architecture has no head for tokens, or weights of the
    backbone are missing.
    """
    config = _one_label(local_folder(path), trust_remote_code)
    model, missing = _load(
        AutoModelForTokenClassification, path, dtype, attn_implementation, trust_remote_code, config
    )
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__}, the token head for the model in {path}, keeps no linear "
            f"layer {VALUE_HEAD!r}; a value model needs one",
            path=str(path),
        )
    new_head = {name for name in missing if name.startswith(f"{VALUE_HEAD}.")}
    if missing - new_head:
        raise ModelError(
            f"the weights in {path} lack {len(missing - new_head)} tensors of the backbone, "
            f"among them {min(missing - new_head)!r}",
            path=str(path),
        )
    if new_head:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
    return model


def _one_label(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The folder's config, asking for one number a token and no dropout before it."""
    check_model_folder(folder, tokenizer=False, trust_remote_code=trust_remote_code)
    config: PretrainedConfig = AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code
    )
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return config


def _load(
    auto_class: Any,
    path: str | Path,
    dtype: str | torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool,
    config: PretrainedConfig | None = None,
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of parameters that the folder's weights do not hold."""
    folder = local_folder(path)
    check_model_folder(folder, tokenizer=False, trust_remote_code=trust_remote_code)
    with quiet_libraries(), _naming(folder, "model"):
        model, info = auto_class.from_pretrained(
            folder,
            dtype=_torch_dtype(dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **({} if config is None else {"config": config}),
        )
    return model.eval(), set(info["missing_keys"])


def _torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in _DTYPES:
        raise ModelError(f"dtype must be one of {sorted(_DTYPES)} or 'auto', got {dtype!r}")
    return _DTYPES[dtype]


_LIBRARY_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


class _naming:
    """Turns what the loading libraries raise over a bad folder into a `ModelError` naming it."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _LIBRARY_ERRORS):
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            raise ModelError(
                f"no {self.what} can be loaded from {self.folder}: {first_line}",
                path=str(self.folder),
            ) from error
