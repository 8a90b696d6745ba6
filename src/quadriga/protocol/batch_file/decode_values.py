"""Values of the JSON and bytes of a batch file. The inverse of `encode_values`.

Nothing is trusted: each tag selects a decoder of this module, each shape is compared with the bytes
of the file before memory is allocated, and what no encoder writes is refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from quadriga.protocol.batch_file import images
from quadriga.protocol.batch_file.container import Input
from quadriga.protocol.batch_file.dtypes import (
    Stored,
    check_booleans,
    check_items,
    numpy_dtype,
    numpy_stored,
    torch_dtype,
)
from quadriga.protocol.batch_file.limits import (
    MAX_DEPTH,
    MAX_DIMS,
    MAX_STACK_ROWS,
    Json,
    MalformedError,
    brief,
    check_hashes,
    expect_int,
    expect_list,
    expect_pairs,
    expect_shape,
    expect_text,
)
from quadriga.protocol.batch_file.plain_values import PLAIN_DECODERS, are_json
from quadriga.protocol.values import jagged
from quadriga.protocol.values.decode import current_device
from quadriga.protocol.values.field_spec import Array, Ints, LocalValue, ObjectArray
from quadriga.protocol.values.operations import object_array

_OFFSETS = Stored("I64")


class Decoder:
    """Decodes the values of one file in the order in which they were encoded."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._stack_rows = 0

    def field(self, raw: Json) -> LocalValue:
        """Return the value of a field, or the `TensorDict` of all tensors."""
        value = self.value(raw)
        if not isinstance(value, Tensor | TensorDict | np.ndarray):
            raise MalformedError(f"expected a tensor or an array, got a {type(value).__name__}")
        return value

    def value(self, raw: Json, depth: int = 0) -> object:
        """Return a value. Raises `MalformedError`, or what numpy and torch raise."""
        if depth > MAX_DEPTH:
            raise MalformedError(f"values nested more than {MAX_DEPTH} deep")
        if isinstance(raw, list):
            return self._items(raw, depth + 1)
        if not isinstance(raw, dict):
            return raw
        if len(raw) != 1:
            raise MalformedError(f"expected an object with one tag, got {len(raw)}")
        [(tag, content)] = raw.items()
        plain = PLAIN_DECODERS.get(tag)
        if plain is not None:
            return plain(content)
        decode = _DECODERS.get(tag)
        if decode is None:
            raise MalformedError(f"no type of values has the tag {brief(tag)}")
        return decode(self, content, depth + 1)

    def _items(self, raw: Json, depth: int) -> list[object]:
        items = expect_list(raw)
        return items if are_json(items) else [self.value(item, depth) for item in items]

    def _tuple(self, raw: Json, depth: int) -> tuple[object, ...]:
        return tuple(self._items(raw, depth))

    def _set(self, raw: Json, depth: int) -> set[object]:
        return set(self._keys(self._items(raw, depth)))

    def _frozenset(self, raw: Json, depth: int) -> frozenset[object]:
        return frozenset(self._keys(self._items(raw, depth)))

    def _keys(self, keys: list[object]) -> list[object]:
        if any(isinstance(key, Tensor | TensorDict) for key in keys):
            raise MalformedError("a tensor is a key of a dict or an element of a set")
        check_hashes(keys)
        if len(set(keys)) != len(keys):
            raise MalformedError("a key of a dict or set occurs twice")
        return keys

    def _slice(self, raw: Json, depth: int) -> slice:
        start, stop, step = self._items(expect_list(raw, 3), depth)
        return slice(start, stop, step)

    def _dict(self, raw: Json, depth: int) -> dict[str, object]:
        if not isinstance(raw, dict):
            raise MalformedError(f"expected an object, got {brief(raw)}")
        return {key: self.value(item, depth) for key, item in raw.items()}

    def _pairs(self, raw: Json, depth: int) -> dict[Hashable, object]:
        # Key and value of a pair are decoded together, because their bytes are next to each other.
        pairs = [(self.value(k, depth), self.value(v, depth)) for k, v in expect_pairs(raw)]
        self._keys([key for key, _ in pairs])
        return dict(pairs)

    def _ordered(self, raw: Json, depth: int) -> OrderedDict[Hashable, object]:
        return OrderedDict(self._pairs(raw, depth))

    def _bytes(self, raw: Json, depth: int) -> bytes:
        return bytes(self._bytearray(raw, depth))

    def _bytearray(self, raw: Json, depth: int) -> bytearray:
        nbytes = expect_int(raw)
        start = self._source.locate_nested(nbytes)
        data = bytearray(nbytes)
        self._source.fill(memoryview(data), start)
        return data

    def _locate(self, name: Json, stored: Stored, shape: tuple[int, ...]) -> int:
        """Return where the bytes of a value are in the file. The file has all of them."""
        if name is None:
            return self._source.locate_nested(math.prod(shape) * stored.item_bytes)
        return self._source.locate(expect_text(name), stored, shape)

    def _tensor(self, raw: Json, depth: int) -> Tensor:
        dtype, shape, device, name = expect_list(raw, 4)
        return self._read(dtype, shape, name).to(_device(device))

    def _read(self, dtype: Json, shape: Json, name: Json) -> Tensor:
        kind, stored = torch_dtype(dtype)
        dims = expect_shape(shape, stored.item_bytes)
        start = self._locate(name, stored, dims)
        nbytes = math.prod(dims) * stored.item_bytes
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._source.fill(data.numpy().data, start)
        value = data.view(kind).reshape(dims)
        check_booleans(value)
        return value

    def _jagged(self, raw: Json, depth: int) -> Tensor:
        dtype, shape, device, ragged, rows, *names = expect_list(raw, 7)
        values = self._read(dtype, shape, names[0])
        count = expect_int(rows)
        dim = expect_int(ragged, 1, min(values.dim(), MAX_DIMS))
        start = self._locate(names[1], _OFFSETS, (count + 1,))
        offsets: Ints = np.empty(count + 1, dtype=np.int64)
        self._source.fill(offsets.view(np.uint8).data, start)
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise MalformedError("the offsets of a jagged tensor are no rows of its values")
        place = _device(device)
        return jagged.build(values.to(place), torch.from_numpy(offsets).to(place), dim)

    def _array(self, raw: Json, depth: int) -> Array:
        kind, shape, name = expect_list(raw, 3)
        dtype = numpy_dtype(kind)
        stored = numpy_stored(dtype)
        dims = expect_shape(shape, stored.item_bytes)
        start = self._locate(name, stored, dims)
        data: Array = np.empty(math.prod(dims) * stored.item_bytes, dtype=np.uint8)
        self._source.fill(data.data, start)
        value = data.view(dtype).reshape(dims)
        check_items(value)
        return value

    def _objects(self, raw: Json, depth: int) -> ObjectArray:
        shape, items = expect_list(raw, 2)
        rows = expect_list(items)
        dims = expect_shape(shape, np.dtype(object).itemsize)
        if math.prod(dims) != len(rows):
            raise MalformedError(f"{len(rows)} objects in an array of shape {list(dims)}")
        return object_array(self._items(rows, depth)).reshape(dims)

    def _stack(self, raw: Json, depth: int) -> NonTensorStack:
        # Objects are entries of a TensorDict only as a stack of non-tensors.
        self._stack_rows += len(expect_list(raw))
        if self._stack_rows > MAX_STACK_ROWS:
            raise MalformedError(f"more than {MAX_STACK_ROWS} rows of non-tensor stacks")
        return NonTensorStack(*map(NonTensorData, self._items(raw, depth)))

    def _tensordict(self, raw: Json, depth: int) -> TensorDict:
        size, device, names, entries = expect_list(raw, 4)
        dims = expect_shape(size, 1)
        fields: dict[str, object] = {}
        for key, entry in expect_pairs(entries):
            value = self.value(entry, depth)
            if not isinstance(value, Tensor | TensorDict | NonTensorStack):
                raise MalformedError(f"a TensorDict holds a {type(value).__name__}")
            known = 1 if jagged.is_jagged(value) else len(dims)
            if tuple(value.shape[:known]) != dims[:known] or expect_text(key) in fields:
                raise MalformedError(f"entry {brief(key)} of a TensorDict of size {list(dims)}")
            fields[expect_text(key)] = value
        place = None if device is None else _device(device)
        made = TensorDict(fields, batch_size=list(dims), device=place)
        if names is not None:
            made.names = [n if n is None else expect_text(n) for n in expect_list(names, len(dims))]
        return made

    def _image(self, raw: Json, depth: int) -> object:
        form, values = expect_list(raw, 2)
        _, mode, size, _ = images.image_form(form)
        pixels = self._bytes(images.pixel_bytes(mode, *size), depth)
        return images.decode_image(form, pixels, self._items(values, depth))


def _device(raw: Json) -> torch.device:
    """Return the current device of a type ("cuda"), the CPU if this process has none."""
    name = expect_text(raw)
    if name == "cpu":
        return torch.device("cpu")
    if name not in ("cuda", "npu", "xpu", "mps"):
        raise MalformedError(f"no type of device {brief(name)}")
    return current_device(name)


_DECODERS: dict[str, Callable[[Decoder, Json, int], object]] = {
    "tuple": Decoder._tuple,
    "set": Decoder._set,
    "frozenset": Decoder._frozenset,
    "slice": Decoder._slice,
    "dict": Decoder._dict,
    "pairs": Decoder._pairs,
    "ordered": Decoder._ordered,
    "bytes": Decoder._bytes,
    "bytearray": Decoder._bytearray,
    "tensor": Decoder._tensor,
    "jagged": Decoder._jagged,
    "array": Decoder._array,
    "objects": Decoder._objects,
    "stack": Decoder._stack,
    "tensordict": Decoder._tensordict,
    "image": Decoder._image,
}
"""Tag → the method that decodes what is under it."""
