"""`RemoteArrays`: a dict of numpy arrays some of which may lie elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quadriga.protocol.columns.column import RemoteColumn, alone, fetch, is_remote, private

_ABSENT: Any = object()


class RemoteArrays(dict[str, Any]):
    """Behaves as a dict of arrays; an array that lies elsewhere is fetched when it is read."""

    @property
    def columns(self) -> dict[str, Any]:
        """The entries as they are held, `RemoteColumn`s included; fetches nothing."""
        return {key: dict.__getitem__(self, key) for key in dict.keys(self)}

    def fetch(self, keys: Any = None) -> None:
        """Reads these arrays (all when None), waiting once."""
        held = self.columns
        fetch(
            [(key, held[key]) for key in (held if keys is None else keys) if is_remote(held[key])]
        )

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        return value.read(key) if isinstance(value, RemoteColumn) else value

    def __iter__(self) -> Iterator[str]:  # keeps dict(x) and {**x} from copying RemoteColumns
        return dict.__iter__(self)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if dict.__contains__(self, key) else default

    def pop(self, key: str, default: Any = _ABSENT) -> Any:
        if key not in self and default is not _ABSENT:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = list(self)[-1]
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> Any:
        self.fetch()
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def copy(self) -> RemoteArrays:
        return RemoteArrays(self.columns)

    def __or__(self, other: Any) -> Any:
        return RemoteArrays(self.columns | dict(other))

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def __copy__(self) -> RemoteArrays:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteArrays:
        return RemoteArrays({key: private(column) for key, column in self.columns.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteArrays, ({key: alone(key, column) for key, column in self.columns.items()},)

    def __repr__(self) -> str:
        return repr({k: "elsewhere" if is_remote(v) else self[k] for k, v in self.columns.items()})
