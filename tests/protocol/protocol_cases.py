"""Batches and values for several test files."""

import itertools
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from PIL import Image

from quadriga.protocol import DataProto, Origin
from quadriga.protocol.boundary import pack_result, unpack_result
from quadriga.protocol.storage import InProcessStore, LocalHandle
from quadriga.protocol.tensordicts import TensorDict
from quadriga.protocol.threads import PendingValue
from quadriga.protocol.values import build_jagged, object_array, same


class CountedStore(InProcessStore):
    """A store that knows which of its values exist."""

    def __init__(self) -> None:
        self.handles: WeakSet[LocalHandle] = WeakSet()

    def put(self, value: object, nbytes: int = 0) -> LocalHandle:
        handle = super().put(value, nbytes)
        self.handles.add(handle)
        return handle


def shard(data: DataProto, ranks: int, method: str = "make") -> DataProto:
    """Return the same batch as the joined results of `ranks` ranks with nearly equal parts."""
    n = len(data)
    cuts = [n * r // ranks for r in range(ranks + 1)]
    results = [
        unpack_result(pack_result(data[a:b], Origin("actor", r, method, "10.0.0.1")))
        for r, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    return DataProto.concat(results)


def rows_of(data: DataProto) -> list[dict[str, Any]]:
    """Return the batch as plain rows: key to number, list or object."""
    columns: dict[str, list[Any]] = {}
    for key in [] if data.batch is None else data.batch.keys():
        value = data.batch[key]
        columns[key] = [r.tolist() for r in value.unbind()] if value.is_nested else value.tolist()
    for key, value in data.non_tensor_batch.items():
        columns[key] = list(value)
    return [{k: columns[k][i] for k in columns} for i in range(len(data))]


class Done(PendingValue):
    """A pending result that exists, and counts how often it is waited for."""

    def __init__(self, value: Any) -> None:
        self.value, self.waits = value, 0

    def result(self) -> Any:
        self.waits += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def six() -> DataProto:
    """x = 0..5, xy = rows [i, 10 i], rag = row i of length i, s = "a".."f"."""
    ragged = torch.cat([torch.full((i,), float(i)) for i in range(6)])
    return DataProto.from_dict(
        {
            "x": torch.arange(6),
            "xy": torch.stack([torch.arange(6.0), 10 * torch.arange(6.0)], dim=1),
            "rag": build_jagged(ragged, torch.tensor([0, 0, 1, 3, 6, 10, 15])),
        },
        {"s": list("abcdef"), "half": np.arange(6) / 2},
        {"temperature": 0.7},
    )


def rows_of_six(data: DataProto) -> list[int]:
    """Return which of the rows of `six` a batch has, after a check that all fields agree."""
    x = data.batch["x"].tolist()
    assert data.batch["xy"].tolist() == [[float(i), 10.0 * i] for i in x]
    assert [r.tolist() for r in data.batch["rag"].unbind()] == [[float(i)] * i for i in x]
    assert list(data.non_tensor_batch["s"]) == ["abcdef"[i] for i in x]
    assert data.non_tensor_batch["half"].tolist() == [i / 2 for i in x]
    assert len(data) == len(x)
    return x


JAGGED = torch.jagged


def ragged(*rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(rows), layout=JAGGED)


TENSORS = {
    "float32": torch.randn(4, 3),
    "float64": torch.randn(4, 3, dtype=torch.float64),
    "float16": torch.randn(4).half(),
    "bfloat16": torch.randn(4, 2, 5).bfloat16(),
    "float8": torch.randn(4, 3).to(torch.float8_e4m3fn),
    "uint16": torch.tensor([1, 2, 3, 65535], dtype=torch.uint16),
    "int64": torch.randint(-9, 9, (4,)),
    "int8": torch.randint(-9, 9, (4, 2), dtype=torch.int8),
    "bool": torch.tensor([True, False, True, False]),
    "complex conjugated": torch.randn(4, 2, dtype=torch.complex128).conj(),
    "not contiguous": torch.randn(3, 4).t(),
    "expanded": torch.randn(4, 1).expand(4, 6),
    "no columns": torch.empty(4, 0, 3),
    "bfloat16 without columns": torch.empty(4, 0).bfloat16(),
    "nan and infinity": torch.tensor([float("nan"), float("inf"), -0.0, 1.0]),
    "jagged": ragged(torch.ones(2), torch.zeros(0), torch.arange(3.0), torch.ones(1)),
    "jagged bfloat16 with width": ragged(*(torch.randn(i, 2).bfloat16() for i in (1, 3, 2, 1))),
    "jagged all empty": ragged(*(torch.zeros(0) for _ in range(4))),
    "ragged in the last dimension": ragged(*(torch.ones(3, t) * t for t in (2, 0, 3, 1))),
    "jagged with holes": torch.nested.narrow(
        torch.arange(20).view(4, 5), 1, torch.tensor([0, 1, 2, 0]), torch.tensor([3, 2, 1, 5]),
        layout=JAGGED,
    ),
    "nested dict": TensorDict(
        {"a": torch.ones(4, 2), "b": TensorDict({"c": torch.arange(4)}, [4])}, [4]
    ),
}  # fmt: skip


class Weird:
    def __eq__(self, other):
        return isinstance(other, Weird)

    __hash__ = None


ARRAYS = {
    "strings": np.array(["a", "", "ü" * 50, "d"], dtype=object),
    "dicts": np.array([{"a": [1, {2}]}, {}, {"n": None}, {"t": (1, 2)}], dtype=object),
    "mixed": np.array([1, None, "x", 2.5], dtype=object),
    "arrays": object_array([np.arange(i) for i in range(4)]),
    "pictures": object_array([Image.new(mode, (4, 4), 7) for mode in ("RGB", "P", "L", "RGBA")]),
    "tensors": object_array([torch.randn(2), torch.ones(1).bfloat16(), torch.tensor(1), 0]),
    "numbers": np.arange(8.0).reshape(4, 2),
    "fixed strings": np.array(["ab", "c", "", "d"]),
    "two dimensions": np.array([[{"k": i}, i] for i in range(4)], dtype=object),
    "script classes": object_array([Weird() for _ in range(4)]),
}


def same_value(a, b) -> bool:
    """Return whether values are deeply equal, float8 included."""
    if isinstance(a, torch.Tensor) and not a.is_nested and a.dtype == torch.float8_e4m3fn:
        return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return same(a, b)
