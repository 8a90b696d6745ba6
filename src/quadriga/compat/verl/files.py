"""verl's functions for files and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError, ModelError
from quadriga.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that describe a processor."""
OPTIONS = (
    "padding_side",
    "truncation_side",
    "model_max_length",
    "chat_template",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
)
"""Attributes of a tokenizer that `hf_tokenizer` sets."""
_GEMMA2, _END_OF_TURN = "gemma-2-2b-it", "<end_of_turn>"


def copy_to_local(src: str, cache_dir: str | None = None, **kwargs: object) -> str:
    """Return the path of a file or folder of this machine, unchanged; `~` is replaced.

    `cache_dir` and the other arguments are for other places, which are refused. Raises
    `ModelError` for a path of HDFS or an object store.
    """
    if "://" in src and not src.startswith("hf://"):
        raise ModelError(
            f"copy_to_local: {src!r} is not on this machine. Copy it to a folder first, and pass "
            "that folder"
        )
    return str(Path(src).expanduser()) if src.startswith("~") else src


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    *,
    trust_remote_code: bool = False,
    **options: object,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or a model of the hub. It has a padding token.

    Args:
        name_or_path: the folder, or `hf://owner/name`.
        correct_pad_token: True, because batches are padded.
        correct_gemma2: the end token of gemma-2-2b-it is that of a turn, as in verl.
        trust_remote_code: run code of the folder.
        options: `padding_side` ("left" by default) and the other names in `OPTIONS`.

    Raises:
        ModelError: the folder has no tokenizer, or `correct_pad_token` is False.
        ConfigError: there is no such option, or the tokenizer cannot have its value.
    """
    if not correct_pad_token:
        raise ModelError(
            "hf_tokenizer: correct_pad_token=False would leave a tokenizer without a padding "
            "token, but batches are padded; leave it True",
            path=name_or_path,
        )
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"hf_tokenizer has no option {name!r}; it has {', '.join(OPTIONS)}. Load the "
                "tokenizer with transformers for others",
                key=name,
            )
    tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    if correct_gemma2 and _GEMMA2 in name_or_path:
        options = {"eos_token": _END_OF_TURN, **options}
    for name, value in options.items():
        _check_option(tokenizer, name, value)
        setattr(tokenizer, name, value)
    return tokenizer


def _check_option(tokenizer: PreTrainedTokenizerBase, name: str, value: object) -> None:
    if name.endswith("_side"):
        fits, problem = value in ("left", "right"), "is neither left nor right"
    elif name.endswith("_token"):
        # A tokenizer would take the id of the unknown token for one that it does not have.
        fits, problem = value in tokenizer.get_vocab(), "is no token of the vocabulary"
    else:
        kind = int if name == "model_max_length" else str
        fits, problem = isinstance(value, kind), f"is no {kind.__name__}"
    if not fits:
        raise ConfigError(f"hf_tokenizer: {name}={value!r} {problem}", key=name)


def hf_processor(name_or_path: str, **kwargs: object) -> None:
    """Return None: a model of text has no processor. The other arguments are for processors.

    Raises `ModelError` for a model folder with a processor of images, video or audio.
    """
    for name in _PROCESSORS:
        if (Path(name_or_path).expanduser() / name).is_file():
            raise ModelError(
                f"hf_processor: {name_or_path} has a {name}, and Quadriga loads the image "
                "processor of a model itself; remove the call (docs/concepts/images.md says which "
                "models take images)",
                path=name_or_path,
            )
