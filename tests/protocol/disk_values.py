"""Values that a batch file holds: an exact comparison, and strategies that draw them."""

from __future__ import annotations

import datetime
import decimal
import fractions
import struct
import uuid
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from tensordict import NonTensorStack, TensorDict

from quadriga.protocol.values import jagged


def identical(a: object, b: object) -> bool:
    """Return whether two values have equal types, dtypes, shapes, key orders and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _identical_tensors(a, b)
    if isinstance(a, np.ndarray | np.generic):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if isinstance(a, np.str_ | np.bytes_):  # numpy's own bytes lack zeros at the end
            return [*a] == [*b]
        if a.dtype == object:
            return all(map(identical, a.ravel().tolist(), b.ravel().tolist()))
        return a.tobytes() == b.tobytes()
    if isinstance(a, TensorDict):
        alike = a.batch_size == b.batch_size and a.device == b.device and a.names == b.names
        return alike and identical(dict(a.items()), dict(b.items()))
    if isinstance(a, NonTensorStack):
        return identical(a.tolist(), b.tolist())
    return _identical_plain(a, b)


def _identical_plain(a, b) -> bool:
    if isinstance(a, Mapping):
        return identical([*a.keys()], [*b.keys()]) and identical([*a.values()], [*b.values()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(identical(x, y) for y in b) for x in a)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, slice):
        return identical((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, Image.Image):
        return a.__getstate__() == b.__getstate__()
    if isinstance(a, int | decimal.Decimal):
        return _comparable(a) == _comparable(b)
    return a == b and repr(a) == repr(b)


def _comparable(number: int | decimal.Decimal) -> object:
    """Return a number in a form without a limit of digits; a signaling NaN equals nothing."""
    return number.as_tuple() if isinstance(number, decimal.Decimal) else hex(number)


def _identical_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        (values_a, ends_a), (values_b, ends_b) = jagged.parts(a), jagged.parts(b)
        alike = a.is_nested and b.is_nested and jagged.ragged_dim(a) == jagged.ragged_dim(b)
        return alike and identical(values_a, values_b) and ends_a.tolist() == ends_b.tolist()
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return _bits(a) == _bits(b)


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


ZONES = st.none() | st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)),
) | st.just(datetime.timezone(datetime.timedelta(hours=1), "CET"))  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    TEXTS,
    st.binary(max_size=8),
    st.complex_numbers(),
    st.dates(),
    st.times(timezones=ZONES),
    st.datetimes(timezones=ZONES),
    st.timedeltas(),
    st.decimals().filter(lambda number: not number.is_snan()),  # has no hash
    st.fractions(),
    st.uuids(),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.datetime64, st.integers(-(2**62), 2**62), st.sampled_from(["ns", "25s", "D"])),
    st.builds(np.str_, TEXTS),
    st.sampled_from([range(0, 9, 2), ~datetime.datetime.max.toordinal(), 10**40, -0.0]),
)
DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64,
    torch.uint16, torch.float4_e2m1fn_x2,
]  # fmt: skip


@st.composite
def tensors(draw) -> torch.Tensor:
    """Random bytes as a tensor of up to three dimensions; booleans are 0 and 1."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    data = torch.frombuffer(bytearray(draw(st.binary(min_size=size + 1, max_size=size + 1))),
                            dtype=torch.uint8)[:size].clone()  # fmt: skip
    return (data % 2 if dtype == torch.bool else data).view(dtype).reshape(shape)


NUMPY_ARRAYS = arrays.arrays(
    st.one_of(
        arrays.scalar_dtypes().filter(lambda dtype: dtype.itemsize and dtype.char not in "gG"),
        arrays.array_dtypes(
            st.sampled_from(["<f4", ">i2", "|b1", "<U2", "|S3", "<M8[us]"]).map(np.dtype),
            allow_subarrays=True, min_size=1, max_size=3,
        ),
    ),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)  # fmt: skip
LEAVES = HASHABLE | tensors() | NUMPY_ARRAYS | st.builds(bytearray, st.binary(max_size=8))
KEYS = st.recursive(
    HASHABLE, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=4
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXTS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(TEXTS, inner, max_size=3).map(OrderedDict),
        st.sets(KEYS, max_size=3),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


def one_of_each() -> dict[str, object]:
    """One value of every type, and the special values of numbers."""
    zone = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
    structure = np.dtype(
        [("id", "<i4"), ("score", ">f8", (2,)), ("name", "U3"), ("ok", "?")], align=True
    )
    return {
        "none": None, "true": True, "int": 7, "large": 2**63, "larger": -(10**5000),
        "int64": -(2**63), "float": 0.1, "negative zero": -0.0, "nan": float("nan"),
        "nan payload": struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0], "inf": float("-inf"),
        "tiny": 5e-324, "complex": complex("nan-infj"), "text": "ü\0\n\"\\\u2028😀",
        "surrogates": "\ud83d\ude00 \udfff", "bytes": b"\0\xff", "no bytes": b"",
        "bytearray": bytearray(b"ab"), "range": range(10**20, 0, -3), "slice": slice(None, 3, -1),
        "set": {1, "a", (2,)}, "frozenset": frozenset({b"x"}), "tuple": (1, [2, ()]), "list": [],
        "dict": {"b": 1, "a": {}}, "keys": {1: 2, None: 3, (1, 2): 4, 2.5: 5, b"": 6, "": 7},
        "ordered": OrderedDict([("z", 1), (0, 2)]), "tags": {"tuple": [1], "tensor": None},
        "date": datetime.date.min, "time": datetime.time(1, 2, 3, 4, zone, fold=1),
        "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
        "fold": datetime.datetime(2026, 10, 25, 2, 30, fold=1), "delta": datetime.timedelta.min,
        "zone": zone, "decimal": decimal.Decimal("-0E-400"), "signal": decimal.Decimal("sNaN123"),
        "fraction": fractions.Fraction(-(10**40), 3), "uuid": uuid.UUID(int=5),
        "uuid1": uuid.UUID(int=6, is_safe=uuid.SafeUUID.unsafe),
        "numpy bool": np.bool_(True), "numpy float": np.float64("nan"), "numpy half": np.float16(1),
        "numpy text": np.str_("é\0"), "numpy bytes": np.bytes_(b"a\0"), "empty": np.str_(""),
        "numpy date": np.datetime64("NaT", "ns"), "numpy void": np.void(b"\1\2"),
        "big-endian": np.array([1], ">f4")[0], "dtype": np.dtype(">i4"),
        "structure": np.zeros(2, structure), "structured item": np.ones(1, structure)[0],
        "no dimensions": np.array(1.5), "no items": np.empty((0, 4), "<U7"),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "steps": np.arange(9)[::-3],
        "objects": np.array([[1, None], ["x", (2,)]], dtype=object),
        "one object": np.array({"a": 1}, dtype=object), "text array": np.array(["ab", "c"]),
        "tensor": torch.arange(6).reshape(2, 3).t(), "no tensor items": torch.empty(0, 3).half(),
        "tensor without dimensions": torch.tensor(True),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.zeros(0)], layout=torch.jagged),
        "tensordict": TensorDict(
            {"a": torch.ones(2, 1), "n": TensorDict({"s": NonTensorStack("x", "y")}, [2])}, [2],
            names=["rows"],
        ),
        "tensordict without rows": TensorDict({"k": torch.ones(2)}, [], device="cpu"),
    }  # fmt: skip
