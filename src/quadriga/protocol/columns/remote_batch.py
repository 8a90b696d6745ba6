"""The two halves of a batch while some of its fields are remote.

`RemoteBatch` stands for a `TensorDict`, `RemoteArrays` for a dict of numpy arrays. Reading a field
fetches it.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns.column import Column, Columns, is_remote, local_value
from quadriga.protocol.values import operations
from quadriga.protocol.values.decode import current_device
from quadriga.protocol.values.field_spec import Array, LocalValue

Tensors = torch.Tensor | TensorDictBase
Entry: TypeAlias = torch.Tensor | Any
"""A tensor, or a nested `TensorDict` where the caller knows that the field is one."""
_ABSENT = object()
_READ_METHODS = frozenset(
    {
        *("to", "clone"),
        *("apply", "chunk", "split", "unbind", "view", "reshape", "flatten", "unflatten"),
        *("unsqueeze", "squeeze", "permute", "transpose", "expand", "gather", "cpu", "cuda"),
        *("detach", "contiguous", "consolidate", "to_dict", "numpy", "bytes", "sum", "mean", "std"),
        *("float", "double", "half", "bfloat16", "int", "isnan", "isfinite", "all", "any"),
    }
)
"""Methods of `TensorDict` that do not change it: called on `to_tensordict()`."""


def _fetch(held: Columns, keys: Iterable[str] | None) -> None:
    wanted = held if keys is None else keys
    columns.fetch([(key, c) for key in wanted if is_remote(c := held[key])])


class RemoteBatch:
    """Named tensors that share their first dimension(s), as in a `TensorDict`.

    Reading a key fetches that tensor once and keeps it. Setting a key replaces the tensor by a
    local one. Methods that only read (`apply`, `split`, `view`, …) fetch all tensors and call the
    method of `to_tensordict()`. Nothing else fetches.
    """

    def __init__(
        self,
        fields: Columns,
        batch_size: torch.Size | tuple[int, ...] | list[int],
        device: torch.device | None = None,
    ) -> None:
        self.columns: dict[str, Column] = dict(fields)
        self.batch_size = torch.Size(batch_size)
        self.device = device

    def __copy__(self) -> RemoteBatch:
        return RemoteBatch(self.columns, self.batch_size, self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteBatch:
        copied = {key: columns.private(column) for key, column in self.columns.items()}
        return RemoteBatch(copied, self.batch_size, self.device)

    def __reduce__(self) -> tuple[object, ...]:
        held = {key: columns.for_pickle(key, column) for key, column in self.columns.items()}
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

    def __getitem__(self, index: Any) -> Entry:
        """Return the tensor of a key. Other indices are those of `to_tensordict()`."""
        if not isinstance(index, str):
            return self.to_tensordict()[index]
        if index not in self.columns:
            raise self._missing(index)
        return columns.read(self.columns[index], index)

    def get(self, key: str, default: object = None) -> Entry:
        """Return the tensor of this key, or `default`."""
        return self[key] if key in self.columns else default

    def peek(self, key: str) -> Entry:
        """Return a copy of a tensor without keeping it: the field stays remote.

        What is written into the copy is not part of the batch.
        """
        if key not in self.columns:
            raise self._missing(key)
        column = self.columns[key]
        if is_remote(column):
            return column.unread().read(key)
        return operations.clone(local_value(column))

    def __setitem__(self, key: str, value: Tensors) -> None:
        if not isinstance(value, torch.Tensor) and not hasattr(value, "batch_size"):
            raise FieldError(
                f"field '{key}' of a batch: expected a tensor, got {type(value).__name__}",
                field=key,
            )
        if tuple(value.shape[: self.batch_dims]) != tuple(self.batch_size):
            raise LengthError(
                f"all fields of a batch have the same length: the batch has "
                f"{list(self.batch_size)}, '{key}' has {list(value.shape)}",
                field=key,
            )
        self.columns[key] = value

    def set(self, key: str, value: Tensors, **_: object) -> RemoteBatch:
        self[key] = value
        return self

    def update(self, other: Mapping[str, Tensors]) -> RemoteBatch:
        for key in other.keys():  # noqa: SIM118  # iterating a TensorDict gives its rows
            self[key] = other[key]
        return self

    def setdefault(self, key: str, value: Tensors) -> Entry:
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

    def pop(self, key: str, default: object = _ABSENT) -> Entry:
        """Remove a tensor and return it; fetches it."""
        if key not in self.columns and default is not _ABSENT:
            return default
        value = self[key]
        del self.columns[key]
        return value

    def select(self, *keys: str, strict: bool = True, **_: object) -> RemoteBatch:
        """Return a batch of these keys. The tensors are shared."""
        for key in keys:
            if strict and key not in self.columns:
                raise self._missing(key)
        picked = {key: self.columns[key] for key in keys if key in self.columns}
        return RemoteBatch(picked, self.batch_size, self.device)

    def exclude(self, *keys: str, **_: object) -> RemoteBatch:
        return self.select(*(key for key in self.columns if key not in keys))

    def rename_key_(self, old: str | tuple[str, ...], new: str | tuple[str, ...]) -> RemoteBatch:
        names = dict(zip(*((k,) if isinstance(k, str) else k for k in (old, new)), strict=True))
        for key in names:
            if key not in self.columns:
                raise self._missing(key)
        self.columns = {names.get(key, key): value for key, value in self.columns.items()}
        return self

    def fetch(self, keys: Iterable[str] | None = None) -> None:
        """Read these tensors (all if None), waiting once."""
        _fetch(self.columns, keys)

    def items(self, *_: object, **__: object) -> ItemsView[str, Entry]:
        return self._read_all().items()

    def values(self, *_: object, **__: object) -> ValuesView[Entry]:
        return self._read_all().values()

    def _read_all(self) -> dict[str, LocalValue]:
        self.fetch()
        return {key: local_value(column) for key, column in self.columns.items()}

    def to_tensordict(self) -> TensorDict:
        """Return a real `TensorDict` of the same tensors; fetches all of them."""
        return operations.as_tensordict(self._read_all(), self.batch_size, self.device)

    def is_empty(self) -> bool:
        return not self.columns

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.to_tensordict())

    def __getattr__(self, name: str) -> Any:
        if name in _READ_METHODS:
            return getattr(self.to_tensordict(), name)
        raise AttributeError(
            f"a batch with remote tensors has no attribute '{name}'; fetch all tensors with "
            "to_tensordict() and use the attribute of the result"
        )

    def __repr__(self) -> str:
        lines = []
        for key, column in self.columns.items():
            if is_remote(column):
                shape, dtype = column.spec.describe(len(column.row_map))
                lines.append(f"{key}: {shape} {dtype}, remote")
            else:
                lines.append(f"{key}: {operations.describe(local_value(column))}")
        return f"RemoteBatch(batch_size={list(self.batch_size)}, fields={{{'; '.join(lines)}}})"

    def _missing(self, key: str) -> FieldError:
        known = ", ".join(self.columns) or "nothing"
        return FieldError(f"no field '{key}' in batch; it has: {known}", field=key)


def _restore(fields: Columns, batch_size: tuple[int, ...], device: str | None) -> RemoteBatch:
    return RemoteBatch(fields, batch_size, None if device is None else current_device(device))


def as_array(value: LocalValue) -> Array:
    """Return a value that is known to be an array."""
    assert isinstance(value, np.ndarray), type(value)
    return value


class RemoteArrays(dict[str, Array]):
    """A dict of numpy arrays. Entries may be `RemoteColumn`s, which reading replaces by arrays."""

    def __init__(self, fields: Columns | Iterable[tuple[str, Column]] = ()) -> None:
        super().__init__(fields)  # type: ignore[arg-type]  # reading gives arrays only

    @property
    def columns(self) -> dict[str, Column]:
        """The entries as they are, `RemoteColumn`s included; fetches nothing."""
        return {key: dict.__getitem__(self, key) for key in dict.keys(self)}

    def fetch(self, keys: Iterable[str] | None = None) -> None:
        """Read these arrays (all if None), waiting once."""
        _fetch(self.columns, keys)

    def __getitem__(self, key: str) -> Array:
        value: Column = dict.__getitem__(self, key)
        return as_array(columns.read(value, key))

    def __iter__(self) -> Iterator[str]:
        # Overridden so that dict(x) and {**x} call __getitem__ and do not copy RemoteColumns.
        return dict.__iter__(self)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if dict.__contains__(self, key) else default

    def pop(self, key: str, default: object = _ABSENT) -> Any:
        if key not in self and default is not _ABSENT:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Array]:
        key = list(self)[-1]
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> ItemsView[str, Array]:  # type: ignore[override]  # of another class
        self.fetch()
        return {key: self[key] for key in self}.items()

    def values(self) -> ValuesView[Array]:  # type: ignore[override]  # of another class
        return dict(self.items()).values()

    def copy(self) -> RemoteArrays:
        return RemoteArrays(self.columns)

    def __or__(self, other: Mapping[str, Array]) -> RemoteArrays:  # type: ignore[override]
        return RemoteArrays(self.columns | dict(other))

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def __copy__(self) -> RemoteArrays:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteArrays:
        return RemoteArrays({key: columns.private(c) for key, c in self.columns.items()})

    def __reduce__(self) -> tuple[object, ...]:
        held = {key: columns.for_pickle(key, c) for key, c in self.columns.items()}
        return RemoteArrays, (held,)

    def __repr__(self) -> str:
        return repr({k: "remote" if is_remote(c) else self[k] for k, c in self.columns.items()})
