"""Our errors for Ray's."""

from __future__ import annotations

from typing import Any

from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)

from quadriga.backends.ray.health.stacks import last_lines
from quadriga.errors import QuadrigaError, WorkerDiedError, WorkerError, WorkerMethodError
from quadriga.single_controller.backend import RankHandle

DEAD = (ActorDiedError, ActorUnavailableError, WorkerCrashedError)


def order_of_failure(error: WorkerError) -> tuple[int, float]:
    """Sort key: a death explains the errors its peers raise in a collective, so it comes first;
    then whoever raised first."""
    return (0 if isinstance(error, WorkerDiedError) else 1, getattr(error, "raised_at", 0.0))


def translate(error: RayError, handle: RankHandle, label: str, there: bool = False) -> Any:
    """Our error for one of Ray's; `label` is "role.method". `there`: it was raised by the rank."""
    role, _, method = label.rpartition(".")
    facts = handle.facts
    details = {"role": role, "rank": facts.rank, "node": facts.node, "method": method}
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, QuadrigaError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, handle, label, there=True)
        return WorkerMethodError(
            f"{type(cause).__name__} around {label}, rank {facts.rank} on {facts.node}: "
            f"{_first_line(cause)}. The arguments could not be read there, or the result could "
            "not be pickled.",
            remote_traceback=str(error),
            **details,
        )
    if isinstance(error, RaySystemError):
        place = f"rank {facts.rank} on {facts.node}"
        what = (
            f"An argument of {label} could not be read by {place}"
            if there
            else f"A result of {label} from {place} could not be read here"
        )
        return WorkerMethodError(
            f"{what}: {_last_line(error)}", remote_traceback=str(error), **details
        )
    if isinstance(error, DEAD):
        return died(handle, label, _reason(error))
    return WorkerMethodError(
        f"{type(error).__name__} around {label}, rank {facts.rank} on {facts.node}: {error}",
        remote_traceback="",
        **details,
    )


def died(handle: RankHandle, label: str, reason: str) -> WorkerDiedError:
    """The error for a process that is gone, with the last lines it wrote. `label`: "role.method",
    the method left empty if the rank was idle."""
    role, _, method = label.rpartition(".")
    facts = handle.facts
    call = f"{method} was in flight" if method else "no call was in flight"
    return WorkerDiedError(
        f"The process of {role} rank {facts.rank} on {facts.node} (pid {facts.pid}) died while "
        f"{call}: {reason}\n\nIts last lines:\n{last_lines(handle)}",
        role=role,
        rank=facts.rank,
        node=facts.node,
        method=method,
    )


def _reason(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    text = " ".join(telling[:2]) if telling else (lines[0] if lines else type(error).__name__)
    # Ray appends a list of everything that can end a process; the log lines below say more.
    return text.partition(" Some common causes include")[0]


def _last_line(error: RayError) -> str:
    """Of a traceback in text the error itself."""
    return str(error).strip().splitlines()[-1].strip()


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"
