"""Read parts of the tensors in a model folder.

A rank that holds a shard of a parameter needs its rows only. The rows of a tensor are neighbours in
a safetensors file, so that they are read as one range of bytes:

    file     │ header │ embedding, 6 rows of 2 numbers in BF16  │ other tensors │
    byte              120     128     136     144
    shards of 3 ranks   rows 0-1│rows 2-3│rows 4-5

The files are read, not mapped. A mapping loads the pages around each range too, and each of them by
an interrupt of the process, which is slow on a network file system.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from itertools import product
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.models.weight_files import StoredTensor, read_header, weight_file_names
from quadriga.models.weights.joined import JoinedTensor, Source

PIECE_BYTES = 16 * 2**20
"""How much is read at once. The memory for it is all that reading needs beside its target."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name of a dtype in a safetensors file -> dtype."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's weight files by their names. Reads the headers only.

    Raises:
        ModelError: a file cannot be read or is no safetensors file, or two files hold a tensor of
            the same name.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_file_names(folder):
        header = read_header(folder, file)
        twice = found.keys() & header.keys()
        if twice:
            name = min(twice)
            raise ModelError(
                f"tensor {name!r} is in two files of {folder}: {found[name].file} and {file}",
                path=str(folder),
            )
        found |= header
    return found


class TensorReader:
    """Reads ranges of the tensors of one folder. A context manager, which closes the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, FileIO] = {}
        self._stack = ExitStack()
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, tensor: Source, first: int, target: Tensor) -> None:
        """Copy `target.numel()` elements from index `first` on into `target`, in its dtype.

        Args:
            tensor: has one of the dtypes in `DTYPES`.
            first: the index of an element in row-major order.
            target: contiguous, on any device.

        Raises:
            ModelError: the file ends before the last element.
        """
        if isinstance(tensor, JoinedTensor):
            flat = target.view(-1)
            for part, start, count in tensor.ranges(first, len(flat)):
                self.read(part, start, flat[:count])
                flat = flat[count:]
            return
        dtype, flat = DTYPES[tensor.dtype], target.view(-1)
        size = dtype.itemsize
        if tensor.stop - tensor.start != math.prod(tensor.shape) * size:
            raise ModelError(
                f"the model in {self._folder} cannot be loaded: {tensor.file} holds "
                f"{tensor.stop - tensor.start} bytes for a tensor of shape {tensor.shape} and "
                f"dtype {tensor.dtype}, which has {math.prod(tensor.shape) * size}",
                path=str(self._folder),
            )
        step = PIECE_BYTES // size
        for begin in range(0, len(flat), step):
            count = min(step, len(flat) - begin)
            piece = self._piece[: count * size]
            self._fill(piece, tensor.file, tensor.start + (first + begin) * size)
            flat[begin : begin + count].copy_(piece.view(dtype))

    def read_box(
        self, tensor: StoredTensor | JoinedTensor, box: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return a box of a tensor, given as (start, stop) of each dimension, on the CPU.

        Only the elements of the box are read, each run of neighbours at once.

        Raises:
            ModelError: as `read`.
        """
        # The box of rows 1 to 3 and columns 0 to 2 of a tensor [4, 6] is two runs of 2 elements,
        # which begin at 6 and 12. With all 6 columns it is one run of 12, which begins at 6.
        sizes = [stop - start for start, stop in box]
        cut = [dim for dim, size in enumerate(tensor.shape) if sizes[dim] != size]
        runs = sizes[: cut[-1]] if cut else []
        values = torch.empty(sizes, dtype=DTYPES[tensor.dtype])
        flat = values.view(math.prod(runs), -1)
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(sizes))]
        start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
        for row, index in enumerate(product(*map(range, runs))):
            offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
            self.read(tensor, start + offset, flat[row])
        return values

    def _fill(self, piece: Tensor, file: str, position: int) -> None:
        """Read the bytes of a file from `position` on into `piece`."""
        if file not in self._files:
            opened = FileIO(self._folder / file)
            self._files[file] = self._stack.enter_context(opened)
        source, memory, done = self._files[file], piece.numpy().data, 0
        source.seek(position)
        while done < len(memory):
            count = source.readinto(memory[done:])  # the system may read less than it is asked for
            if not count:
                raise ModelError(
                    f"the model in {self._folder} cannot be loaded: {file} ends at byte "
                    f"{position + done}, and its header says that it has at least "
                    f"{position + len(memory)}",
                    path=str(self._folder),
                )
            done += count
