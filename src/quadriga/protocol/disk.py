"""A batch in one file: a safetensors file with a digest. No pickle is written or read.

    8 bytes   length of the header, little-endian
    header    JSON: {"__metadata__": {...}, "structure": {"dtype": "U8", "shape": [640],
              "data_offsets": [0, 640]}, "0 x": {...}, ..., "sha256": {...}}
    data      the entries, one after the other and without gaps

Tensors and numeric arrays are entries of their own. Texts are entries of code points, U32 with the
width as last dimension. The entry `structure` is JSON: the fields with the names of their entries,
the rows of object arrays, and `meta_info`. The entry `sha256` is the digest of all bytes before it.

The library of safetensors checks the header against the length of the file, and the reader checks
the digest. Memory is allocated for bytes that the file has, and once for each of them.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quadriga.config.paths import local_path
from quadriga.errors import DataError, FieldError, ProtocolError
from quadriga.files import atomic_write
from quadriga.protocol import contents as halves
from quadriga.protocol.columns import current_device, host_array, local_value
from quadriga.protocol.contents import Contents
from quadriga.protocol.storage import Array
from quadriga.protocol.tensordicts import NonTensorStack, TensorDict, TensorDictBase
from quadriga.protocol.values import (
    build_jagged,
    dtype_name,
    is_jagged,
    jagged_parts,
    object_array,
    ragged_dim,
)

METADATA = {"format": "quadriga batch", "version": "3"}
STRUCTURE, DIGEST = "structure", "sha256"
MAX_DEPTH = 100
"""Levels of lists and dicts within each other."""
MAX_CODE = 0x10FFFF
"""The last character of Unicode."""
_DIGEST_BYTES = 32
_ALIGNED = 64
_DEVICES = ("cpu", "cuda", "npu", "xpu", "mps")
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Name of a dtype in torch and numpy → in safetensors."""
_PLAIN = {str, int, float, bool, type(None)}
_HOLDS = (
    "a batch file holds tensors (dense, jagged, TensorDict), arrays of numbers and texts, and JSON "
    "values (None, bool, int, float, str, list, dict with str keys). Convert it first"
)

Json = Any
"""A JSON value from a file, before it is checked."""


def save(contents: Contents, filepath: str | Path) -> None:
    """Write all fields and `meta_info`; fetches remote fields.

    The file appears complete or not at all. Raises `FieldError` naming the field and the type that
    a file does not hold, `InputError` if the file cannot be written.
    """
    batch, arrays, meta = contents
    halves.prefetch(batch, arrays, None)
    writer, tree = _Writer(), None
    if batch is not None:
        tensors = {key: local_value(c) for key, c in halves.tensor_columns(batch).items()}
        tree = writer.tree(tensors, batch.batch_size, batch.device, "")
    columns = {key: local_value(c) for key, c in halves.array_columns(arrays).items()}
    _check_json(dict.fromkeys(columns), "non_tensor_batch")
    for key in meta:
        _check_json(meta[key], f"meta_info[{key!r}]")
    _check_json(dict.fromkeys(meta), "meta_info")
    fields = {key: writer.field(value, key) for key, value in columns.items()}
    writer.write(Path(local_path(filepath)), {"tensors": tree, "arrays": fields, "meta_info": meta})


