"""From payloads back to values: a private copy of just the chosen rows.

What comes in may be read-only shared memory; what goes out shares nothing with it, so a method may
write into what it received.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.protocol.values import jagged
from quadriga.protocol.values.buffer_pool import empty
from quadriga.protocol.values.field_spec import CARRIER_OF_SIZE, NUMPY_KNOWS, FieldSpec, Payload
from quadriga.protocol.values.row_map import Ints, Rows

_LOOP_BYTES = 4096  # runs shorter than this are gathered in one indexing call instead of a loop
_LOOP_RUNS = 64


def decode(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    """The value of `rows` (one payload a block) and the bytes that were copied for it."""
    return _DECODERS[spec.kind](spec, rows, payloads)


def _tensor(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    tensor, carrier = _empty(spec.dtype, (len(rows), *spec.tail))
    _copy_runs(carrier, rows, payloads)
    return place(tensor, spec.device), carrier.nbytes


def _empty(dtype: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """A new tensor, and the numpy array through which its bytes are written."""
    wanted: torch.dtype = getattr(torch, dtype)
    if wanted in NUMPY_KNOWS:
        tensor = empty(shape, wanted)
        return tensor, tensor.numpy()
    carrier = empty(shape, CARRIER_OF_SIZE[wanted.itemsize])
    return carrier.view(wanted), carrier.numpy()


def device_here(kind: str) -> torch.device:
    """This process's current device of a kind ("cuda"); the CPU where there is none."""
    module = getattr(torch, kind, None)
    if kind == "cpu" or module is None or not module.is_available():
        return torch.device("cpu")
    return torch.device(kind, module.current_device())


def place(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The tensor on the current device of the kind it was made on, where there is one."""
    return tensor if device == "cpu" else tensor.to(device_here(device))


def _copy_runs(
    out: np.ndarray[Any, Any], rows: Rows, payloads: Sequence[np.ndarray[Any, Any]]
) -> None:
    """Copies each run of rows to its place in `out`."""
    count = len(rows.segments)
    if count == 0 or out.size == 0:
        return
    if count <= _LOOP_RUNS or out.nbytes >= count * _LOOP_BYTES:
        for at, block, start, stop in runs(rows):
            np.copyto(out[at : at + stop - start], payloads[block][start:stop])
        return
    block_of, row_of = rows.expand()
    for b, payload in enumerate(payloads):
        mine = np.flatnonzero(block_of == b)
        if len(mine) == len(block_of):
            np.take(payload, row_of, axis=0, out=out, mode="clip")
        else:
            out[mine] = payload[row_of[mine]]


def runs(rows: Rows) -> Iterator[tuple[int, int, int, int]]:
    """`(batch row, block, first row, row after the last)` of each run."""
    at = 0
    for block, start, stop in rows.segments.tolist():
        yield at, block, start, stop
        at += stop - start


def _array(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    out = np.empty((len(rows), *spec.tail), dtype=np.dtype(spec.dtype))
    _copy_runs(out, rows, payloads)
    return out, out.nbytes


def _ragged(
    rows: Rows, payloads: Sequence[Payload], make: Callable[[int], tuple[Any, np.ndarray[Any, Any]]]
) -> tuple[Any, Ints]:
    """Joins ragged rows: `make(total)` gives the new value and the array to write it through."""
    lengths = [np.diff(payloads[b][1][s : e + 1]) for _, b, s, e in runs(rows)]
    ends = np.zeros(len(rows) + 1, dtype=np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=ends[1:])
    value, out = make(int(ends[-1]))
    for at, block, start, stop in runs(rows):
        data, offsets = payloads[block]
        np.copyto(out[ends[at] : ends[at + stop - start]], data[offsets[start] : offsets[stop]])
    return value, ends


def _jagged(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    def make(total: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        return _empty(spec.dtype, (total, *spec.tail))

    values, ends = _ragged(rows, payloads, make)
    nested = jagged.build(place(values, spec.device), place(torch.from_numpy(ends), spec.device))
    return nested, values.numel() * values.element_size() + ends.nbytes


def _objects(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    out = np.empty((len(rows), *spec.tail), dtype=object)
    nbytes = out.shape[0] * 8 + 8
    for at, block, start, stop in runs(rows):
        data, offsets = payloads[block]
        view, ends = memoryview(data), offsets[start : stop + 1].tolist()
        for i in range(stop - start):
            out[at + i] = pickle.loads(view[ends[i] : ends[i + 1]])
        nbytes += ends[-1] - ends[0]
    return out, nbytes


def _raw(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    out = np.empty((len(rows), *spec.tail), dtype=object)
    for at, block, start, stop in runs(rows):
        out[at : at + stop - start] = copy.deepcopy(payloads[block][start:stop])
    return out, out.nbytes


def _tree(spec: FieldSpec, rows: Rows, payloads: Sequence[Payload]) -> tuple[Any, int]:
    fields, total = {}, 0
    for key, child in spec.children:
        fields[key], nbytes = decode(child, rows, [payload[key] for payload in payloads])
        total += nbytes
    return TensorDict(fields, batch_size=[len(rows), *spec.tail]), total


_DECODERS: dict[str, Callable[[FieldSpec, Rows, Sequence[Payload]], tuple[Any, int]]] = {
    "tensor": _tensor,
    "jagged": _jagged,
    "array": _array,
    "objects": _objects,
    "raw": _raw,
    "tree": _tree,
}
