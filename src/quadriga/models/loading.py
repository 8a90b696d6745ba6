"""Load tokenizers and models from a folder, or from the hub if the name starts with `hf://`.

Every loader checks the folder first, so that a mistake gives a `ModelError` of one line that names
the folder and what is missing. `check_model_folder` does the same check without loading weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

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
from quadriga.observability.quiet import quiet_libraries
from quadriga.parallel.device import DTYPES, ComputeDtypeName

_log = logging.getLogger(__name__)

AutoModelClass = type[AutoModelForCausalLM] | type[AutoModelForTokenClassification]
Dtype = ComputeDtypeName | torch.dtype
"""A dtype by name, "auto" (the dtype in the folder's config.json), or a torch dtype."""

VALUE_HEAD = "score"

_LIBRARY_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with left padding and a padding token.

    If the tokenizer has no padding token, the end token is used for padding.

    Raises:
        ModelError: the folder has no tokenizer, or the tokenizer has no end token.
    """
    folder = local_folder(path)
    check_model_folder(folder, weights=False, trust_remote_code=trust_remote_code)
    with quiet_libraries(), _model_errors(folder, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, padding_side="left"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} has no end token, so no response could ever end; "
            "set eos_token in its tokenizer_config.json",
            path=str(folder),
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str | Path,
    *,
    dtype: Dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the causal language model of a folder on the CPU, in evaluation mode.

    Raises:
        ModelError: the folder has no causal language model, or weights are missing.
    """
    model, missing = _load(
        AutoModelForCausalLM, path, dtype, attn_implementation, trust_remote_code
    )
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors of the model in its config.json, "
            f"among them {min(missing)!r}",
            path=str(path),
        )
    return model


def load_value_model(
    path: str | Path,
    *,
    dtype: Dtype = "float32",
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal backbone with a scalar head on every token: `model(...).logits` is [B, T, 1].

    The folder may hold a causal language model. The head is then new and zero, so that the first
    values are 0 on every rank. Or it holds a value model that `save_pretrained` wrote.

    Raises:
        ModelError: transformers has no token head for this architecture, or weights of the backbone
            are missing.
    """
    config = _value_config(local_folder(path), trust_remote_code)
    model, missing = _load(
        AutoModelForTokenClassification, path, dtype, attn_implementation, trust_remote_code, config
    )
    head = getattr(model, VALUE_HEAD, None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(
            f"{type(model).__name__}, the token classifier for the model in {path}, has no linear "
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


def _value_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """Return the folder's config with one label (one number a token) and no dropout before it."""
    check_model_folder(folder, tokenizer=False, trust_remote_code=trust_remote_code)
    config: PretrainedConfig = AutoConfig.from_pretrained(
        folder, trust_remote_code=trust_remote_code
    )
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return config


def _load(
    auto_class: AutoModelClass,
    path: str | Path,
    dtype: Dtype,
    attn_implementation: str,
    trust_remote_code: bool,
    config: PretrainedConfig | None = None,
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model, and the names of its parameters that the folder's weights do not hold."""
    folder = local_folder(path)
    check_model_folder(folder, tokenizer=False, trust_remote_code=trust_remote_code)
    with quiet_libraries(), _model_errors(folder, "model"):
        model, info = auto_class.from_pretrained(  # type: ignore[misc]  # output_loading_info: a pair
            folder,
            dtype=_torch_dtype(dtype),
            # None: SDPA if the model supports it, else its own attention (for example with capped
            # scores, sinks or ALiBi).
            attn_implementation=None if attn_implementation == "sdpa" else attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **({} if config is None else {"config": config}),
        )
    used = model.config._attn_implementation
    if used != attn_implementation:
        _log.warning(
            "%s in %s does not support attn_implementation=%s; using %s",
            type(model).__name__, folder, attn_implementation, used,
        )  # fmt: skip
    return model.eval(), set(info["missing_keys"])


def _torch_dtype(dtype: Dtype) -> torch.dtype | Literal["auto"]:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)} or a torch dtype")
    return DTYPES[dtype]


@contextmanager
def _model_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn the errors of the loading libraries into a `ModelError` that names the folder."""
    try:
        yield
    except _LIBRARY_ERRORS as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(
            f"the {what} in {folder} cannot be loaded: {first_line}", path=str(folder)
        ) from error
