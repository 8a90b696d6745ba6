"""The description of a field without its bytes, the types of values and payloads, and indexes.

A payload is the form in which the bytes of a field are stored and sent. It consists of numpy
arrays, which pickle protocol 5 writes out of band: the bytes are copied once into shared memory and
are read there without a copy. Payloads by kind of field:

    tensor    array [N, ...]; dtypes that numpy lacks (bfloat16, float8) as integers of their size;
              int64 in any signed integers that hold the numbers (`encode`)
    jagged    (values [total, ...], offsets int64 [N + 1])
    tree      {key: payload}: a nested TensorDict
    array     array [N, ...] without objects
    objects   (bytes uint8 [total], offsets int64 [N + 1]): each row is a pickle of its own
    raw       object array: rows that only the pickler of the transport can encode
"""

from __future__ import annotations

import copy
import math
import mmap
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quadriga.errors import FieldError, ProtocolError
from quadriga.protocol.storage import Array, Ints, RowSelection
from quadriga.protocol.tensordicts import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

ObjectArray: TypeAlias = NDArray[np.object_]
LocalValue: TypeAlias = torch.Tensor | TensorDictBase | Array
"""The value of a field in this process. Dimension 0 is the batch."""

RaggedPayload: TypeAlias = tuple[Array, Ints]
Payload: TypeAlias = "Array | RaggedPayload | dict[str, Payload]"
Kind = Literal["tensor", "jagged", "tree", "array", "objects", "raw"]

CARRIER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes → the integer dtype in which numpy stores a dtype that it lacks."""
NUMPY_KNOWS = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


_SMALL = 2048
"""Arrays up to this many bytes are pickled as bytes: cheaper than an out-of-band buffer."""


class FieldSpec(NamedTuple):
    """The description of a field without its bytes.

    `tail`: shape without the batch dimension; for a jagged field the shape of `values` without
    its ragged dimension, which is dimension `ragged_dim` of the field. `dtype`: name in torch, or
    `str` of the dtype in numpy. `device`: type of the device on which the tensor was created
    ("cpu", "cuda"). `children`: fields of a nested TensorDict.
    """

    kind: Kind
    dtype: str = ""
    tail: tuple[int, ...] = ()
    device: str = "cpu"
    children: tuple[tuple[str, FieldSpec], ...] = ()
    ragged_dim: int = 1


def flat_payload(payload: Payload) -> object:
    """Return a payload with small arrays as lists (dtype, shape, bytes); nothing else is a list."""
    if isinstance(payload, np.ndarray):
        if payload.nbytes > _SMALL or payload.dtype == object:
            return payload
        return [payload.dtype.str, payload.shape, payload.tobytes()]
    if isinstance(payload, tuple):
        return tuple([flat_payload(part) for part in payload])
    return {key: flat_payload(part) for key, part in payload.items()}


def payload_of(flat: Any) -> Any:
    """Return the payload of a flat form."""
    if isinstance(flat, list):
        dtype, shape, data = flat
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if isinstance(flat, tuple):
        return tuple([payload_of(part) for part in flat])
    if isinstance(flat, dict):
        return {key: payload_of(part) for key, part in flat.items()}
    return flat


POOLED_BYTES = 2**20
"""Tensors of at least this size use memory of the pool; smaller ones are allocated by torch."""
POOL_BYTES = 256 * 2**20
"""A process keeps at most this much unused memory."""
_STEP = 2**20  # sizes are rounded up to a multiple of this, so that similar tensors share buffers

Bytes = NDArray[np.uint8]


class _Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A buffer of the pool. Arrays and tensors over it reference it; the last one releases it."""

    _of: tuple[Pool, mmap.mmap] | None = None

    def __del__(self) -> None:
        if self._of is not None:  # set on the buffer itself, not on its views
            pool, memory = self._of
            pool.release(memory)


