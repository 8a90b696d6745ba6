"""Running a small function on a rank's own node: here, or by a task there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.single_controller.backend import RankHandle

NODE_WAIT_S = 8.0


def on_node_of(
    handles: Sequence[RankHandle],
    function: Callable[..., str],
    arguments: Callable[[RankHandle], tuple[Any, ...]],
) -> dict[int, str]:
    """`function(*arguments(handle))` for each rank, by rank, in the order of `handles`.

    Other nodes are given 8 seconds in all; what does not answer is said to have not answered.
    """
    here = ray.get_runtime_context().get_node_id()
    answers: dict[int, str] = {handle.facts.rank: "" for handle in handles}
    remote: dict[int, Any] = {}
    for handle in handles:
        facts = handle.facts
        if facts.node_id == here:
            answers[facts.rank] = function(*arguments(handle))
        elif facts.node_id:
            strategy = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(function)
            remote[facts.rank] = task.options(scheduling_strategy=strategy).remote(
                *arguments(handle)
            )
    refs = list(remote.values())
    done = set(ray.wait(refs, num_returns=len(refs), timeout=NODE_WAIT_S)[0]) if refs else set()
    for rank, ref in remote.items():
        answers[rank] = _answer(ref) if ref in done else "  (its node does not answer)"
    return answers


def _answer(ref: Any) -> str:
    try:
        return str(ray.get(ref))
    except RayError as error:
        return f"  (its node does not answer: {type(error).__name__})"
