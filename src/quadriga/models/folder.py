"""Check that a folder holds a model, and read its end tokens.

Nothing here loads weights or imports torch, so settings can be checked before a worker starts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.paths import expand_home
from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.models.architectures import check_architecture
from quadriga.models.weight_files import check_sizes, check_weight_files, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB_PREFIX = "hf://"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with one of these files has a tokenizer. Some need others beside it (merges.txt)."""

_CONFIG_FILES = ("*.json", "*.py")


def local_folder(path: str | Path, *, weights: bool = True) -> Path:
    """Return the folder that `path` names; download `hf://owner/name` from the hub if necessary.

    Args:
        weights: False: download the configs only.

    Raises:
        ModelError: the hub has no such model, or it cannot be reached and there is no cached copy.
    """
    text = str(path)
    if not text.startswith(HUB_PREFIX):
        return Path(expand_home(text))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        files = None if weights else list(_CONFIG_FILES)
        return Path(snapshot_download(text.removeprefix(HUB_PREFIX), allow_patterns=files))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{text} cannot be downloaded from the hub: {str(error).strip().splitlines()[0]}",
            path=text,
        ) from error


def with_absolute_paths(config: ModelConfig) -> ModelConfig:
    """Return the settings with absolute paths, for ranks in another working directory.

    Names of the hub stay as they are.
    """
    tokenizer, adapter = config.tokenizer_path, config.lora.path
    return replace(
        config,
        path=_absolute(config.path),
        tokenizer_path=None if tokenizer is None else _absolute(tokenizer),
        lora=replace(config.lora, path=None if adapter is None else _absolute(adapter)),
    )


def _absolute(path: str) -> str:
    known_everywhere = not path or path.startswith(HUB_PREFIX)
    return path if known_everywhere else str(Path(path).absolute())


def check_model_folder(
    path: str | Path,
    *,
    weights: bool = True,
    tokenizer: bool = True,
    trust_remote_code: bool = False,
) -> None:
    """Check that a folder holds a model.

    A model folder holds files and links to files. It has a config.json with a `model_type` (one
    that transformers knows, or the folder's own code if `trust_remote_code` is set), safetensors
    weights with all their shards that fit the sizes in config.json, and tokenizer files.

    Args:
        weights: also require the weights, and an architecture that is not refused
            (`check_architecture`).
        tokenizer: also require the tokenizer.

    Raises:
        ModelError: the folder is not a model folder, or its architecture is refused. Names the
            folder and the missing file.
    """
    folder = local_folder(path)
    if not str(path):
        raise ModelError("the path of the model folder is empty; set the model's path", path="")
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(
            f"model folder {folder} {what} (for a model on the hub, write {HUB_PREFIX}owner/name)",
            path=str(folder),
        )
    _check_entries(folder)
    config = read_json(folder, "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{folder / 'config.json'} has no model_type", path=str(folder))
    check_sizes(folder, config)
    if not (trust_remote_code and "auto_map" in config):
        _check_known(folder, model_type)
    if weights:
        check_architecture(model_type, str(folder))
        check_weight_files(folder, config)
    if tokenizer and not has_tokenizer(folder):
        raise ModelError(
            f"model folder {folder} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}",
            path=str(folder),
        )


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether a local folder has the files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def _check_entries(folder: Path) -> None:
    """Raise `ModelError` for an entry that a reader would wait for or read without end.

    Links to files are followed: the cache of the hub holds models as links.
    """
    try:
        for entry in sorted(folder.iterdir()):
            if not entry.is_file() and not entry.is_dir():
                what = "neither a file nor a folder" if entry.exists() else "a link to nothing"
                raise ModelError(
                    f"{entry} is {what}; a model folder holds files and links to files",
                    path=str(folder),
                )
    except OSError as error:
        raise ModelError(
            f"model folder {folder} cannot be read: {error.strerror}", path=str(folder)
        ) from error


def _check_known(folder: Path, model_type: str) -> None:
    from transformers.models.auto import configuration_auto

    if model_type not in configuration_auto.CONFIG_MAPPING_NAMES:  # type: ignore[attr-defined]
        raise ModelError(
            f"{folder / 'config.json'} has model_type {model_type!r}, which this version of "
            "transformers does not support",
            path=str(folder),
        )


def end_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response, in ascending order.

    They are the tokenizer's end token and those in the folder's generation_config.json.
    """
    ends = {int(tokenizer.eos_token_id)}
    folder = local_folder(path)
    if (folder / "generation_config.json").is_file():
        named = read_json(folder, "generation_config.json").get("eos_token_id")
        values = named if isinstance(named, list) else [named]
        ends.update(value for value in values if isinstance(value, int))
    return tuple(sorted(ends))
