"""One case of `compare_algorithms.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """A case that both sides compute; `peer` is the peer's name where it differs."""

    id: str
    kind: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    mode: str = "token-mean"
    peer: str = ""
    peer_options: dict[str, Any] | None = None
    threshold: str = ""
    batch: str = "usual"

    def request(self) -> dict[str, Any]:
        """What the peer is told."""
        options = self.options if self.peer_options is None else self.peer_options
        asked = {"id": self.id, "kind": self.kind, "name": self.name, "mode": self.mode}
        return {
            **asked,
            "options": options,
            "threshold": self.threshold,
            "peer": self.peer or self.name,
        }
