"""Processes that host the environments of episodes.

    play(episode, row, turns) ──► process ──► reset, step ──► Answer

consumes      turns of the policy
produces      one answer for each turn
waits for     the pipes of the processes, in `wait`
unblocked by  an answer, or the end of a process (its pipe closes), or the deadline of a call

An episode stays in one process, which answers many of them at once. A call that raises or exceeds
its deadline ends its own episode. If a process dies, the episodes that it hosted are begun again in
another one and their turns are played again. Those that were in a call are then alone in a process,
so that the one which has killed it is found:

    process 1   A in a call, B in a call, C waits for the policy      killed
    process 2   A again, alone     answered
    process 3   B again, alone     killed: B has crashed
    process 4   C again, when its next turn comes
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any, Literal

from pydantic import TypeAdapter

from quadriga.agents.environments import EnvironmentRef
from quadriga.rewards.pool import PoolProcess, kill_all

Status = Literal["observed", "done", "raised", "timed_out", "crashed"]
FAILURES: tuple[Status, ...] = ("raised", "timed_out", "crashed")
_LATE_S = 5.0  # time for a process to report that a call has exceeded its deadline
_START_S = 120.0  # time for the first call of a process, which imports the file
_MAX_ANSWER = 1 << 24  # bytes


@dataclass(frozen=True)
class Play:
    """A call of an environment. `turns`: all turns of the episode, of which the last is new; none:
    the episode begins."""

    episode: int
    environment: EnvironmentRef
    row: Mapping[str, object]
    turns: Sequence[str]
    timeout_s: float
    # digests of observations: of `reset`, 0, and of turn 1, 2, …
    seen: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """An episode is over; its environment is dropped."""

    episode: int


@dataclass(frozen=True)
class Answer:
    """What an environment has answered.

    Attributes:
        messages: what the policy sees next.
        rewards: of the last turn; of all turns if they were played again.
        detail: of a failure.
    """

    episode: int
    status: Status
    messages: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""


_FORM = TypeAdapter(Answer)


def digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of an observation."""
    return hashlib.sha256(json.dumps([dict(m) for m in messages]).encode()).hexdigest()


@dataclass(eq=False)
class _Episode:
    row: Mapping[str, object]
    process: PoolProcess | None = None
    turns: Sequence[str] | None = None  # of the call in flight
    deadline: float = 0.0
    suspect: bool = False  # a process has died in its call
    seen: dict[int, str] = field(default_factory=dict)  # turn → digest of its answer


