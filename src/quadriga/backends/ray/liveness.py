"""Whether ranks still exist, as Ray's control store and their nodes say. No dashboard is needed."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from quadriga.single_controller.backend import RankHandle

PROBE_TIMEOUT_S = 1.5
SILENT_S = 5.0
"""A node that has not answered for this long is taken for lost."""


def actor_alive(actor: Any) -> bool:
    """True while the actor is being started or runs. Raises nothing for a dead one."""
    if not ray.is_initialized():
        return False
    return actor_record(actor).get("State") not in (None, "DEAD")


def actor_record(actor: Any) -> dict[str, Any]:
    """The control store's record: State, Address, DeathCause, …; empty if it knows none."""
    from ray._private import state

    return dict(state.actors(actor._actor_id.hex()) or {})


class NodeProbe:
    """Notices nodes that are gone, sooner than the control store's own health check."""

    def __init__(self, handles: Sequence[RankHandle]) -> None:
        self._ranks = list(handles)
        self._silent_since: dict[str, float] = {}

    def lost(self) -> list[RankHandle]:
        """The ranks whose node is dead, or has not answered for 5 seconds."""
        here = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        wanted = {h.facts.node_id for h in self._ranks} - {here, ""}
        if not wanted:
            return []
        with ThreadPoolExecutor(max_workers=min(32, len(wanted))) as pool:
            answers = dict(
                zip(wanted, pool.map(lambda n: _answers(nodes.get(n)), wanted), strict=True)
            )
        gone = {node for node, answered in answers.items() if self._is_gone(node, answered)}
        return [h for h in self._ranks if h.facts.node_id in gone]

    def _is_gone(self, node_id: str, answered: bool) -> bool:
        if answered:
            self._silent_since.pop(node_id, None)
            return False
        since = self._silent_since.setdefault(node_id, time.monotonic())
        return time.monotonic() - since >= SILENT_S


def _answers(node: dict[str, Any] | None) -> bool:
    if node is None or not node["Alive"]:
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
