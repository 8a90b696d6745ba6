"""Whether nodes answer, and running a small function on a rank's own node."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.single_controller.backend import RankHandle

PROBE_TIMEOUT_S = 1.5
SILENT_S = 5.0
"""A node that has not answered for this long is taken for lost."""
NODE_WAIT_S = 8.0
"""How long a function on another node may take."""


def answering(node_ids: Iterable[str]) -> dict[str, bool]:
    """For each node whether something listens at its port. The node we are on does."""
    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    others = set(node_ids) - {here, ""}
    if not others:
        return {here: True}
    with ThreadPoolExecutor(max_workers=min(32, len(others))) as pool:
        answers = pool.map(lambda node_id: _listens(nodes.get(node_id)), others)
        return {here: True, **dict(zip(others, answers, strict=True))}


def _listens(node: dict[str, Any] | None) -> bool:
    if node is None or not node["Alive"]:
        return False
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class NodeProbe:
    """Notices nodes that are gone, sooner than Ray's own health check."""

    def __init__(self, handles: Sequence[RankHandle]) -> None:
        self._ranks = list(handles)
        self._silent_since: dict[str, float] = {}

    def lost(self) -> list[RankHandle]:
        """The ranks whose node has not answered for 5 seconds."""
        answers = answering(h.facts.node_id for h in self._ranks)
        gone = {node for node, answered in answers.items() if self._is_gone(node, answered)}
        return [h for h in self._ranks if h.facts.node_id in gone]

    def _is_gone(self, node_id: str, answered: bool) -> bool:
        if answered:
            self._silent_since.pop(node_id, None)
            return False
        since = self._silent_since.setdefault(node_id, time.monotonic())
        return time.monotonic() - since >= SILENT_S


def on_node_of(
    handles: Sequence[RankHandle],
    function: Callable[..., str],
    arguments: Callable[[RankHandle], tuple[Any, ...]],
) -> dict[int, str]:
    """`function(*arguments(handle))` for each rank, by rank, in the order of `handles`.

    What another node has not answered within 8 seconds is said to have not answered.
    """
    here = ray.get_runtime_context().get_node_id()
    answers = {handle.facts.rank: SILENT for handle in handles}
    there: dict[int, Any] = {}
    up = answering(handle.facts.node_id for handle in handles)
    for handle in handles:
        facts = handle.facts
        if facts.node_id in (here, ""):
            answers[facts.rank] = function(*arguments(handle))
        elif up[facts.node_id]:
            strategy = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(function)
            there[facts.rank] = task.options(scheduling_strategy=strategy).remote(
                *arguments(handle)
            )
    if there:
        refs = list(there.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=NODE_WAIT_S)[0])
        answers.update({rank: answer_of(ref) for rank, ref in there.items() if ref in done})
    return answers


SILENT = "  (its node does not answer)"


def answer_of(ref: Any) -> str:
    """The text that was asked of a node or a rank; it says so if none came."""
    try:
        return str(ray.get(ref))
    except RayError:
        return SILENT
