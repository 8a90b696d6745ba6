"""What makes a folder a model, checked without loading weights (and without importing torch)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError

HUB_PREFIX = "hf://"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"


def local_folder(path: str | Path) -> Path:
    """The folder that `path` names; `hf://owner/name` is fetched from the hub (or its cache)."""
    text = str(path)
    if not text.startswith(HUB_PREFIX):
        return Path(text).expanduser()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text.removeprefix(HUB_PREFIX)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{text} cannot be fetched from the hub: {str(error).strip().splitlines()[0]}",
            path=text,
        ) from error


def check_model_folder(
    path: str | Path,
    *,
    weights: bool = True,
    tokenizer: bool = True,
    trust_remote_code: bool = False,
) -> None:
    """Raise `ModelError`, naming the folder and what it lacks, unless it holds a model.

    Wanted are config.json with a `model_type` (one that transformers knows, or the folder's own
    with `trust_remote_code`), safetensors weights with all their shards, and tokenizer files.
    """
    folder = local_folder(path)
    if not str(path):
        raise ModelError("no model folder was given; set the model's path", path="")
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(
            f"model folder {folder} {what} (for a model on the hub, write {HUB_PREFIX}owner/name)",
            path=str(folder),
        )
    config = _json(folder, "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{folder / 'config.json'} names no model_type", path=str(folder))
    if not (trust_remote_code and "auto_map" in config):
        _check_known(folder, model_type)
    if weights:
        _check_weights(folder)
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"model folder {folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)})",
            path=str(folder),
        )


def _check_known(folder: Path, model_type: str) -> None:
    from transformers.models.auto import configuration_auto

    if model_type not in configuration_auto.CONFIG_MAPPING_NAMES:  # type: ignore[attr-defined]
        raise ModelError(
            f"{folder / 'config.json'} names model_type {model_type!r}, which this version of "
            "transformers does not know",
            path=str(folder),
        )


def _check_weights(folder: Path) -> None:
    if (folder / _WEIGHTS).is_file():
        return
    if not (folder / _WEIGHTS_INDEX).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = (
            "; it has pickled weights, which are not loaded because a pickle can run code: "
            "convert them to safetensors"
            if pickled
            else ""
        )
        raise ModelError(f"model folder {folder} has no {_WEIGHTS}{hint}", path=str(folder))
    shards = set(_json(folder, _WEIGHTS_INDEX).get("weight_map", {}).values())
    absent = sorted(name for name in shards if not (folder / name).is_file())
    if absent or not shards:
        raise ModelError(
            f"model folder {folder} lacks {len(absent)} of {len(shards)} weight files"
            + (f", the first is {absent[0]}" if absent else ""),
            path=str(folder),
        )


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} is not a model folder: it has no {name}", path=str(folder)
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{folder / name} is not JSON: {error}", path=str(folder)) from None
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name} holds no JSON object", path=str(folder))
    return content
