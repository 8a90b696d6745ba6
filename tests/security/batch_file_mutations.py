"""Random changes of valid batch files, and one checked load within limits of time and memory.

Most changes are made to the structure, the header or the bytes of rows, with the digest computed
again, so that they reach the decoders.
"""

from __future__ import annotations

import json
import resource
import signal
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from batch_file_parts import Parts, signed
from hypothesis import strategies as st

from quadriga.errors import DataError
from quadriga.protocol import DataProto

Draw = Callable[[st.SearchStrategy], object]

MORE_MEMORY = 256 << 20
"""Bytes that the process may allocate beyond those that it has."""
SECONDS = 20
"""The deadline of one load."""
BYTES_PER_BYTE, FIXED_BYTES = 64, 3 << 20
"""Memory of Python and numpy for a load: per byte of the file, and for any file."""

NUMBERS = [0, 1, -1, 2, 7, 64, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63),
           10**30, 0.5, 1e308]  # fmt: skip
TEXTS = ["", "x", "cpu", "cuda", "os", "|O", "O", "<U9", "|V999999999", "<M8[0s]", "float64",
         "bool", "uint8", "complex32", "float4_e2m1fn_x2", "|b1", ">f8", "0 x", "structure",
         "nested", "1e9", "0x" + "f" * 400, "RGB", "P", "1", "Image", "\ud800"]  # fmt: skip
TAGS = ["tuple", "set", "frozenset", "slice", "dict", "pairs", "ordered", "bytes", "bytearray",
        "tensor", "jagged", "array", "objects", "stack", "tensordict", "image", "float", "int",
        "complex", "range", "decimal", "fraction", "uuid", "timedelta", "timezone", "date", "time",
        "datetime", "numpy_str", "numpy_bytes", "scalar", "dtype"]  # fmt: skip


def mutate(draw: Draw, base: bytes) -> bytes:
    """Return a changed file."""
    change = draw(st.sampled_from([_raw, _signed, _structure, _structure, _structure, _text,
                                   _header, _nested, _fields]))  # fmt: skip
    return change(draw, base)


def _raw(draw: Draw, base: bytes) -> bytes:
    return _bytes(draw, base)


def _signed(draw: Draw, base: bytes) -> bytes:
    return signed(_bytes(draw, base[:-32]) + bytes(32))


def _structure(draw: Draw, base: bytes) -> bytes:
    parts = Parts.of(base)
    for _ in range(draw(st.integers(1, 4))):
        parts.structure = _json(draw, parts.structure)
    return parts.content()


def _text(draw: Draw, base: bytes) -> bytes:
    parts = Parts.of(base)
    return parts.content(structure=_bytes(draw, json.dumps(parts.structure).encode()))


def _header(draw: Draw, base: bytes) -> bytes:
    parts = Parts.of(base)
    structure = json.dumps(parts.structure).encode()
    header = parts.header(structure)
    if draw(st.booleans()):
        header = _json(draw, header)
    text = json.dumps(header).encode()
    return parts.content(structure, _bytes(draw, text) if draw(st.booleans()) else text)


def _nested(draw: Draw, base: bytes) -> bytes:
    parts = Parts.of(base)
    parts.nested = _bytes(draw, parts.nested)
    return parts.content()


def _fields(draw: Draw, base: bytes) -> bytes:
    """Exchange, repeat or leave out entries, or change their bytes, dtypes and shapes."""
    parts = Parts.of(base)
    if not parts.fields:
        return _structure(draw, base)
    at = draw(st.integers(0, len(parts.fields) - 1))
    name, dtype, shape, data = parts.fields[at]
    other = draw(st.sampled_from(parts.fields))
    parts.fields[at] = draw(st.sampled_from([
        (name, dtype, shape, bytes(255 - byte for byte in data)),
        (name, *other[1:]), (other[0], dtype, shape, data), ("more", dtype, shape, data),
        (name, "U8", [len(data)], data), (name, dtype, shape[::-1], data),
    ]))  # fmt: skip
    return parts.content()


