"""A batch in one file, read back without running code from the file.

The file is a line that names the format and one pickle stream. Both writer and reader allow only
the types listed here, so what can be written can be read, and a file from elsewhere cannot call
anything else.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.errors import DataError, FieldError
from quadriga.protocol.columns import column
from quadriga.protocol.columns import contents as batches
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.values.nested import (
    EncodedTensor,
    decode_leaf,
    decode_tensor,
    encode_leaf,
    walk,
)
from quadriga.protocol.values.operations import as_tensordict

_MAGIC = b"quadriga batch 1\n"
_ALLOWED = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "range", "slice"},
    "collections": {"OrderedDict"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "uuid": {"UUID", "SafeUUID"},
    "numpy": {"ndarray", "dtype"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "quadriga.protocol.values.field_spec": {"FieldSpec"},
    "quadriga.protocol.values.nested": {"EncodedTensor", "decode_tensor"},
}


class _Writer(pickle.Pickler):
    """Refuses what `_Reader` would refuse."""

    field = ""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return decode_tensor, (EncodedTensor.of(obj, private=False),)
        if isinstance(obj, np.generic):
            return NotImplemented
        kind = obj if isinstance(obj, type) or callable(obj) else type(obj)
        module = getattr(kind, "__module__", None) or "builtins"
        name = getattr(kind, "__qualname__", str(kind))
        if not _allowed(module, name):
            raise FieldError(
                f"{self.field} holds a {module}.{name}, which a batch file does not carry; "
                "it carries tensors, arrays, images and plain Python values",
                field=self.field,
            )
        return NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not _allowed(module, name):
            raise DataError(
                f"the file asks for {module}.{name}, which no batch file needs; it is damaged or "
                "was not written by save_to_disk"
            )
        found = super().find_class(module, name)
        if module.startswith("PIL."):
            from PIL.Image import Image

            if not (isinstance(found, type) and issubclass(found, Image)):
                raise DataError(f"the file asks for {module}.{name}, which is not an image")
        return found


def _allowed(module: str, name: str) -> bool:
    if module.startswith("PIL."):
        return name.isidentifier() and name.endswith("Image" if module == "PIL.Image" else "File")
    if module.startswith("numpy") and module.endswith("dtypes"):
        return name.isidentifier() and name.endswith("DType")
    return name in _ALLOWED.get(module, ())


def save(contents: Contents, filepath: str | Path) -> None:
    """Writes all fields (fetching those that lie elsewhere) and `meta_info`; the file appears
    whole or not at all. Raises `FieldError` naming a type that a file does not carry."""
    batch, arrays_half, meta = contents
    batches.prefetch(batch, arrays_half, None)
    size = None if batch is None else tuple(batch.batch_size)
    tensors = {k: column.local(v) for k, v in batches.tensor_columns(batch).items()}
    arrays = {k: column.local(v) for k, v in batches.array_columns(arrays_half).items()}
    path = Path(filepath)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC)
            writer = _Writer(file, protocol=5)
            entries = [("batch_size", size), *tensors.items(), *arrays.items()]
            writer.dump((list(tensors), list(arrays)))
            for key, value in [*entries, ("meta_info", meta)]:
                writer.field = f"field '{key}'"
                writer.clear_memo()
                writer.dump(walk(value, encode_leaf))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(filepath: str | Path) -> Contents:
    """Reads what `save` wrote; tensors come back on the kind of device they had, where there is
    one. Raises `DataError` for a file that is none of ours, or is cut short."""
    path = Path(filepath)
    if not path.is_file():
        raise DataError(f"no batch file {path}", path=str(path))
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DataError(f"{path} is not a file of DataProto.save_to_disk", path=str(path))

        def read() -> Any:
            return walk(_Reader(file).load(), decode_leaf)

        try:
            tensor_keys, array_keys = read()
            size = read()
            tensors = {key: read() for key in tensor_keys}
            arrays = {key: read() for key in array_keys}
            meta = read()
        except (EOFError, pickle.UnpicklingError) as error:
            raise DataError(f"{path} is damaged or cut short: {error}", path=str(path)) from error
    batch = None if size is None else as_tensordict(tensors, size, None)
    return Contents(batch, arrays, meta)
