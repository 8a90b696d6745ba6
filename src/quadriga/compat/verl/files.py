"""verl's functions for files and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ModelError
from quadriga.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that describe a processor."""


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
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or a model of the hub. It has a padding token.

    `correct_gemma2` is ignored: the end tokens are those of the model's folder. Raises `ModelError`
    for `correct_pad_token=False`, because batches are padded.
    """
    if not correct_pad_token:
        raise ModelError(
            "hf_tokenizer: correct_pad_token=False would leave a tokenizer without a padding "
            "token, but batches are padded; leave it True",
            path=name_or_path,
        )
    return load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)


def hf_processor(name_or_path: str, **kwargs: object) -> None:
    """Return None: a model of text has no processor. The other arguments are for processors.

    Raises `ModelError` for a model folder with a processor of images, video or audio.
    """
    for name in _PROCESSORS:
        if (Path(name_or_path).expanduser() / name).is_file():
            raise ModelError(
                f"hf_processor: {name_or_path} has a {name}, but Quadriga trains models of text; "
                "use the text model",
                path=name_or_path,
            )
