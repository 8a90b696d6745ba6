"""Write files so that they are complete or absent, whenever the process is killed.

A file is written under the name `<name>.partial`, flushed to disk and then renamed. A rename within
a file system is atomic, and the content is on disk before it. The final name therefore never refers
to incomplete content, not even after a power failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quadriga.errors import CheckpointError
from quadriga.observability.jsonl import JsonObject


def flush(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(partial: Path, path: Path) -> None:
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)  # the rename is an entry of the folder


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write one JSON object atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    _replace(partial, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file atomically."""
    partial = path.with_name(path.name + ".partial")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, str(partial))
    _replace(partial, path)


def read_json(path: Path) -> JsonObject:
    """Read one JSON object. Raises `CheckpointError` if it is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", path=str(path)) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", path=str(path))
    return value
