"""One case of `compare_algorithms.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """A case that both sides compute.

    `kind` says what `name` is: an estimator, a loss, a KL estimator and so on. `options` are its
    settings, `mode` the aggregation and `batch` the variant of the batch. `peer` and `peer_options`
    are the peer's name and settings, if they differ.
    """

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
        """Return the case in the form that is sent to the peer."""
        options = self.options if self.peer_options is None else self.peer_options
        case = {"id": self.id, "kind": self.kind, "name": self.name, "mode": self.mode}
        return {
            **case,
            "options": options,
            "threshold": self.threshold,
            "peer": self.peer or self.name,
        }
