"""Records which fields the stages of a step read and write while a real step runs."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest

from quadriga.protocol import DataProto

# Accesses from these packages are a stage's own. Others are the bookkeeping of the protocol, such
# as the comparison of equal keys in `union`.
WATCHED = ("quadriga.trainer", "quadriga.workers", "quadriga.rewards")


class FieldAccess:
    """Field names that each stage read and wrote."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.stages = frozenset(stages)
        self.reads: dict[str, set[str]] = defaultdict(set)
        self.writes: dict[str, set[str]] = defaultdict(set)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record every access through `DataProto` until the end of the test."""
        for part in ("batch", "non_tensor_batch"):
            monkeypatch.setattr(DataProto, part, self._property(part), raising=False)
        original = DataProto.from_dict.__func__

        def from_dict(cls: type, tensors: Any = None, non_tensors: Any = None, *a: Any, **k: Any):
            if stage := self.stage_of(sys._getframe(1)):
                self.writes[stage] |= {*(tensors or {}), *(non_tensors or {})}
            return original(cls, tensors, non_tensors, *a, **k)

        monkeypatch.setattr(DataProto, "from_dict", classmethod(from_dict))

    def stage_of(self, frame: FrameType | None) -> str | None:
        """Return the innermost stage on the stack, if the caller is part of a stage."""
        if frame is None or not frame.f_globals["__name__"].startswith(WATCHED):
            return None
        while frame is not None and frame.f_code.co_name not in self.stages:
            frame = frame.f_back
        return frame.f_code.co_name if frame else None

    def _property(self, part: str) -> property:
        """The attribute `part` of `DataProto`: stages get a view that records, others the value."""
        stored = f"_watched_{part}"

        def read(data: DataProto) -> Any:
            value = data.__dict__[stored]
            stage = self.stage_of(sys._getframe(1))
            return value if stage is None or value is None else View(value, stage, self)

        def write(data: DataProto, value: Any) -> None:
            data.__dict__[stored] = value

        return property(read, write)


class View:
    """The fields of a batch as one stage sees them."""

    def __init__(self, values: Any, stage: str, access: FieldAccess) -> None:
        self._values, self._stage, self._access = values, stage, access

    def __getitem__(self, key: str) -> Any:
        self._access.reads[self._stage].add(key)
        return self._values[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self._values.keys() else default  # noqa: SIM118

    def __setitem__(self, key: str, value: Any) -> None:
        self._access.writes[self._stage].add(key)
        self._values[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._values.keys()  # noqa: SIM118

    def keys(self) -> Any:
        return self._values.keys()
