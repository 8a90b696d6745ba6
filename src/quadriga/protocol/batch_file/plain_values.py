"""Values of Python and numpy without parts, as JSON: {"date": [2026, 1, 2]}.

`null`, `true`, `false`, texts, finite floats and integers of 64 bits are JSON themselves. Floats
that are not finite are written as their 8 bytes, so NaN keeps its payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from uuid import UUID, SafeUUID

import numpy as np

from quadriga.protocol.batch_file.dtypes import check_items, numpy_dtype, numpy_json
from quadriga.protocol.batch_file.limits import (
    Json,
    MalformedError,
    brief,
    expect_int,
    expect_list,
    expect_text,
)
from quadriga.protocol.values.field_spec import Array

MAX_FRACTION_BITS = 65_536
"""Reducing a fraction takes time that grows with the square of its length."""
_INT64 = 2**63


class UnsupportedError(ValueError):
    """A value that a batch file does not support; the text is its name."""


def is_json(value: object) -> bool:
    """Return whether a value is JSON and means itself."""
    kind = type(value)
    if kind is int:
        return -_INT64 <= value < _INT64  # type: ignore[operator]  # mypy does not narrow by `is`
    if kind is float:
        return math.isfinite(value)  # type: ignore[arg-type]  # as above
    return value is None or kind is bool or kind is str


def are_json(values: Iterable[object]) -> bool:
    """Return whether all values are JSON. Fast for long lists of token ids or texts."""
    kinds = set(map(type, values))
    if not kinds <= {int, float, bool, str, type(None)}:
        return False
    return not kinds & {int, float} or all(map(is_json, values))


def encode_plain(value: object) -> dict[str, Json] | None:
    """Return a value that is not JSON as an object with one key, its tag; None for other types."""
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        tag, function = encode
        return {tag: function(value)}
    if isinstance(value, np.dtype):
        return {"dtype": numpy_json(value)}
    return _encode_scalar(value) if isinstance(value, np.generic) else None


def _encode_float(value: float) -> Json:
    return value if math.isfinite(value) else struct.pack(">d", value).hex()


def _decode_float(raw: Json) -> float:
    if type(raw) is float:
        return raw
    found: float = struct.unpack(">d", _hex_bytes(raw, 8))[0]
    return found


def _hex_bytes(raw: Json, length: int | None = None) -> bytes:
    data = bytes.fromhex(expect_text(raw))
    if length is not None and len(data) != length:
        raise MalformedError(f"expected {length} bytes, got {len(data)}")
    return data


def _decode_int(raw: Json) -> int:
    return int(expect_text(raw), 16)


def _encode_complex(value: complex) -> Json:
    return [_encode_float(value.real), _encode_float(value.imag)]


def _decode_complex(raw: Json) -> complex:
    real, imag = expect_list(raw, 2)
    return complex(_decode_float(real), _decode_float(imag))


def _encode_range(value: range) -> Json:
    return [hex(value.start), hex(value.stop), hex(value.step)]


def _decode_range(raw: Json) -> range:
    return range(*map(_decode_int, expect_list(raw, 3)))


def _decode_decimal(raw: Json) -> Decimal:
    try:
        return Decimal(expect_text(raw))
    except InvalidOperation:
        raise MalformedError(f"no decimal number {brief(raw)}") from None


def _encode_fraction(value: Fraction) -> Json:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise UnsupportedError(f"a fraction of more than {MAX_FRACTION_BITS} bits")
    return [hex(value.numerator), hex(value.denominator)]


def _decode_fraction(raw: Json) -> Fraction:
    parts = [expect_text(part) for part in expect_list(raw, 2)]
    if max(map(len, parts)) > MAX_FRACTION_BITS // 4 + 3:
        raise MalformedError(f"a fraction of more than {MAX_FRACTION_BITS} bits")
    return Fraction(*(int(part, 16) for part in parts))


def _encode_uuid(value: UUID) -> Json:
    return [value.hex, value.is_safe.value]


def _decode_uuid(raw: Json) -> UUID:
    digits, safe = expect_list(raw, 2)
    return UUID(hex=expect_text(digits), is_safe=SafeUUID(safe))


def _encode_delta(value: timedelta) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _decode_delta(raw: Json) -> timedelta:
    days, seconds, micro = (expect_int(part, -(10**9), 10**9) for part in expect_list(raw, 3))
    return timedelta(days, seconds, micro)


def _encode_zone(value: tzinfo | None) -> Json:
    if value is None:
        return None
    if type(value) is not timezone:
        raise UnsupportedError(f"a date with a {type(value).__module__}.{type(value).__name__}")
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [_encode_delta(offset), None if timezone(offset).tzname(None) == name else name]


def _decode_zone(raw: Json) -> timezone | None:
    if raw is None:
        return None
    offset, name = expect_list(raw, 2)
    delta = _decode_delta(offset)
    return timezone(delta) if name is None else timezone(delta, expect_text(name))


def _encode_date(value: date) -> Json:
    return [value.year, value.month, value.day]


def _decode_date(raw: Json) -> date:
    year, month, day = (expect_int(part) for part in expect_list(raw, 3))
    return date(year, month, day)


def _encode_time(value: time | datetime) -> Json:
    zone = _encode_zone(value.tzinfo)
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, zone]


def _decode_time(raw: Json) -> time:
    *numbers, zone = expect_list(raw, 6)
    hour, minute, second, micro, fold = (expect_int(part) for part in numbers)
    return time(hour, minute, second, micro, _decode_zone(zone), fold=fold)


def _encode_datetime(value: datetime) -> Json:
    return [_encode_date(value), _encode_time(value)]


def _decode_datetime(raw: Json) -> datetime:
    day, clock = expect_list(raw, 2)
    return datetime.combine(_decode_date(day), _decode_time(clock))


def _encode_scalar(value: np.generic) -> dict[str, Json]:
    if isinstance(value, np.str_) and type(value) is np.str_:
        return {"numpy_str": "".join(value)}  # str(value) has no zeros at the end
    if isinstance(value, np.bytes_) and type(value) is np.bytes_:
        return {"numpy_bytes": bytes(value).hex()}
    if type(value) is not value.dtype.type:
        raise UnsupportedError(f"a {type(value).__module__}.{type(value).__qualname__}")
    return {"scalar": [numpy_json(value.dtype), value.tobytes().hex()]}


def _decode_scalar(raw: Json) -> object:
    kind, digits = expect_list(raw, 2)
    dtype = numpy_dtype(kind)
    data = bytearray(_hex_bytes(digits, dtype.itemsize))
    array: Array = np.frombuffer(data, dtype=np.uint8).view(dtype)
    check_items(array)
    found: object = array[0]
    return found


_ENCODERS: dict[type, tuple[str, Callable[..., Json]]] = {
    float: ("float", _encode_float),
    int: ("int", hex),
    complex: ("complex", _encode_complex),
    range: ("range", _encode_range),
    Decimal: ("decimal", str),
    Fraction: ("fraction", _encode_fraction),
    UUID: ("uuid", _encode_uuid),
    timedelta: ("timedelta", _encode_delta),
    timezone: ("timezone", _encode_zone),
    date: ("date", _encode_date),
    time: ("time", _encode_time),
    datetime: ("datetime", _encode_datetime),
}
PLAIN_DECODERS: dict[str, Callable[[Json], object]] = {
    "float": _decode_float,
    "int": _decode_int,
    "complex": _decode_complex,
    "range": _decode_range,
    "decimal": _decode_decimal,
    "fraction": _decode_fraction,
    "uuid": _decode_uuid,
    "timedelta": _decode_delta,
    "timezone": _decode_zone,
    "date": _decode_date,
    "time": _decode_time,
    "datetime": _decode_datetime,
    "numpy_str": lambda raw: np.str_(expect_text(raw)),
    "numpy_bytes": lambda raw: np.bytes_(_hex_bytes(raw)),
    "scalar": _decode_scalar,
    "dtype": numpy_dtype,
}
"""Tag → the function that decodes what is under it."""