class Pool:
    """Buffers that are acquired and released, from any thread and during garbage collection."""

    def __init__(self, kept_bytes: int = POOL_BYTES) -> None:
        self._limit = kept_bytes
        self._free: dict[int, list[mmap.mmap]] = {}
        # Reentrant: garbage collection may run `release` in a thread that already holds the lock.
        self._lock = threading.RLock()
        self.kept_bytes = 0

    def acquire(self, nbytes: int) -> Bytes:
        """Return at least `nbytes` of uninitialised uint8, aligned to a page."""
        size = -(-nbytes // _STEP) * _STEP  # rounded up: 1 byte more than 2 MiB needs 3 MiB
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            self.kept_bytes -= size if memory is not None else 0
        if memory is None:
            memory = _map(size)
        # The buffer is made over an mmap: over an array, numpy would let views reference that
        # array directly, and the buffer would be released while they are still in use.
        buffer = np.ndarray.__new__(_Buffer, (size,), np.uint8, memory)
        buffer._of = self, memory
        return buffer.view(np.ndarray)

    def release(self, memory: mmap.mmap) -> None:
        """Keep memory for later use. Above the limit, drop all that was kept before."""
        with self._lock:
            if self.kept_bytes + len(memory) > self._limit:
                self._free, self.kept_bytes = {}, 0
            if len(memory) <= self._limit:
                self._free.setdefault(len(memory), []).append(memory)
                self.kept_bytes += len(memory)


def _map(size: int) -> mmap.mmap:
    """Return new anonymous memory, in huge pages where the kernel supports them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_pool = Pool()


def pooled_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised CPU tensor over a buffer of the pool."""
    nbytes = math.prod(shape) * dtype.itemsize
    flat = torch.from_numpy(_pool.acquire(nbytes)[:nbytes])
    return flat.view(dtype).view(tuple(shape))


# Row i is values[offsets[i] : offsets[i + 1]]. Three rows of 2, 0 and 3 numbers:
#
#     rows       [7, 8]   []   [4, 5, 6]
#     values      7  8          4  5  6
#     offsets     0        2    2        5
#
#     take rows [2, 0]   positions in values 2 3 4 | 0 1 → values 4 5 6 7 8, offsets 0 3 5
#     take rows 1 … 2    values[2:5] → 4 5 6, offsets [2, 2, 5] - 2 → 0 0 3; a view
#     concat with [[9]]  values 7 8 4 5 6 9, offsets 0 2 2 5 6: those of the second part plus 5


def is_jagged(value: object) -> bool:
    """Return True for a nested tensor of any layout (`parts` refuses those that are not jagged)."""
    return isinstance(value, Tensor) and value.is_nested


def ragged_dim(nested: Tensor) -> int:
    """Return the dimension of a jagged tensor that is ragged, 1 or more."""
    return int(getattr(nested, "_ragged_idx", 1))


def jagged_parts(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(values [total, ...], offsets [N + 1])` without holes.

    Values are a view with the ragged dimension first: of [3, 5] values of position ids, [5, 3].
    Raises `FieldError` for a nested tensor of another layout.
    """
    if nested.layout != torch.jagged:
        raise FieldError(
            f"expected a nested tensor of layout torch.jagged, got layout {nested.layout}. "
            "Build it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    # torch cannot make a nested tensor without rows contiguous. Its values may still have some.
    if nested.lengths() is not None and len(nested):  # type: ignore[attr-defined]  # NestedTensor
        nested = nested.contiguous()
    values: Tensor = nested.values()
    dim = ragged_dim(nested)
    values = values if dim == 1 else values.movedim(dim - 1, 0)
    return values if len(nested) else values[:0], nested.offsets()  # type: ignore[attr-defined]  # of NestedTensor


def build_jagged(values: Tensor, offsets: Tensor, dim: int = 1) -> Tensor:
    """Return the nested tensor of `parts`, ragged in dimension `dim`."""
    if dim > 1:
        values = values.movedim(0, dim - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


def row_gather(offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the positions in `values` of the chosen rows, and the offsets of the result."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    # Rows [2, 0]: starts 2 0, new offsets 0 3 5. The first three positions 0 1 2 are shifted by
    # 2 - 0 = 2, the last two positions 3 4 by 0 - 3 = -3, which gives 2 3 4 0 1.
    positions = np.arange(new_offsets[-1], dtype=np.int64)
    positions += np.repeat(starts - new_offsets[:-1], lengths)
    return positions, new_offsets


def take_jagged(nested: Tensor, selection: RowSelection) -> Tensor:
    """Return the selected rows as a nested tensor; differentiable in the values."""
    values, offsets = jagged_parts(nested)
    if isinstance(selection, range):
        low, high = int(offsets[selection.start]), int(offsets[selection.stop])
        chosen = offsets[selection.start : selection.stop + 1]
        return build_jagged(values[low:high], chosen - offsets[selection.start], ragged_dim(nested))
    known: Ints = offsets.cpu().numpy().astype(np.int64)
    positions, new_offsets = row_gather(known, selection)
    index = torch.from_numpy(positions).to(values.device)
    new = torch.from_numpy(new_offsets).to(offsets.device, offsets.dtype)
    return build_jagged(values[index], new, ragged_dim(nested))


def concat_jagged(nested: Sequence[Tensor]) -> Tensor:
    """Return the rows of all nested tensors in order."""
    dims = {ragged_dim(part) for part in nested}
    if len(dims) > 1:
        raise TypeError(f"ragged in different dimensions: {sorted(dims)}")
    pairs = [jagged_parts(part) for part in nested]
    values = torch.cat([v for v, _ in pairs])
    shifted, base = [pairs[0][1][:1]], 0
    for _, offsets in pairs:
        shifted.append(offsets[1:] + base)
        base += int(offsets[-1])
    return build_jagged(values, torch.cat(shifted), dims.pop())


def equal_jagged(a: Tensor, b: Tensor) -> bool:
    """Return whether row lengths and values are equal; NaN equals NaN."""
    (values_a, offsets_a), (values_b, offsets_b) = jagged_parts(a), jagged_parts(b)
    same_rows = _same_tensor(offsets_a.long(), offsets_b.long())
    return same_rows and ragged_dim(a) == ragged_dim(b) and _same_tensor(values_a, values_b)


def same_dense(a: Tensor, b: Tensor) -> bool:
    """Return whether two dense tensors of one shape are equal; NaN equals NaN."""
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def object_array(items: Sequence[object]) -> ObjectArray:
    """Return a one-dimensional object array. Items are not converted, lists included."""
    array: ObjectArray = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def objects_of(stack: NonTensorStack) -> ObjectArray:
    """Return the objects of a stack, in an array with its batch dimensions."""
    objects = np.empty(tuple(stack.batch_size), dtype=object)
    for place in np.ndindex(objects.shape):
        objects[place] = stack[place].data
    return objects


def stack_of_objects(rows: ObjectArray) -> NonTensorStack:
    """Return the stack of an array of objects; a `TensorDict` holds objects only in one."""
    return NonTensorStack(*map(NonTensorData if rows.ndim == 1 else stack_of_objects, rows))


def nbytes_of(value: LocalValue) -> int:
    """Return the bytes of the payload; for object arrays the bytes of the references only."""
    if isinstance(value, Tensor):
        if value.is_nested:
            values, offsets = jagged_parts(value)
            return nbytes_of(values) + nbytes_of(offsets)
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return sum(nbytes_of(field) for field in tensors_of(value).values())


def tensors_of(value: TensorDictBase) -> dict[str, Tensor | TensorDictBase]:
    """Return the entries of a `TensorDict`; nested ones are entries themselves."""
    entries: dict[str, Tensor | TensorDictBase] = dict(value.items())  # type: ignore[arg-type]
    return entries


def take_value(value: LocalValue, selection: RowSelection) -> LocalValue:
    """Return the selected rows: a view for a `RowRange`, a copy for `RowIndices`."""
    if isinstance(value, Tensor) and value.is_nested:
        return take_jagged(value, selection)
    if isinstance(selection, range):
        part: LocalValue = value[selection.start : selection.stop]
        return part
    if isinstance(value, np.ndarray):
        return value[selection]  # type: ignore[call-overload]  # no TensorDict
    index = torch.from_numpy(selection)
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    try:
        return value[index]
    except NotImplementedError:  # a dtype that tensordict cannot index, uint16 in a jagged tensor
        fields = {key: take_value(entry, selection) for key, entry in tensors_of(value).items()}
        return TensorDict(fields, [len(selection), *value.batch_size[1:]], device=value.device)


def value_row(value: LocalValue, index: int) -> object:
    """Return one row without its batch dimension (of a jagged tensor: a dense tensor)."""
    if isinstance(value, Tensor) and value.is_nested:
        values, offsets = jagged_parts(value)
        items = values[int(offsets[index]) : int(offsets[index + 1])]
        return items.movedim(0, ragged_dim(value) - 1)
    return value[index]


def concat_values(values: Sequence[LocalValue], key: str) -> LocalValue:
    """Return the rows of all values in order, as new memory even for a single value.

    Raises `FieldError` naming `key` when types, dtypes or shapes do not fit together.
    """
    parts: Any = list(values)  # of one type, or the functions below raise
    try:
        if isinstance(parts[0], np.ndarray):
            if not all(isinstance(part, np.ndarray) for part in parts):
                raise TypeError("arrays and tensors")
            masked = any(isinstance(part, np.ma.MaskedArray) for part in parts)
            # np.concatenate would return a masked array without its mask.
            numpy_module = np.ma if masked else np
            return cast(Array, numpy_module.concatenate(parts, axis=0))
        return cast(LocalValue, (concat_jagged if any(map(is_jagged, parts)) else torch.cat)(parts))
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        shapes = ", ".join(describe_value(value) for value in values)
        raise FieldError(
            f"the parts of field '{key}' cannot be concatenated along the batch dimension: "
            f"{shapes}",
            field=key,
        ) from error


def describe_value(value: object) -> str:
    """Return shape and dtype in a few characters, for messages: "[8, *, 2] float32"."""
    if isinstance(value, Tensor | np.ndarray | TensorDictBase):
        return f"{shape_of(value)} {dtype_of(value)}"
    return type(value).__name__


def shape_of(value: LocalValue) -> str:
    """Return a shape as text, "[8, *, 2]"; `*` is ragged."""
    dims = list(map(str, value.shape))
    if isinstance(value, Tensor) and value.is_nested:
        dims[ragged_dim(value)] = "*"
    return f"[{', '.join(dims)}]"


def dtype_of(value: LocalValue) -> str:
    """Return the name of a dtype, "TensorDict" for a `TensorDict`."""
    return dtype_name(getattr(value, "dtype", None) or type(value).__name__)


def dtype_name(dtype: object) -> str:
    """Return "float32" for torch.float32 and for numpy's float32."""
    return str(dtype).removeprefix("torch.")


def clone_value(value: LocalValue) -> LocalValue:
    """Return a private copy that shares no memory; objects inside arrays are copied too."""
    if isinstance(value, Tensor) and value.is_nested:
        values, offsets = jagged_parts(value)
        return build_jagged(values.clone(), offsets.clone(), ragged_dim(value))
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    return value.clone()


def same(a: object, b: object) -> bool:
    """Return whether two values of any type are deeply equal: type, dtype, shape and content.

    NaN equals NaN.
    """
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if is_dataclass(a) and not isinstance(a, type):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, np.ndarray | list | tuple | deque | Mapping | TensorDictBase):
        return _same_items(a, b)
    try:
        if isinstance(contents := getattr(a, "contents", None), tuple):  # of a batch
            return same(contents, getattr(b, "contents", None))
        return bool(a == b)
    except (RuntimeError, ValueError, RecursionError):  # of tensors inside: `==` has no truth
        return False


def _same_items(a: Any, b: Any) -> bool:
    """Return whether two containers of one type are deeply equal."""
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
        return all(map(same, a.flat, b.flat))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    keys = set(a.keys())
    return keys == set(b.keys()) and all(same(a[key], b[key]) for key in keys)


def same_values(a: object, b: object) -> bool:
    """Return whether two values are deeply equal, where two tensors may differ in their dtype.

    A mask of ones is the same in int64 and in float32; 2²⁴ + 1 in int64 is no number of float32.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
        # Both ways, because one way rounds: 2²⁴ + 1 becomes 2²⁴ in float32.
        return _same_tensor(a.to(b.dtype), b) and _same_tensor(a, b.to(a.dtype))
    return same(a, b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and equal_jagged(a, b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    return same_dense(a, b)


# Indexes: which rows a slice, a list, an array, a tensor or a mask selects

RowIndex = slice | Sequence[int] | Sequence[bool] | Array | torch.Tensor
"""An index that selects several rows."""


def from_slice(index: slice, length: int) -> RowSelection:
    """Return the rows of a Python slice over `length` rows."""
    start, stop, step = index.indices(length)
    if step == 1:
        return range(start, max(start, stop))
    return np.arange(start, stop, step, dtype=np.int64)


def from_index(index: object, length: int) -> RowSelection:
    """Return the rows of a list, tuple, range, array or tensor of row numbers, or of a bool mask.

    Negative numbers count from the end. Raises `IndexError` for a row that does not exist and
    `ProtocolError` for a mask of the wrong length or an index that is not one-dimensional.
    """
    if isinstance(index, slice):
        return from_slice(index, length)
    given = _as_array(index)
    if given.ndim != 1:
        raise ProtocolError(f"expected a one-dimensional row index, got shape {list(given.shape)}")
    if given.dtype == np.bool_:
        if len(given) != length:
            raise ProtocolError(f"expected a mask of {length} rows, got {len(given)} entries")
        return np.flatnonzero(given).astype(np.int64)
    if given.dtype.kind not in "iu":
        raise ProtocolError(f"expected row numbers or a bool mask, got dtype {given.dtype}")
    rows = given.astype(np.int64, copy=True)
    if rows.size:
        low, high = int(rows.min()), int(rows.max())
        if low < -length or high >= length:
            bad = low if low < -length else high
            raise IndexError(f"row {bad} of a batch of {length} rows")
        rows[rows < 0] += length
    return rows


def _as_array(index: object) -> Array:
    if isinstance(index, torch.Tensor):
        return np.asarray(index.detach().cpu())
    if isinstance(index, np.ndarray):
        return index
    if isinstance(index, Sequence) and not isinstance(index, str | bytes):
        items = [i.item() if isinstance(i, torch.Tensor) else i for i in index]
        return np.asarray(items, dtype=None if items else np.int64)
    raise ProtocolError(
        "expected an int, a slice, a list, a numpy array or a tensor as row index, "
        f"got {type(index).__name__}"
    )


def row_number(index: object, length: int) -> int | None:
    """Return the row of an int, a numpy integer, or an integer tensor or array without dimensions.

    Negative numbers count from the end. Return None for any other index. Raises `IndexError` for a
    row that does not exist.
    """
    if isinstance(index, torch.Tensor | np.ndarray):
        if index.ndim or index.dtype in (torch.bool, np.bool_):
            return None
        index = index.item()
    if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
        return None
    row = int(index)
    if not -length <= row < length:
        raise IndexError(f"row {row} of a batch of {length} rows")
    return row + length if row < 0 else row