class _Writer:
    """The entries of a file that is to be written: name, dtype in safetensors, and items."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str, Array]] = []

    def _add(self, key: str, dtype: str, items: Array) -> str:
        if dtype == "BOOL" and items.size and int(items.view(np.uint8).max()) > 1:
            raise _refused(key, "a boolean that is neither 0 nor 1")
        # The number makes the name unique. Readers of safetensors expect valid Unicode.
        name = f"{len(self._entries)} {key}".encode(errors="backslashreplace").decode()
        self._entries.append((name, dtype, items))
        return name

    def field(self, value: object, key: str) -> list[Json]:
        """Add the entries of one field and return its part of the structure."""
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            return self.tree(dict(value.items()), value.batch_size, value.device, f"{key}.")
        if isinstance(value, Tensor):
            return self._tensor(value, key)
        if type(value) is not np.ndarray and type(value) is not np.memmap:
            raise _refused(key, f"a {_type_name(value)}")
        if value.dtype == object:
            items = value.ravel().tolist()
            _check_json(items, f"field '{key}'")
            return ["objects", value.shape, items]
        data = np.ascontiguousarray(value).reshape(value.shape)
        if value.dtype.kind == "U" and value.dtype.isnative and value.dtype.itemsize:
            codes = data.reshape(*value.shape, 1).view(np.uint32)
            if codes.size and int(codes.max()) > MAX_CODE:
                raise _refused(key, "a text with a character outside Unicode")
            return ["text", self._add(key, "U32", codes)]
        if value.dtype.name not in _DTYPES or not value.dtype.isnative:
            raise _refused(key, f"an array of dtype {value.dtype!r}")
        return ["array", self._add(key, _DTYPES[value.dtype.name], data)]

    def _tensor(self, value: Tensor, key: str) -> list[Json]:
        dtype, device = _DTYPES.get(dtype_name(value.dtype)), value.device.type
        if dtype is None or value.layout not in (torch.strided, torch.jagged):
            raise _refused(key, f"a tensor of dtype {value.dtype} and layout {value.layout}")
        if not value.is_nested:
            return ["tensor", self._add(key, dtype, host_array(value)), device]
        values, offsets = jagged_parts(value)
        name = self._add(key, dtype, host_array(values))
        ends = self._add(f"{key} offsets", "I64", host_array(offsets.long()))
        return ["jagged", name, ends, ragged_dim(value), device]

    def tree(
        self, fields: Mapping[str, object], size: torch.Size, device: torch.device | None, path: str
    ) -> list[Json]:
        """Add the entries of a `TensorDict` and return its part of the structure."""
        _check_json(dict.fromkeys(fields), "batch")
        written = {key: self.field(value, path + key) for key, value in fields.items()}
        return ["tree", list(size), device and device.type, written]

    def write(self, path: Path, structure: Json) -> None:
        """Write the file."""
        try:
            text = json.dumps(structure, separators=(",", ":")).encode()
        except ValueError as error:  # an integer of more than 4300 digits
            raise FieldError(f"a value cannot be written as JSON: {error}") from error
        text += b" " * (-len(text) % _ALIGNED)
        # Wide items first, so that every entry begins at a multiple of its item size.
        ordered = sorted(self._entries, key=lambda entry: -entry[2].itemsize)
        entries = [(STRUCTURE, "U8", np.frombuffer(text, np.uint8)), *ordered]
        header: dict[str, object] = {"__metadata__": METADATA}
        at = 0
        for name, dtype, items in (*entries, (DIGEST, "U8", np.empty(_DIGEST_BYTES, np.uint8))):
            offsets = [at, at := at + items.nbytes]
            header[name] = {"dtype": dtype, "shape": items.shape, "data_offsets": offsets}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(len(encoded) + 8) % _ALIGNED)
        with atomic_write(path) as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for _, _, items in entries:
                file.write(items.reshape(-1).view(np.uint8).data)
            file.write(file.digest())


def _check_json(value: object, where: str, depth: int = 0) -> None:
    """Raise `FieldError` unless a value is JSON and is read back as the same type."""
    items: Iterable[object]
    if type(value) is list:
        items = value
    elif type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise FieldError(f"{where} contains the key {key!r}, which is no str; {_HOLDS}")
        items = value.values()
    elif type(value) in _PLAIN:
        return
    else:
        raise FieldError(f"{where} contains a {_type_name(value)}; {_HOLDS}", field=where)
    if depth > MAX_DEPTH:
        raise FieldError(f"{where} has more than {MAX_DEPTH} levels of lists and dicts")
    if not _PLAIN.issuperset(map(type, items)):
        for item in items:
            _check_json(item, where, depth + 1)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _refused(key: str, what: str) -> FieldError:
    return FieldError(f"field '{key}' contains {what}; {_HOLDS}", field=key)


def load(filepath: str | Path) -> Contents:
    """Read a file of `save`.

    Tensors are placed on the type of device that they had, if this process has one. Raises
    `DataError` for a file of another format, of an earlier version, and for one that is damaged.
    """
    path = Path(local_path(filepath))
    try:
        if not path.is_file():  # False also for a pipe, and for a name with a zero byte
            raise OSError("no batch file")
        contents = _Reader(path).contents()
        halves.check(contents)
        return contents
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}", path=str(path)) from error
    except _REFUSALS as error:
        reason = str(error).partition("\n")[0][:300] or type(error).__name__
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise DataError(f"{path} is damaged: {reason}", path=str(path)) from error


_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
             ProtocolError)  # fmt: skip
"""What Python, numpy, torch and the check of a batch raise for values that they cannot use. A file
that `save` did not write may have any value in any place."""


class _Reader:
    """The entries of a file whose header and digest are valid."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                if file.metadata() != METADATA:
                    raise ValueError(f"not of DataProto.save_to_disk with the metadata {METADATA}")
                self._entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"truncated, or no file of save_to_disk: {error}") from None
        data = memoryview(path.read_bytes())
        if data[-_DIGEST_BYTES:] != hashlib.sha256(data[:-_DIGEST_BYTES]).digest():
            raise ValueError("its SHA-256 differs from the one that was written")

    def contents(self) -> Contents:
        """Return the batch. Every entry must be used, and once."""
        structure = json.loads(self._entries.pop(STRUCTURE).numpy().tobytes())
        del self._entries[DIGEST]
        tensors, arrays, meta = (structure[key] for key in ("tensors", "arrays", "meta_info"))
        batch = None if tensors is None else self._field(tensors)
        fields = {key: self._field(raw) for key, raw in arrays.items()}
        if self._entries or not isinstance(batch, TensorDict | None):
            raise ValueError("the file has entries that belong to no field")
        return Contents(batch, fields, meta)

    def _items(self, name: str) -> Tensor:
        """Return the items of an entry, which can be read once."""
        items: Tensor = self._entries.pop(name)
        if items.dtype == torch.bool and items.numel() and int(items.view(torch.uint8).max()) > 1:
            raise ValueError(f"entry {name[:80]!r} has booleans that are neither 0 nor 1")
        return items.clone()  # an entry is mapped memory, which changes with the file

    def _field(self, raw: Json) -> Any:
        """Return the value of one field from its part of the structure."""
        match raw:
            case ["tensor", name, device]:
                return self._items(name).to(_device(device))
            case ["jagged", name, ends, dim, device]:
                return _jagged(self._items(name), self._items(ends), dim, _device(device))
            case ["tree", size, device, fields]:
                entries = {key: self._field(child) for key, child in fields.items()}
                # On the device meta: refuses sizes that are negative, or beyond 64 bits.
                return _tree(entries, torch.empty(size, device="meta").shape, device)
            case ["array", name]:
                return self._items(name).numpy()
            case ["text", name]:
                codes = self._items(name).numpy()
                if codes.size and int(codes.max()) > MAX_CODE:
                    raise ValueError("a text has a character outside Unicode")
                return codes.view(f"<U{codes.shape[-1]}").reshape(codes.shape[:-1])
            case ["objects", list(shape), list(items)] if math.prod(shape) == len(items):
                return object_array(items).reshape(shape)
        raise ValueError(f"a field has an unknown form: {str(raw)[:80]}")


def _jagged(values: Tensor, offsets: Tensor, dim: int, device: torch.device) -> Tensor:
    rows = offsets.dtype == torch.int64 and offsets.dim() == 1 and len(offsets) > 0
    ends = rows and offsets[0] == 0 and offsets[-1] == len(values) and 1 <= dim <= values.dim()
    if not ends or bool((offsets.diff() < 0).any()):
        raise ValueError("the offsets of a jagged tensor are no rows of its values")
    return build_jagged(values.to(device), offsets.to(device), dim)


def _tree(fields: dict[str, Any], size: torch.Size, device: str | None) -> TensorDict:
    for key, value in fields.items():
        known = 1 if is_jagged(value) else len(size)
        if not isinstance(value, Tensor | TensorDict) or value.shape[:known] != size[:known]:
            raise ValueError(f"entry {key[:80]!r} of a TensorDict of size {list(size)}")
    return TensorDict(fields, batch_size=size, device=device and _device(device))


def _device(name: str) -> torch.device:
    """Return the current device of a type ("cuda"), the CPU if this process has none."""
    if name not in _DEVICES:
        raise ValueError(f"no type of device {str(name)[:80]!r}")
    return current_device(name)
