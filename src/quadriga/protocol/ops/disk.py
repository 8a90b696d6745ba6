"""A batch in one file, read without executing code from the file.

The file is a line that names the format and one pickle stream: the names of the fields, the batch
size, each field, `meta_info`. Writer and reader allow only the types listed here, so everything
that can be written can be read, and a file of another origin cannot call anything else.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.errors import DataError, FieldError
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.column import local_value
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.containers import walk
from quadriga.protocol.values.decode import EncodedTensor, decode_leaf, decode_tensor
from quadriga.protocol.values.encode import TensorReduction, encode_leaf, encode_tensor
from quadriga.protocol.values.field_spec import FieldSpec
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
    "quadriga.protocol.values.decode": {"EncodedTensor", "decode_tensor"},
}
_FORMER_NAMES: dict[tuple[str, str], object] = {
    ("quadriga.protocol.spec", "FieldSpec"): FieldSpec,
    ("quadriga.protocol.plain", "Parcel"): EncodedTensor,
    ("quadriga.protocol.plain", "open_parcel"): decode_tensor,
}
"""Names under which files of earlier versions refer to what the package has under another name."""


class _Writer(pickle.Pickler):
    """Refuses what `_Reader` would refuse."""

    field = ""

    def reducer_override(self, obj: object) -> TensorReduction:
        if isinstance(obj, torch.Tensor):
            return decode_tensor, (encode_tensor(obj, private=False),)
        if isinstance(obj, np.generic):
            return NotImplemented  # type: ignore[no-any-return]
        kind = obj if isinstance(obj, type) or callable(obj) else type(obj)
        module = getattr(kind, "__module__", None) or "builtins"
        name = getattr(kind, "__qualname__", str(kind))
        if not _allowed(module, name):
            raise FieldError(
                f"{self.field} contains a {module}.{name}, which a batch file does not support; "
                "it supports tensors, arrays, images and plain Python values",
                field=self.field,
            )
        return NotImplemented  # type: ignore[no-any-return]


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _FORMER_NAMES:
            return _FORMER_NAMES[module, name]
        if not _allowed(module, name):
            raise DataError(
                f"the file refers to {module}.{name}, which no batch file needs; it is damaged or "
                "was not written by save_to_disk"
            )
        found: object = super().find_class(module, name)
        if module.startswith("PIL."):
            from PIL.Image import Image

            if not (isinstance(found, type) and issubclass(found, Image)):
                raise DataError(f"the file refers to {module}.{name}, which is not an image")
        return found


def _allowed(module: str, name: str) -> bool:
    if module.startswith("PIL."):
        return name.isidentifier() and name.endswith("Image" if module == "PIL.Image" else "File")
    if module.startswith("numpy") and module.endswith("dtypes"):
        return name.isidentifier() and name.endswith("DType")
    return name in _ALLOWED.get(module, ())


def save(contents: Contents, filepath: str | Path) -> None:
    """Write all fields and `meta_info`; fetches remote fields.

    The file appears complete or not at all. Raises `FieldError` naming a type that a file does not
    support.
    """
    batch, arrays, meta = contents
    halves.prefetch(batch, arrays, None)
    size = None if batch is None else tuple(batch.batch_size)
    tensors = {key: local_value(c) for key, c in halves.tensor_columns(batch).items()}
    objects = {key: local_value(c) for key, c in halves.array_columns(arrays).items()}
    path = Path(filepath)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(_MAGIC)
            writer = _Writer(file, protocol=5)
            entries = [("batch_size", size), *tensors.items(), *objects.items()]
            writer.dump((list(tensors), list(objects)))
            for key, value in [*entries, ("meta_info", meta)]:
                writer.field = f"field '{key}'"
                writer.clear_memo()
                writer.dump(walk(value, encode_leaf))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(filepath: str | Path) -> Contents:
    """Read a file of `save`.

    Tensors are placed on the type of device that they had, if this process has one. Raises
    `DataError` for a file of another format and for one that is truncated.
    """
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
            raise DataError(f"{path} is damaged or truncated: {error}", path=str(path)) from error
    batch = None if size is None else as_tensordict(tensors, size, None)
    return Contents(batch, arrays, meta)