class EpisodePool:
    """Hosts episodes in `num_processes` processes, and in further ones those that may kill theirs.

    Args:
        environment: its file has been loaded once.
        timeout_s: deadline of one call.
        memory_gb: GiB that a process can allocate; None: no limit.
    """

    def __init__(
        self,
        environment: EnvironmentRef,
        num_processes: int = 2,
        timeout_s: float = 60.0,
        memory_gb: float | None = None,
    ) -> None:
        self.environment = environment
        self.timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._shared: list[PoolProcess | None] = [None] * num_processes
        self._episodes: dict[int, _Episode] = {}
        self._known: dict[PoolProcess, set[int]] = {}  # the episodes that each process hosts
        self._failed: list[Answer] = []
        self._all: list[PoolProcess] = []
        weakref.finalize(self, kill_all, self._all, os.getpid())

    @property
    def busy(self) -> bool:
        """Whether a call is in flight, or an answer can be received."""
        return bool(self._failed) or any(e.turns is not None for e in self._episodes.values())

    def play(self, number: int, row: Mapping[str, object], turns: Sequence[str]) -> None:
        """Call the environment of an episode with its newest turn, or begin it if there is none.

        An episode that the pool does not host is begun, and all its turns are played.
        """
        episode = self._episodes.setdefault(number, _Episode(row))
        episode.turns = list(turns)
        self._send(number, episode)

    def end(self, number: int) -> None:
        """Drop an episode."""
        episode = self._episodes.pop(number, None)
        if episode is None or episode.process is None:
            return
        self._known[episode.process].discard(number)
        if episode.suspect:
            self._kill(episode.process)
        else:
            _try_send(episode.process, End(number))

    def wait(self, timeout: float) -> bool:
        """Wait until `answers` would return some, but at most `timeout` seconds; return whether."""
        if self._failed or not self.busy:
            return bool(self._failed)
        now = time.monotonic()
        nearest = min(e.deadline for e in self._episodes.values() if e.turns is not None)
        ready = wait([p.connection for p in self._known], max(0.0, min(timeout, nearest - now)))
        return bool(ready) or nearest <= time.monotonic()

    def answers(self) -> list[Answer]:
        """Return the answers that have come."""
        ready = wait([process.connection for process in self._known], 0)
        for process in [process for process in self._known if process.connection in ready]:
            self._failed += self._received(process)
        now = time.monotonic()
        for number, episode in list(self._episodes.items()):
            if episode.turns is not None and episode.deadline <= now and episode.process:
                late = f"exceeded its deadline of {self.timeout_s:g} s and blocked its process"
                hung = episode.process
                self._failed.append(self._fail(number, "timed_out", late))
                for other in self._lose(hung):
                    self._send(other, self._episodes[other])
        found, self._failed = self._failed, []
        return found

    def close(self) -> None:
        """Kill the processes and what they have started. All episodes are dropped."""
        kill_all(self._all, os.getpid())
        self._episodes.clear()
        self._known.clear()
        self._shared = [None] * len(self._shared)

    def _send(self, number: int, episode: _Episode) -> None:
        """Send the call of an episode to its process, or to another one if it has none."""
        process = episode.process or self._process(alone=episode.suspect)
        starts = process not in self._known
        hosted = self._known.setdefault(process, set())
        new = number not in hosted  # the process needs the row and the file once
        hosted.add(number)
        episode.process = process
        ref = self.environment if new else replace(self.environment, content=None)
        turns = episode.turns or []
        seen = episode.seen if new else {}
        play = Play(number, ref, episode.row if new else {}, turns, self.timeout_s, seen)
        late = _LATE_S + (_START_S if starts else 0.0)
        episode.deadline = time.monotonic() + self.timeout_s + late
        _try_send(process, play)

    def _process(self, *, alone: bool) -> PoolProcess:
        """Return the shared process with the fewest episodes, or a new one."""
        counts = [0 if p is None else 1 + len(self._known.get(p, ())) for p in self._shared]
        place = counts.index(min(counts))
        if not alone and (shared := self._shared[place]) is not None:
            return shared
        process = PoolProcess(self._memory_gb, "quadriga.agents.pool_worker")
        self._all.append(process)
        if not alone:
            self._shared[place] = process
        return process

    def _received(self, process: PoolProcess) -> Iterator[Answer]:
        try:
            while process in self._known and process.connection.poll():
                message = process.connection.recv_bytes(_MAX_ANSWER)
                answer = _FORM.validate_json(message)
                episode = self._episodes.get(answer.episode)
                if episode is not None and episode.process is process and episode.turns is not None:
                    yield self._accepted(answer, episode)
        except (EOFError, OSError, ValueError):
            in_call = self._lose(process)
            for number in in_call:
                episode = self._episodes[number]
                if episode.suspect or len(in_call) == 1:
                    yield self._fail(number, "crashed", "its process has died in its call")
                else:
                    episode.suspect = True
                    self._send(number, episode)

    def _accepted(self, answer: Answer, episode: _Episode) -> Answer:
        turns, episode.turns = episode.turns or [], None
        if answer.status in FAILURES:
            self.end(answer.episode)
        else:
            episode.seen[len(turns)] = digest(answer.messages)
        return answer

    def _fail(self, number: int, status: Status, detail: str) -> Answer:
        episode = self._episodes.pop(number)
        if episode.process is not None:
            self._known[episode.process].discard(number)
        return Answer(number, status, detail=detail)

    def _lose(self, process: PoolProcess) -> list[int]:
        """Kill a process. Its episodes go on in others; return those that were in a call."""
        self._kill(process)
        lost = [number for number, e in self._episodes.items() if e.process is process]
        for number in lost:
            self._episodes[number].process = None
        return [number for number in lost if self._episodes[number].turns is not None]

    def _kill(self, process: PoolProcess) -> None:
        process.kill()
        self._known.pop(process, None)
        self._all.remove(process)
        self._shared = [None if p is process else p for p in self._shared]


def _try_send(process: PoolProcess, message: object) -> None:
    try:
        process.connection.send(message)
    except OSError:  # it has ended, or reads no more: `answers` finds that its pipe is closed
        process.popen.terminate()
