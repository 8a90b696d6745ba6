"""Values as JSON and bytes. A value that `decode_values` would not return equal is refused.

JSON of a value: itself, or an object with one key, the tag that selects the decoder.

    [1, "a", None]             [1, "a", null]
    {"a": (1,)}                {"dict": {"a": {"tuple": [1]}}}
    {1: b"xy"}                 {"pairs": [[1, {"bytes": 2}]]}       2 bytes of `nested`
    torch.ones(2, 3)           {"tensor": ["float32", [2, 3], "cpu", "0 x"]}       entry of a field
    np.arange(2) within a row  {"array": ["<i8", [2], null]}       16 bytes of `nested`
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.batch_file import images
from quadriga.protocol.batch_file.container import Bytes, Output
from quadriga.protocol.batch_file.dtypes import (
    TORCH_DTYPES,
    Stored,
    check_booleans,
    check_items,
    numpy_json,
    numpy_stored,
)
from quadriga.protocol.batch_file.limits import (
    MAX_DEPTH,
    MAX_STACK_ROWS,
    Json,
    MalformedError,
    checked_shape,
)
from quadriga.protocol.batch_file.plain_values import (
    UnsupportedError,
    are_json,
    encode_plain,
    is_json,
)
from quadriga.protocol.values import jagged, operations
from quadriga.protocol.values.encode import host_array
from quadriga.protocol.values.field_spec import Array

if TYPE_CHECKING:
    from PIL.Image import Image

_OFFSETS = Stored("I64")


class Encoder:
    """Encodes the values of one batch; their bytes are collected in `output`, as they are."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._stack_rows = 0
        self._label: str | None = None
        """The name of the field, while its bytes get entries of their own."""

    def field(self, key: str, value: object) -> Json:
        """Encode a field. Raises `FieldError` naming the field and the type at fault."""
        self._label = key
        return self._named(f"field '{key}'", key, value)

    def setting(self, key: object, value: object) -> Json:
        """Encode one value of `meta_info`. Raises `FieldError` as `field` does."""
        self._label = None
        return self._named(f"meta_info[{key!r}]", str(key), value)

    def setting_key(self, key: object) -> Json:
        """Encode a key of `meta_info`. Raises `FieldError` as `field` does."""
        self._label = None
        try:
            _keys([key])
        except UnsupportedError as error:
            raise FieldError(
                f"meta_info contains {error}, which a batch file does not support", field=str(key)
            ) from error
        return self._named(f"meta_info[{key!r}]", str(key), key)

    def _named(self, where: str, key: str, value: object) -> Json:
        try:
            return self.value(value)
        except (UnsupportedError, MalformedError, RecursionError) as error:
            reason = error if isinstance(error, ValueError) else "values nested too deeply"
            raise FieldError(
                f"{where} contains {reason}, which a batch file does not support; it supports "
                "tensors, arrays, images and plain Python values",
                field=key,
            ) from error

    def value(self, value: object, depth: int = 0) -> Json:
        """Encode a value. Raises `UnsupportedError` naming its type."""
        if is_json(value):
            return value
        if depth > MAX_DEPTH:
            raise UnsupportedError(f"containers nested more than {MAX_DEPTH} deep")
        encode = _CONTAINERS.get(type(value))
        if encode is not None:
            return encode(self, value, depth + 1)
        plain = encode_plain(value)
        return self._bytes_of(value, depth + 1) if plain is None else plain

    def _items(self, values: Iterable[object], depth: int) -> list[Json]:
        items = list(values)
        return items if are_json(items) else [self.value(item, depth) for item in items]

    def _list(self, value: list[object], depth: int) -> Json:
        return self._items(value, depth)

    def _tuple(self, value: tuple[object, ...], depth: int) -> Json:
        return {"tuple": self._items(value, depth)}

    def _set(self, value: set[object], depth: int) -> Json:
        return {"set": self._items(_keys(value), depth)}

    def _frozenset(self, value: frozenset[object], depth: int) -> Json:
        return {"frozenset": self._items(_keys(value), depth)}

    def _slice(self, value: slice, depth: int) -> Json:
        return {"slice": self._items((value.start, value.stop, value.step), depth)}

    def _dict(self, value: Mapping[object, object], depth: int) -> Json:
        if all(type(key) is str for key in value):
            return {"dict": {str(key): self.value(item, depth) for key, item in value.items()}}
        return {"pairs": self._pairs(value, depth)}

    def _ordered_dict(self, value: Mapping[object, object], depth: int) -> Json:
        return {"ordered": self._pairs(value, depth)}

    def _pairs(self, value: Mapping[object, object], depth: int) -> list[Json]:
        _keys(value)
        return [[self.value(key, depth), self.value(item, depth)] for key, item in value.items()]

    def _bytes(self, value: bytes, depth: int) -> Json:
        self._output.add_nested(len(value), lambda: memoryview(value))
        return {"bytes": len(value)}

    def _bytearray(self, value: bytearray, depth: int) -> Json:
        copy = bytes(value)
        self._output.add_nested(len(copy), lambda: memoryview(copy))
        return {"bytearray": len(copy)}

    def _bytes_of(self, value: object, depth: int) -> Json:
        """Encode a value that consists of bytes."""
        if type(value) is NonTensorStack and value.batch_dims == 1:
            self._stack_rows += len(value)
            if self._stack_rows > MAX_STACK_ROWS:
                raise UnsupportedError(f"more than {MAX_STACK_ROWS} rows of NonTensorStack")
            return {"stack": self._nested(value.tolist(), depth)}
        if type(value) is TensorDict:
            return {"tensordict": self._tensordict(value, depth)}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value, depth)
        if images.is_image(value):
            return self._image(value, depth)
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedError(f"a {name}" if kind is not type else f"the class {value!r}")

    def _add(self, stored: Stored, shape: tuple[int, ...], data: Bytes) -> str | None:
        """Add bytes. Return the name of their entry, None if they are in `nested`."""
        checked_shape(shape, stored.item_bytes)
        if self._label is not None:
            return self._output.add_field(self._label, stored, shape, data)
        nbytes = int(np.prod(shape, dtype=object)) * stored.item_bytes
        self._output.add_nested(nbytes, data)
        return None

    def _tensor(self, value: Tensor) -> Json:
        if value.is_nested:
            return self._jagged(value)
        name = operations.dtype_name(value.dtype)
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise UnsupportedError(f"a {type(value).__module__}.{type(value).__qualname__}")
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise UnsupportedError(
                f"a tensor of layout {value.layout}, dtype {name} on device {value.device.type}"
            )
        stored = _stored(value)
        check_booleans(value)
        entry = self._add(stored, tuple(value.shape), lambda: _raw(host_array(value)))
        return {"tensor": [name, list(value.shape), value.device.type, entry]}

    def _jagged(self, value: Tensor) -> Json:
        try:
            values, offsets = jagged.parts(value)
        except FieldError as error:
            raise UnsupportedError(f"a tensor that is not supported ({error})") from error
        check_booleans(values)
        stored, shape, rows = _stored(values), tuple(values.shape), int(offsets.shape[0]) - 1
        entries = (
            self._add(stored, shape, lambda: _raw(host_array(values))),
            self._add(_OFFSETS, (rows + 1,), lambda: _raw(host_array(offsets).astype(np.int64))),
        )
        name, device = operations.dtype_name(values.dtype), values.device.type
        return {"jagged": [name, list(shape), device, jagged.ragged_dim(value), rows, *entries]}

    def _tensordict(self, value: TensorDict, depth: int) -> Json:
        fields: list[Json] = []
        outer = self._label
        for key, entry in value.items():
            if type(key) is not str:
                raise UnsupportedError(f"a TensorDict with a key of type {type(key).__name__}")
            self._label = None if outer is None else f"{outer}.{key}"
            try:
                fields.append([key, self.value(entry, depth)])
            except UnsupportedError as error:
                raise UnsupportedError(f"a TensorDict whose entry '{key}' is {error}") from error
        self._label = outer
        names = list(value.names) if any(name is not None for name in value.names) else None
        device = None if value.device is None else value.device.type
        return [list(value.batch_size), device, names, fields]

    def _array(self, value: Array, depth: int) -> Json:
        # Subclasses have more than their items (a mask, attributes). A memmap has not: it is an
        # array whose memory is a file.
        if type(value) not in (np.ndarray, np.memmap):
            raise UnsupportedError(f"a {type(value).__module__}.{type(value).__qualname__}")
        if value.dtype == object:
            checked_shape(value.shape, value.itemsize)
            return {"objects": [list(value.shape), self._nested(value.ravel().tolist(), depth)]}
        kind, stored = numpy_json(value.dtype), numpy_stored(value.dtype)
        check_items(value)
        entry = self._add(stored, value.shape, lambda: _raw(value))
        return {"array": [kind, list(value.shape), entry]}

    def _nested(self, items: list[object], depth: int) -> list[Json]:
        """Encode rows, whose bytes are in `nested`."""
        outer, self._label = self._label, None
        encoded = self._items(items, depth)
        self._label = outer
        return encoded

    def _image(self, value: Image, depth: int) -> Json:
        form, pixels, values = images.encode_image(value)
        self._output.add_nested(len(pixels), lambda: memoryview(pixels))
        return {"image": [form, self._items(values, depth)]}


def _keys(keys: Collection[object]) -> Collection[object]:
    """Return keys or elements. A tensor is found by its identity, which a file does not keep."""
    if any(isinstance(key, Tensor | TensorDict) for key in keys):
        raise UnsupportedError("a tensor as a key of a dict or an element of a set")
    return keys


def _stored(value: Tensor) -> Stored:
    name = operations.dtype_name(value.dtype)
    if name not in TORCH_DTYPES:
        raise UnsupportedError(f"a tensor of dtype {name}")
    return TORCH_DTYPES[name]


def _raw(array: Array) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if not flat.size:
        return memoryview(b"")
    # Structures become plain bytes first: numpy does not view some of them as integers.
    plain = flat.view(f"V{flat.dtype.itemsize}") if flat.dtype.names is not None else flat
    return plain.view(np.uint8).data


_CONTAINERS: dict[type, Callable[..., Json]] = {
    list: Encoder._list,
    tuple: Encoder._tuple,
    set: Encoder._set,
    frozenset: Encoder._frozenset,
    slice: Encoder._slice,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered_dict,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytearray,
}
