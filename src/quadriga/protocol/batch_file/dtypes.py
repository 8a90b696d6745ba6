"""The dtypes that a batch file can hold, as JSON and as dtypes of safetensors.

A dtype that safetensors lacks is stored with a further dimension: complex64 [4] as F32 [4, 2], and
"<U3" [4] as U8 [4, 12]. The structure of the file has the true dtype.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quadriga.protocol.batch_file.limits import (
    MAX_DEPTH,
    Json,
    MalformedError,
    brief,
    checked_shape,
    expect_int,
    expect_list,
    expect_object,
    expect_text,
)
from quadriga.protocol.values.field_spec import Array


class Stored(NamedTuple):
    """How items are stored: the dtype of safetensors, and further dimensions of one item."""

    dtype: str
    tail: tuple[int, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of one item of the tensor or array."""
        size = ITEM_BYTES[self.dtype]
        for dim in self.tail:
            size *= dim
        return size


ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
"""Dtypes of safetensors that a batch file uses, and their size in bytes."""

TORCH_DTYPES: dict[str, Stored] = {
    "float64": Stored("F64"),
    "float32": Stored("F32"),
    "float16": Stored("F16"),
    "bfloat16": Stored("BF16"),
    "float8_e4m3fn": Stored("F8_E4M3"),
    "float8_e5m2": Stored("F8_E5M2"),
    "float8_e4m3fnuz": Stored("U8"),
    "float8_e5m2fnuz": Stored("U8"),
    "float8_e8m0fnu": Stored("U8"),
    "float4_e2m1fn_x2": Stored("U8"),
    "bool": Stored("BOOL"),
    "int64": Stored("I64"),
    "int32": Stored("I32"),
    "int16": Stored("I16"),
    "int8": Stored("I8"),
    "uint64": Stored("U64"),
    "uint32": Stored("U32"),
    "uint16": Stored("U16"),
    "uint8": Stored("U8"),
    "complex128": Stored("F64", (2,)),
    "complex64": Stored("F32", (2,)),
    "complex32": Stored("F16", (2,)),
}
"""Name of a dtype in torch → how its items are stored."""

_NUMPY_STORED = {
    "<f8": Stored("F64"), "<f4": Stored("F32"), "<f2": Stored("F16"), "|b1": Stored("BOOL"),
    "<i8": Stored("I64"), "<i4": Stored("I32"), "<i2": Stored("I16"), "|i1": Stored("I8"),
    "<u8": Stored("U64"), "<u4": Stored("U32"), "<u2": Stored("U16"), "|u1": Stored("U8"),
    "<c16": Stored("F64", (2,)), "<c8": Stored("F32", (2,)),
}  # fmt: skip
_NUMPY_TEXT = re.compile(
    r"\|[bui]1|[<>][iuf][248]|[<>]c(8|16)|[<>]f2|\|[SV][1-9]\d{0,8}|[<>]U[1-9]\d{0,8}"
    r"|[<>][mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
"""Never an object, a pointer, or `longdouble`, whose bytes differ between processors."""


def torch_dtype(raw: Json) -> tuple[torch.dtype, Stored]:
    """Return the dtype of a name in `TORCH_DTYPES`, and how it is stored."""
    name = expect_text(raw)
    found = getattr(torch, name, None) if name in TORCH_DTYPES else None
    if not isinstance(found, torch.dtype):
        raise MalformedError(f"no dtype {brief(raw)} in this version of torch")
    return found, TORCH_DTYPES[name]


def numpy_stored(dtype: np.dtype[np.generic]) -> Stored:
    """Return how items of a numpy dtype are stored."""
    return _NUMPY_STORED.get(dtype.str, Stored("U8", (dtype.itemsize,)))


def numpy_json(dtype: np.dtype[np.generic]) -> Json:
    """Return a numpy dtype as JSON. Raises `MalformedError` for one that a file cannot hold.

    "<f4" for float32; the fields of a structure as [name, dtype, shape, offset, title].
    """
    if dtype.fields is None:
        raw: Json = dtype.str
    else:
        fields: list[Json] = []
        for name in dtype.names or ():
            part, offset, *title = dtype.fields[name]
            base, shape = part.subdtype or (part, ())
            fields.append([name, numpy_json(base), list(shape), offset, *title])
        raw = {"fields": fields, "size": dtype.itemsize, "aligned": dtype.isalignedstruct}
    try:
        read = numpy_dtype(raw)
        # Equal dtypes may differ in the type of their items: records have attributes, voids not.
        same = read == dtype and read.type is dtype.type and dtype.metadata is None
    except (ValueError, TypeError):
        same = False
    if not same:
        raise MalformedError(f"the dtype {dtype!r}")
    return raw


def numpy_dtype(raw: Json, depth: int = 0) -> np.dtype[np.generic]:
    """Return the numpy dtype of `numpy_json`."""
    if depth > MAX_DEPTH:
        raise MalformedError("a dtype is nested too deeply")
    if isinstance(raw, str):
        if not _NUMPY_TEXT.fullmatch(raw):
            raise MalformedError(f"no numpy dtype {brief(raw)} in a batch file")
        return np.dtype(raw)
    fields, raw_size, aligned = expect_object(raw, "fields", "size", "aligned")
    size = expect_int(raw_size, low=1, high=2**31 - 1)
    names: list[str] = []
    formats: list[np.dtype[np.generic]] = []
    offsets: list[int] = []
    titles: list[str | None] = []
    for field in expect_list(fields):
        name, base, shape, offset, *title = expect_list(field)
        inner = numpy_dtype(base, depth + 1)
        names.append(expect_text(name))
        dims = checked_shape([expect_int(dim) for dim in expect_list(shape)], inner.itemsize)
        formats.append(np.dtype((inner, dims)) if dims else inner)
        # numpy adds the two as C integers: 2**31 - 1 + 1 is negative, hence within the structure
        # for its own check, and reading the field would read other memory.
        if formats[-1].itemsize > size:
            raise MalformedError(
                f"a field of {formats[-1].itemsize} bytes in a structure of {size}"
            )
        offsets.append(expect_int(offset, high=size - formats[-1].itemsize))
        titles.append(expect_text(title[0]) if title else None)
    # Fields that overlap would make the checks of their items take more time than the file is long.
    if sum(part.itemsize for part in formats) > size:
        raise MalformedError("the fields of a structure overlap")
    made: np.dtype[np.generic] = np.dtype(
        {
            "names": names,
            "formats": formats,
            "offsets": offsets,
            "titles": titles,
            "itemsize": size,
        },
        align=aligned is True,
    )
    return made


def check_items(value: Array) -> None:
    """Refuse items that no operation writes and that C code does not expect.

    A boolean is the byte 0 or 1, and a character of a text is a code point of Unicode.
    """
    if value.dtype.names is not None:
        parts: dict[str, Array] = {name: value[name] for name in value.dtype.names}  # type: ignore[call-overload]  # numpy's types lack structures
        for part in parts.values():
            check_items(part)
    elif value.dtype.kind == "b" and value.size:
        if int(np.ascontiguousarray(value).view(np.uint8).max()) > 1:
            raise MalformedError("a boolean that is neither 0 nor 1")
    elif value.dtype.kind == "U" and value.size:
        code_points = np.ascontiguousarray(value).reshape(-1).view(f"{value.dtype.str[0]}u4")
        if int(code_points.max()) > 0x10FFFF:
            raise MalformedError("a text with a character outside Unicode")


def check_booleans(value: Tensor) -> None:
    """Do the same for a tensor."""
    if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
        raise MalformedError("a boolean that is neither 0 nor 1")
