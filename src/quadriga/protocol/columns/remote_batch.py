"""`RemoteBatch`: stands in for a `TensorDict` while a tensor may lie elsewhere."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from tensordict import TensorDict

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.values import operations as values
from quadriga.protocol.values.decode import device_here

_ABSENT: Any = object()
_READING = frozenset(
    {
        *("apply", "chunk", "split", "unbind", "view", "reshape", "flatten", "unflatten"),
        *("unsqueeze", "squeeze", "permute", "transpose", "expand", "gather", "cpu", "cuda"),
        *("detach", "contiguous", "consolidate", "to_dict", "numpy", "bytes", "sum", "mean", "std"),
        *("float", "double", "half", "bfloat16", "int", "isnan", "isfinite", "all", "any"),
    }
)


class RemoteBatch:
    """Tensors by name that share their first dimension(s), as in a `TensorDict`.

    Reading a key fetches that tensor once and keeps it; setting one puts a local tensor in its
    place. Methods that only read (`apply`, `split`, `view`, …) fetch all tensors and work on
    `to_tensordict()`. Nothing else fetches.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        batch_size: torch.Size | tuple[int, ...] | list[int],
        device: torch.device | None = None,
    ) -> None:
        self.columns: dict[str, Any] = dict(fields)
        self.batch_size = torch.Size(batch_size)
        self.device = device

    def __copy__(self) -> RemoteBatch:
        return RemoteBatch(self.columns, self.batch_size, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteBatch:
        copied = {key: columns.private(column) for key, column in self.columns.items()}
        return RemoteBatch(copied, self.batch_size, self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        held = {key: columns.alone(key, column) for key, column in self.columns.items()}
        return _restore, (held, tuple(self.batch_size), self.device and self.device.type)

    @property
    def shape(self) -> torch.Size:
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        return len(self.batch_size)

    ndim = batch_dims

    def __len__(self) -> int:
        return self.batch_size[0]

    def keys(self) -> KeysView[str]:
        return self.columns.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.columns

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return self.to_tensordict()[index]
        if index not in self.columns:
            raise self._missing(index)
        found = self.columns[index]
        return found.read(index) if isinstance(found, columns.RemoteColumn) else found

    def get(self, key: str, default: Any = None) -> Any:
        """The tensor of this key, or `default`."""
        return self[key] if key in self.columns else default

    def peek(self, key: str) -> Any:
        """A copy to look at, fetched anew and not kept: the field stays where it lies, and what
        is written into the copy is not part of the batch."""
        found = self.columns.get(key, _ABSENT)
        if found is _ABSENT:
            raise self._missing(key)
        if columns.is_remote(found):
            return found.fresh().read(key)
        return values.clone(columns.local(found))

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor) and not hasattr(value, "batch_size"):
            raise FieldError(
                f"field '{key}' of a batch is a tensor; got {type(value).__name__}", field=key
            )
        if tuple(value.shape[: self.batch_dims]) != tuple(self.batch_size):
            raise LengthError(
                f"all fields of a batch have the same length: the batch has "
                f"{list(self.batch_size)}, '{key}' has {list(value.shape)}",
                field=key,
            )
        self.columns[key] = value

    def set(self, key: str, value: Any, **_: Any) -> RemoteBatch:
        self[key] = value
        return self

    def update(self, other: Mapping[str, Any]) -> RemoteBatch:
        for key in other.keys():  # noqa: SIM118
            self[key] = other[key]
        return self

    def setdefault(self, key: str, value: Any) -> Any:
        if key not in self.columns:
            self[key] = value
        return self[key]

    def __delitem__(self, key: str) -> None:
        if key not in self.columns:
            raise self._missing(key)
        del self.columns[key]

    def del_(self, key: str) -> RemoteBatch:
        del self[key]
        return self

    def pop(self, key: str, default: Any = _ABSENT) -> Any:
        """Removes a tensor and returns it (fetching it)."""
        if key not in self.columns and default is not _ABSENT:
            return default
        value = self[key]
        del self.columns[key]
        return value

    def select(self, *keys: str, strict: bool = True, **_: Any) -> RemoteBatch:
        """These keys only; the tensors are shared."""
        for key in keys:
            if strict and key not in self.columns:
                raise self._missing(key)
        picked = {key: self.columns[key] for key in keys if key in self.columns}
        return RemoteBatch(picked, self.batch_size, self.device)

    def exclude(self, *keys: str, **_: Any) -> RemoteBatch:
        return self.select(*(key for key in self.columns if key not in keys))

    def rename_key_(self, old: str | tuple[str, ...], new: str | tuple[str, ...]) -> RemoteBatch:
        names = dict(zip(*((k,) if isinstance(k, str) else k for k in (old, new)), strict=True))
        for key in names:
            if key not in self.columns:
                raise self._missing(key)
        self.columns = {names.get(key, key): value for key, value in self.columns.items()}
        return self

    def fetch(self, keys: Any = None) -> None:
        """Reads these tensors (all when None), waiting once."""
        wanted = self.columns if keys is None else keys
        remote = [
            (key, self.columns[key]) for key in wanted if columns.is_remote(self.columns[key])
        ]
        columns.fetch(remote)

    def items(self, *_: Any, **__: Any) -> ItemsView[str, Any]:
        return self._read_all().items()

    def values(self, *_: Any, **__: Any) -> ValuesView[Any]:
        return self._read_all().values()

    def _read_all(self) -> dict[str, Any]:
        self.fetch()
        return {key: columns.local(value) for key, value in self.columns.items()}

    def to_tensordict(self) -> TensorDict:
        """A real `TensorDict` over the same tensors; fetches all of them."""
        return values.as_tensordict(self._read_all(), self.batch_size, self.device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_tensordict().to(*args, **kwargs)

    def clone(self, recurse: bool = True) -> Any:
        return self.to_tensordict().clone(recurse)

    def is_empty(self) -> bool:
        return not self.columns

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tensordict())

    def __getattr__(self, name: str) -> Any:
        if name in _READING:
            return getattr(self.to_tensordict(), name)
        raise AttributeError(
            f"a batch whose tensors may lie elsewhere has no '{name}'; "
            "fetch them all with to_tensordict() and use it there"
        )

    def __repr__(self) -> str:
        lines = []
        for key, value in self.columns.items():
            if columns.is_remote(value):
                shape, dtype = value.spec.describe(len(value.rows))
                lines.append(f"{key}: {shape} {dtype}, elsewhere")
            else:
                lines.append(f"{key}: {values.describe(columns.local(value))}")
        return f"RemoteBatch(batch_size={list(self.batch_size)}, fields={{{'; '.join(lines)}}})"

    def _missing(self, key: str) -> FieldError:
        there = ", ".join(self.columns) or "nothing"
        return FieldError(f"no field '{key}' in batch; it holds: {there}", field=key)


def _restore(
    fields: dict[str, Any], batch_size: tuple[int, ...], device: str | None
) -> RemoteBatch:
    return RemoteBatch(fields, batch_size, None if device is None else device_here(device))
