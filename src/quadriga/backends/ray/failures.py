"""Waiting for ranks, and turning Ray's errors into ours: the first failure is raised."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from quadriga.backends.ray.stacks import stacks_of
from quadriga.errors import (
    CallTimeoutError,
    QuadrigaError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
)
from quadriga.single_controller.backend import RankHandle

logger = logging.getLogger("quadriga.controller")

LOOK_S = 1.0
"""How often a wait looks up."""
SPEAK_S = 60.0
"""How often a long wait says whom it waits for."""
GRACE_S = 0.5
"""How long after a failure others may still turn out to have failed first."""

_DEAD = (ActorDiedError, ActorUnavailableError, WorkerCrashedError)


def raise_first_failure(
    refs: Sequence[Any],
    handles: Sequence[RankHandle],
    label: str,
    timeout: float | None,
    started: float | None = None,
) -> list[Any]:
    """The values of `refs`, in order. `started`: `time.monotonic()` of the submission.

    Raises WorkerMethodError (a method raised), WorkerDiedError (a process is gone) or
    CallTimeoutError (`timeout` seconds have passed since `started`), as soon as it is known.
    """
    began = time.monotonic() if started is None else started
    spoken = began
    refs = list(refs)
    while True:
        look = LOOK_S
        if timeout is not None:
            look = min(look, max(0.0, began + timeout - time.monotonic()))
        try:
            return list(ray.get(refs, timeout=look))
        except GetTimeoutError:
            now = time.monotonic()
            if timeout is not None and now - began >= timeout:
                _raise_timeout(refs, handles, label, timeout)
            if now - spoken >= SPEAK_S:
                spoken = now
                _say_whom(refs, handles, label, now - began)
        except RayError as error:
            _raise_first(refs, handles, label, error)


def _raise_timeout(
    refs: list[Any], handles: Sequence[RankHandle], label: str, timeout: float
) -> NoReturn:
    stuck = _unfinished(refs, handles)
    stacks = stacks_of(stuck)
    ranks = [h.facts.rank for h in stuck]
    shown = "\n\n".join(f"Stack of rank {rank}:\n{stack}" for rank, stack in stacks.items())
    role, _, method = label.rpartition(".")
    first = stuck[0] if stuck else handles[0]
    raise CallTimeoutError(
        f"{label} passed its deadline of {timeout:g} s; still running on ranks {ranks} "
        f"({_nodes(stuck)}).\n\n{shown}",
        role=role,
        rank=first.facts.rank,
        node=first.facts.node,
        method=method,
        stacks=stacks,
    )


def _say_whom(refs: list[Any], handles: Sequence[RankHandle], label: str, waited: float) -> None:
    stuck = _unfinished(refs, handles)
    logger.warning(
        "waiting for %s on rank(s) %s for %.0f s",
        label,
        ", ".join(f"{h.facts.rank} ({h.facts.node}, pid {h.facts.pid})" for h in stuck),
        waited,
    )


def _unfinished(refs: list[Any], handles: Sequence[RankHandle]) -> list[RankHandle]:
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    finished = set(done)
    return [h for ref, h in zip(refs, handles, strict=True) if ref not in finished]


def _raise_first(
    refs: list[Any], handles: Sequence[RankHandle], label: str, error: RayError
) -> NoReturn:
    """Of all failures that are known after a short grace, raise the one that came first."""
    ray.wait(refs, num_returns=len(refs), timeout=GRACE_S, fetch_local=False)
    failures: list[WorkerError] = []
    running: list[int] = []
    for ref, handle in zip(refs, handles, strict=True):
        try:
            ray.get(ref, timeout=0)
        except GetTimeoutError:
            running.append(handle.facts.rank)
        except RayError as found:
            failures.append(translate(found, handle, label))
    if not failures:
        failures.append(translate(error, handles[0], label))
    first = min(failures, key=_order)
    if running:
        first.args = (
            f"{first.args[0]}\n\nStill running the same call: rank(s) "
            f"{', '.join(map(str, running))}.",
        )
    raise first from getattr(first, "cause", None)


def _order(error: WorkerError) -> tuple[int, float]:
    """A death explains the errors its peers raise in a collective, so it comes first."""
    return (0 if isinstance(error, WorkerDiedError) else 1, getattr(error, "raised_at", 0.0))


def translate(error: RayError, handle: RankHandle, label: str) -> Any:
    """Our error for one of Ray's."""
    role, _, method = label.rpartition(".")
    facts = handle.facts
    details = {"role": role, "rank": facts.rank, "node": facts.node, "method": method}
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, QuadrigaError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, handle, label)
        return WorkerMethodError(
            f"{type(cause).__name__} around {label}, rank {facts.rank} on {facts.node}: "
            f"{_first_line(cause)}. The arguments could not be read there, or the result could "
            "not be pickled.",
            remote_traceback=str(error),
            **details,
        )
    if isinstance(error, _DEAD):
        return WorkerDiedError(
            f"The process of {role} rank {facts.rank} on {facts.node} (pid {facts.pid}) died "
            f"while {method} was in flight: {_reason(error)}\n\n"
            f"Its last lines:\n{last_lines(handle)}",
            **details,
        )
    return WorkerMethodError(
        f"{label}, rank {facts.rank} on {facts.node}: {type(error).__name__}: {error}",
        remote_traceback="",
        **details,
    )


def last_lines(handle: RankHandle, count: int = 20) -> str:
    """What the process wrote to its stderr last, where this machine can read it."""
    path = handle.facts.log_path
    if not path or not os.path.exists(path):
        return "  (its log is not on this machine)" if path else "  (no log)"
    with open(path, errors="replace") as file:
        lines = [line.rstrip() for line in file.readlines() if not line.startswith(":")]
    return "\n".join("  " + line for line in lines[-count:]) or "  (nothing)"


def _reason(error: RayError) -> str:
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return " ".join(telling[:2]) if telling else (lines[0] if lines else type(error).__name__)


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"


def _nodes(handles: Sequence[RankHandle]) -> str:
    return ", ".join(sorted({f"{h.facts.node}, pid {h.facts.pid}" for h in handles}))
