"""The files of a checkpoint: JSON and tensors, written by `atomic_write`, with their digests."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quadriga.errors import CheckpointError
from quadriga.files import atomic_write
from quadriga.observability.jsonl import JsonObject
from quadriga.parallel.device import STORED_DTYPES

_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True)
class SavedFile:
    """A file as the process that wrote it knows it.

    Attributes:
        name: path relative to the folder of the checkpoint, with `/` as separator.
        size: bytes.
        digest: SHA-256 of the content, in hexadecimal digits.
    """

    name: str
    size: int
    digest: str

    def under(self, folder: str) -> SavedFile:
        """Return the same file as seen from the parent of `folder`."""
        return replace(self, name=f"{folder}/{self.name}")


def write_json(path: Path, value: Mapping[str, object]) -> SavedFile:
    """Write one JSON object atomically.

    Raises `InputError` with the path and the reason if it cannot be written.
    """
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1).encode())
    return SavedFile(path.name, file.size, file.digest().hex())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> SavedFile:
    """Write tensors and `metadata` as a safetensors file atomically.

    The library's `save_file` gives no access to the bytes that it writes and copies all tensors to
    the CPU first. Here one tensor at a time is on the CPU:

        8 bytes   length of the header, little-endian
        header    JSON: {"w": {"dtype": "F32", "shape": [7, 5], "data_offsets": [0, 140]}, …}
        data      the tensors, one after the other

    Raises:
        CheckpointError: a tensor has a dtype that the format does not hold.
        InputError: the file cannot be written.
    """
    # Wide elements first, so that every tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                f"{path}: {name!r} has dtype {tensor.dtype}, which a checkpoint cannot hold; "
                f"expected one of {', '.join(map(str, _NAMES))}",
                path=str(path),
            )
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with atomic_write(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
    return SavedFile(path.name, file.size, file.digest().hex())


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_json(value: Mapping[str, object]) -> str:
    """Return the SHA-256 of a JSON object, whatever the order of its keys and its spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_plain_file(root: Path, name: str) -> bool:
    """Return whether `root/name` is a file that is reached through no symbolic link below `root`.

    False also for names that lead out of `root`: absolute ones, and those with `..`.
    """
    parts = name.split("/")
    if not all(part and part not in (".", "..") and "\\" not in part for part in parts):
        return False
    path = root
    for part in parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except (OSError, ValueError):  # missing, or a name that no file can have
            return False
        if not (stat.S_ISREG(mode) if part is parts[-1] else stat.S_ISDIR(mode)):
            return False
    return True


def read_json(path: Path) -> JsonObject:
    """Read one JSON object. Raises `CheckpointError` if it is missing or invalid."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", path=str(path)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", path=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", path=str(path))
    return value