def _bytes(draw: Draw, data: bytes) -> bytes:
    """Cut, grow, flip, repeat, zero or exchange ranges of bytes."""
    for _ in range(draw(st.integers(1, 3))):
        a, b, c = sorted(draw(st.integers(0, len(data))) for _ in range(3))
        data = draw(st.sampled_from([
            data[:a], data[:a] + data[b:], data + data[a:b], data[:a] + bytes(b - a) + data[b:],
            data[:a] + data[b:c] + data[a:b] + data[c:], data[:b] + data[a:b] + data[b:],
            data[:a] + bytes(255 - byte for byte in data[a : a + 1]) + data[a + 1 :],
            data[:a] + draw(st.binary(max_size=8)) + data[a:],
        ]))  # fmt: skip
    return data


def _places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value within a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from _places(item, (*path, key))


def _at(value, path: tuple):
    for key in path:
        value = value[key]
    return value


def _json(draw: Draw, value: object) -> object:
    """Replace one value within a JSON value, or repeat, remove or wrap it."""
    places = list(_places(value))
    path = draw(st.sampled_from(places))
    old = _at(value, path)
    depth = draw(st.integers(1, 200))
    nested: object = old
    for _ in range(depth):
        nested = [nested] if depth % 2 else {"tuple": [nested]}
    new = draw(st.one_of(
        st.sampled_from([None, True, [], {}, [old], {"dict": old}, nested, *NUMBERS, *TEXTS]),
        st.sampled_from(places).map(lambda other: _at(value, other)),
        st.sampled_from(TAGS).map(lambda tag: {tag: next(iter(old.values()))}
                                  if isinstance(old, dict) and old else {tag: old}),
        st.integers(0, 3).map(lambda n: old * n if isinstance(old, list | str) else n),
        st.just(old[::-1] if isinstance(old, list | str) else old),
    ))  # fmt: skip
    return _replaced(value, path, new)


def _replaced(value, path: tuple, new: object):
    """Return a copy with another value at a path. Values are shared: JSON is written as a tree."""
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copied


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let the process allocate `MORE_MEMORY` bytes: a larger allocation fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_late(number: int, frame: object) -> None:
    raise TimeoutError(f"a load took more than {SECONDS} s")


def _measured_load(path: Path) -> tuple[DataProto | None, str, int]:
    """Return the batch or None, "loaded" or the message, and the bytes that were allocated."""
    before = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(SECONDS)
    tracemalloc.start()
    try:
        # The limit holds for one load. Over many loads the process grows by what the tools of the
        # test keep.
        with memory_limit():
            return DataProto.load_from_disk(path), "loaded", tracemalloc.get_traced_memory()[1]
    except DataError as error:
        return None, str(error), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load_checked(path: Path, content: bytes, outcomes: Counter[str]) -> None:
    """Load a file: a batch that can be saved and loaded again, or a `DataError` of one line."""
    path.write_bytes(content)
    most = FIXED_BYTES + BYTES_PER_BYTE * len(content)
    data, outcome, peak = _measured_load(path)
    if peak > most:  # the first load with some value also imports the module of its type
        data, outcome, peak = _measured_load(path)
    assert peak <= most, f"{peak} bytes for {len(content)}"
    if data is None:
        assert str(path) in outcome and len(outcome) < 1000, outcome
        assert outcome.isprintable(), ascii(outcome)
        reason = outcome.replace(str(path), "").removeprefix(" is damaged: ")
        outcomes["".join(" " if char.isdigit() else char for char in reason)[:30]] += 1
        return
    outcomes[outcome] += 1
    data.check_consistency()
    data.save_to_disk(path)
    again = DataProto.load_from_disk(path)
    assert len(again) == len(data) and len(again.meta_info) == len(data.meta_info)
    assert list(again.non_tensor_batch) == list(data.non_tensor_batch)
