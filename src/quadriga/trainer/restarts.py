"""Restarts: how a run goes on after the loss of a rank, a node, an engine or a stored field.

    attempt ──loss──► groups that are lost end ──► attempt from the newest point ──► end of the run
       │                        ▲    │
       └──error of the program  └────┴── too many losses: the last one is raised, with the first

An attempt is one call of `fit`, which starts what is not started and goes back to the newest point
(`Checkpointing.resume`). Which groups end depends on that point:

    the beginning of this step, which all trained    the groups that are lost; the others keep
    groups still hold: no update has begun           their processes and their state
    a checkpoint, or the beginning of the run        all groups

One `Restarts` counts the losses of a run, and keeps its record open over all attempts.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch.distributed import DistError

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.errors import (
    CallTimeoutError,
    ClusterLostError,
    ConfigError,
    LostObjectError,
    PlacementError,
    QuadrigaError,
    RolloutDiedError,
    RolloutTimeoutError,
    WorkerDiedError,
    WorkerMethodError,
    first_line,
)
from quadriga.observability.console import RunConsole

if TYPE_CHECKING:
    from quadriga.checkpoint.folders import Resumed
    from quadriga.trainer.record import RunRecord

_log = logging.getLogger("quadriga")

LOSSES = (
    WorkerDiedError,
    CallTimeoutError,
    LostObjectError,
    RolloutDiedError,
    RolloutTimeoutError,
    ClusterLostError,
    DistError,
)
"""A process has ended or is stuck, an object or the cluster is lost, or the network between ranks
has failed."""
_CLOCKS = ("time/", "perf/", "progress/", "restarts/")
RETRY_S = 2.0
"""Seconds between two looks for the nodes that are missing."""


class Restartable(Protocol):
    """A trainer whose `fit` is decorated with `restarted`."""

    restarts: Restarts

    def end_lost(self, error: QuadrigaError) -> str:
        """End the groups that cannot be used after a loss. Return which, for a message."""
        ...


TrainerT = TypeVar("TrainerT", bound=Restartable)
ResultT = TypeVar("ResultT")
GroupsT = TypeVar("GroupsT")
ConfigT = TypeVar("ConfigT", TrainConfig, SFTConfig, RMConfig)


def restarted(fit: Callable[[TrainerT], ResultT]) -> Callable[[TrainerT], ResultT]:
    """Call `fit` again after a loss, as long as the settings allow."""

    @wraps(fit)
    def attempts(trainer: TrainerT) -> ResultT:
        restarts = trainer.restarts
        with restarts.record_open():
            while True:
                try:
                    return fit(trainer)
                except QuadrigaError as error:
                    restarts.begin(error)
                    restarts.lost += f"; {trainer.end_lost(error)}"
                # The error held the frames of the attempt, and with them its batches. Some frames
                # refer to themselves, so that only the collector frees them.
                gc.collect()

    return attempts


class Restarts:
    """Decides whether a run goes on after an error, and counts.

    Args:
        trainer: the settings.
        stopping: returns whether the run was asked to stop; it is not restarted then.

    Attributes:
        count: restarts so far.
        completed: the last step that was completed.
        lost: what the last loss was, and what is started again.
    """

    def __init__(self, trainer: RunConfig, stopping: Callable[[], bool]) -> None:
        self.trainer = trainer
        self.count = self.completed = 0
        self._opened = ExitStack()
        self.lost = ""
        self._stopping = stopping
        self._record: RunRecord | None = None
        self._counted: list[tuple[float, int]] = []  # time and completed step of each restart
        self._first = ""  # the first loss of those that count
        self._lost_at: float | None = None

    @contextmanager
    def record_open(self) -> Iterator[None]:
        """Close the record at the end of the block, if it was opened."""
        try:
            with self._opened:
                yield
        finally:
            self._record = None

    @property
    def last_validation(self) -> dict[str, float]:
        """The metrics of the last validation of the run; {} if there was none."""
        return {} if self._record is None else self._record.last_validation

    @property
    def row(self) -> dict[str, float]:
        """The metrics of the step so far, or between two steps of the one before, without times:
        equal runs write equal checkpoints."""
        found = {} if self._record is None else self._record.measured or self._record.last
        return {name: value for name, value in found.items() if not name.startswith(_CLOCKS)}

    @property
    def running(self) -> bool:
        """Whether the run folder is open: this run has written its checkpoints."""
        return self._record is not None

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an error is a loss, and no error of the program.

        A local rank cannot be lost: a call that was too long has ended, and was no call of a
        process that is stuck.
        """
        cause = error.__cause__ if isinstance(error, WorkerMethodError) else error
        if self.trainer.backend == "local" and isinstance(cause, CallTimeoutError):
            return False
        return isinstance(cause, LOSSES)

    def allows(self, error: BaseException) -> bool:
        """Return whether this process can go on with the run after an error. Without the cluster of
        the user only a new process can (`--supervise`)."""
        joined = isinstance(error, ClusterLostError) and not error.own
        if not self.is_loss(error) or joined or self._stopping():
            return False
        return len(self._recent()) < self.trainer.max_restarts

    def _recent(self) -> list[tuple[float, int]]:
        """Return the restarts that count: those within the window, and those without progress."""
        oldest = time.monotonic() - self.trainer.restart_window_s
        return [(at, step) for at, step in self._counted if at > oldest or step >= self.completed]

    def begin(self, error: QuadrigaError) -> None:
        """Count a loss.

        Raises:
            QuadrigaError: `error`, if the run does not go on; with the first loss if that is
                because of their number.
        """
        recent = self._recent()
        if not self.allows(error):
            most = self.trainer.max_restarts
            if recent and len(recent) >= most and self.is_loss(error) and not self._stopping():
                error.args = (f"{error.args[0]}\n\n{self._exhausted(len(recent))}",)
            raise error
        if not recent:
            self._first = first_line(error)
        self.count += 1
        self._counted = [*recent, (time.monotonic(), self.completed)]
        self._lost_at = self._lost_at or time.monotonic()
        role, rank = (getattr(error, name, None) for name in ("role", "rank"))
        self.lost = type(error).__name__ if role is None else f"{role} rank {rank}"
        restart = len(self._counted), self.trainer.max_restarts
        _log.warning("restart %d of %d begins: %s", *restart, first_line(error))

    def _exhausted(self, restarts: int) -> str:
        return (
            f"The run was restarted {restarts} times before that, as often as trainer.max_restarts="
            f"{self.trainer.max_restarts} allows within trainer.restart_window_s="
            f"{self.trainer.restart_window_s:g}, or without a completed step. The first of these "
            f"losses: {self._first}"
        )

    def placed(
        self,
        start: Callable[[ConfigT], GroupsT],
        config: ConfigT,
        check: Callable[[ConfigT], None] | None,
    ) -> GroupsT:
        """Start the groups of a run. A restart waits for missing nodes, then goes on with fewer.

        Args:
            start: places the ranks, and starts the groups.
            check: raises `ConfigError` for settings with fewer nodes that do not fit; None: the
                number of nodes is not that of the settings.

        Raises:
            PlacementError: the nodes cannot hold the ranks.
        """
        if "console" in self.trainer.loggers:
            many = "s" if config.trainer.ranks > 1 else ""
            what = f"{config.trainer.ranks} rank{many}, trainer.backend={self.trainer.backend}"
            RunConsole(0).note(f"starting the processes and loading the models: {what}")
        since = time.monotonic()
        while True:
            try:
                return start(config)
            except PlacementError as error:
                missing = error
            if self._lost_at is None:  # the first start
                raise missing
            waited, limit = time.monotonic() - since, self.trainer.restart_wait_s
            if waited >= limit:
                break
            if waited < RETRY_S:
                text = "waiting up to %g s (trainer.restart_wait_s) for nodes: %s"
                _log.warning(text, limit, first_line(missing))
            time.sleep(min(RETRY_S, limit - waited))
        text = f"{missing}\n\nThe restart has waited {limit:g} s (trainer.restart_wait_s)."
        for nnodes in range(config.trainer.nnodes - 1, 0, -1):
            if check is None:
                break
            smaller: ConfigT = replace(config, trainer=replace(config.trainer, nnodes=nnodes))
            try:
                check(smaller)
                started = start(smaller)
            except (ConfigError, PlacementError) as error:
                text += f"\nWith trainer.nnodes={nnodes}: {first_line(error)}"
                continue
            _log.warning("going on with %d of %d nodes", nnodes, config.trainer.nnodes)
            return started
        raise PlacementError(text) from missing

    def record(
        self, make: Callable[[], RunRecord], resumed: Resumed | None
    ) -> AbstractContextManager[RunRecord]:
        """Open the record of the run, which stays open after the block; after a loss let it go back
        to `resumed`."""
        if self._record is None:
            self._record = self._opened.enter_context(make())
        else:
            self._record.go_back(resumed)
        self._go_on(self._record, 0 if resumed is None else resumed.state.step)
        return nullcontext(self._record)

    def _go_on(self, record: RunRecord, step: int) -> None:
        """Tell where the run goes on, in a line and in the next row of the metrics."""
        again, self.completed = max(0, self.completed - step), step
        if self._lost_at is None:
            return
        seconds, self._lost_at = time.monotonic() - self._lost_at, None
        _log.warning(
            "restart %d of %d: the run goes on after step %d, %.1f s after a loss; completed steps "
            "that are done again: %d. Lost: %s", len(self._counted), self.trainer.max_restarts,
            step, seconds, again, self.lost,
        )  # fmt: skip
        record.restarts["restarts/count"] = float(self.count)
        for name, value in (("lost_steps", float(again)), ("seconds", seconds)):
            total = record.restarts.get(f"restarts/{name}", 0.0) + value
            record.restarts[f"restarts/{name}"] = total
