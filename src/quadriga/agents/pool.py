"""Processes that host the environments of episodes.

    play(episode, row, turns) ──► process ──► reset, step ──► Answer

consumes      turns of the policy
produces      one answer for each turn
waits for     the pipes of the processes, in `wait`
unblocked by  an answer, or the end of a process (its pipe closes), or the deadline of a call

An episode stays in one process, which answers many of them at once. A call that raises or exceeds
its deadline ends its own episode. If a process dies, the episodes that it hosted are begun again in
another one and their turns are played again. Each episode that was in a call is then alone in a
process, so that the call which ends a process is found. The same holds for a process that stands
still:

    process 1   A in a call, B in a call, C waits for the policy      killed
    process 2   A again, alone     answered
    process 3   B again, alone     killed: B has crashed
    process 4   C again, when its next turn comes
"""

import hashlib
import json
import math
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from quadriga.agents.environments import Action, EnvironmentRef, Message
from quadriga.rewards.pool import PoolProcess, Start, kill_all, start_here

Status = Literal["observed", "done", "raised", "timed_out", "crashed"]
FAILURES: tuple[Status, ...] = ("raised", "timed_out", "crashed")
_LATE_S = 5.0  # time for a process to report that a call has exceeded its deadline
_START_S = 120.0  # time for the first call of a process, which imports the file
CLOSE_S = 2.0  # time for the environments of a process to close when the pool ends
MAX_BYTES = 1 << 22  # of an answer


@dataclass(frozen=True)
class Play:
    """A call of an environment.

    Attributes:
        prompt: the messages of the data row.
        turns: the new turn, and those before it if the process does not host the episode yet; none:
            the episode begins.
        tells_chat: the answer has its `chat`.
    """

    episode: int
    environment: EnvironmentRef
    row: Mapping[str, object]
    prompt: Sequence[Message]
    turns: Sequence[Action]
    timeout_s: float
    tells_chat: bool
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
        messages: what the policy sees next; of a new context the whole conversation.
        rewards: of the last turn; of all turns if they were played again.
        detail: of a failure.
        new_context: see `Observation`.
        chat: the conversation in this context, with the messages, if it is asked for.
        tools: schemas that the template writes into a new context.
        text: what a new context consists of, in place of messages.
        max_tokens: of the next turn; 0: as the settings say.
        digest: see `digest`.
    """

    episode: int
    status: Status
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    new_context: bool = False
    chat: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    max_tokens: int = 0
    digest: str = field(default="", compare=False)


READY = Answer(-1, "observed")
"""The first message of a process: it has imported the file of the environment."""
FORM = TypeAdapter(Answer)


def encoded(value: object) -> bytes:
    """Return JSON. Half a surrogate pair becomes "?"."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def digest(answer: Answer) -> str:
    """Return the digest of what the policy sees next."""
    seen = answer.messages, answer.new_context, answer.tools, answer.text
    return hashlib.sha256(encoded(seen)).hexdigest()


@dataclass(eq=False)
class _Host:
    """A process.

    Attributes:
        alone: it hosts one episode, in whose call another process has died or stood still.
        ready: it has imported the file.
        outbox: messages that a thread sends, so that a process that stands still holds nobody;
            None: the last one.
    """

    process: PoolProcess
    alone: bool = False
    ready: bool = False
    episodes: set[int] = field(default_factory=set)
    outbox: SimpleQueue[object] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        Thread(target=_send_all, args=(self.process, self.outbox), daemon=True).start()


@dataclass(eq=False)
class _Episode:
    row: Mapping[str, object]
    prompt: Sequence[Message]
    host: _Host | None = None
    turns: Sequence[Action] | None = None  # of the call in flight
    budget: float = 0.0  # seconds that its call may take
    deadline: float = math.inf
    seen: dict[int, str] = field(default_factory=dict)  # turn → digest of its answer


class EpisodePool:
    """Hosts episodes in `num_processes` processes, and in further ones those that may kill theirs.

    Args:
        environment: its file has been loaded once.
        timeout_s: deadline of one call.
        memory_gb: GiB that a process can allocate; None: no limit.
        tells_chat: answers have the whole conversation.
        start: starts a process, here or on another node.
    """

    def __init__(
        self,
        environment: EnvironmentRef,
        num_processes: int = 2,
        timeout_s: float = 60.0,
        memory_gb: float | None = None,
        tells_chat: bool = False,
        start: Start = start_here,
    ) -> None:
        self._start = start
        self.environment = environment
        self._imported = replace(environment, content=None)
        self._tells_chat = tells_chat
        self.timeout_s = timeout_s
        self._memory_gb = memory_gb
        self._count = num_processes
        self._episodes: dict[int, _Episode] = {}
        self._hosts: list[_Host] = []
        self._suspects: deque[int] = deque()  # episodes that wait for a process of their own
        self._answers: list[Answer] = []
        self._all: list[PoolProcess] = []
        weakref.finalize(self, kill_all, self._all, os.getpid())

    @property
    def busy(self) -> bool:
        """Whether a call is in flight, or an answer can be received."""
        episodes = list(self._episodes.values())  # another thread may add to them
        return bool(self._answers) or any(episode.turns is not None for episode in episodes)

    def play(
        self,
        number: int,
        row: Mapping[str, object],
        turns: Sequence[Action],
        prompt: Sequence[Message] = (),
    ) -> None:
        """Call the environment of an episode with its newest turn, or begin it if there is none.

        An episode that the pool does not host is begun, and all its turns are played.
        """
        episode = self._episodes.setdefault(number, _Episode(row, prompt))
        episode.turns = list(turns)
        self._send(number, episode)

    def end(self, number: int) -> None:
        """Drop an episode."""
        episode = self._episodes.pop(number, None)
        if number in self._suspects:
            self._suspects.remove(number)
        if episode is None or (host := episode.host) is None:
            return
        host.episodes.discard(number)
        if host.alone:
            self._kill(host)
            self._try_suspects()
        else:
            host.outbox.put(End(number))

    def wait(self, timeout: float) -> bool:
        """Wait until `answers` would return some, but at most `timeout` seconds; return whether."""
        if self._answers or not self.busy:
            return bool(self._answers)
        now = time.monotonic()
        deadlines = [e.deadline for e in list(self._episodes.values()) if e.turns is not None]
        nearest = min(deadlines, default=math.inf)
        pipes = [host.process.connection for host in list(self._hosts)]
        try:
            return bool(wait(pipes, max(0.0, min(timeout, nearest - now)))) or nearest <= now
        except OSError:  # another thread has closed one
            return True

    def answers(self) -> list[Answer]:
        """Return the answers that have come."""
        # Twice, because a process that has died is replaced meanwhile, which takes seconds.
        for _ in range(2):
            ready = wait([host.process.connection for host in self._hosts], 0)
            for host in [host for host in self._hosts if host.process.connection in ready]:
                self._received(host)
        now = time.monotonic()
        late = [
            e.host for e in self._episodes.values() if e.turns is not None and e.deadline <= now
        ]
        for host in {host for host in late if host is not None}:
            why = f"exceeded its deadline of {self.timeout_s:g} s and blocked its process"
            self._lose(host, "timed_out", why)
        found, self._answers = self._answers, []
        return found

    def close(self) -> None:
        """Let the processes close their environments, for at most a few seconds, and kill them and
        what they have started. All episodes are dropped."""
        for host in self._hosts:
            host.outbox.put(None)
        left, until = [host.process.connection for host in self._hosts], time.monotonic() + CLOSE_S
        while left and (ended := wait(left, max(0.0, until - time.monotonic()))):
            for connection in cast("list[Connection]", ended):
                try:
                    connection.recv_bytes(MAX_BYTES)  # of a call that was in flight
                except (EOFError, OSError):
                    left.remove(connection)
        kill_all(self._all, os.getpid())
        for held in (self._episodes, self._hosts, self._suspects, self._answers):
            held.clear()

    def _send(self, number: int, episode: _Episode, *, alone: bool = False) -> None:
        """Send the call of an episode to its process, or to another one if it has none."""
        host = episode.host or self._host(alone)
        new = number not in host.episodes  # the process needs the row and the file once
        host.episodes.add(number)
        episode.host = host
        ref = self.environment if new else self._imported
        about = (episode.row, episode.prompt) if new else ({}, ())
        turns, seen = (episode.turns or [])[0 if new else -1 :], dict(episode.seen) if new else {}
        play = Play(number, ref, *about, turns, self.timeout_s, self._tells_chat, seen)
        calls = len(play.turns) + 2 if new else 1  # also that of the class and of `reset`
        episode.budget = self.timeout_s * calls + _LATE_S
        start = 0.0 if host.ready else _START_S
        episode.deadline = time.monotonic() + episode.budget + start
        host.outbox.put(play)

    def _host(self, alone: bool) -> _Host:
        """Return the shared process with the fewest episodes, or a new process."""
        shared = [host for host in self._hosts if not host.alone]
        if not alone and len(shared) >= self._count:
            return min(shared, key=lambda host: len(host.episodes))
        program = "quadriga.agents.pool_worker"
        host = _Host(PoolProcess(self._memory_gb, program, self._start), alone)
        self._all.append(host.process)
        self._hosts.append(host)
        return host

    def _received(self, host: _Host) -> None:
        """Keep the answers of a process, or lose it."""
        try:
            readable = select.poll()  # `Connection.poll` makes a selector for each answer
            readable.register(host.process.connection.fileno(), select.POLLIN)
            while host in self._hosts and readable.poll(0):
                answer = FORM.validate_json(host.process.connection.recv_bytes(MAX_BYTES))
                episode = self._episodes.get(answer.episode)
                if answer == READY:
                    self._set_deadlines(host)
                elif episode is not None and episode.host is host and episode.turns is not None:
                    self._accept(answer, episode, host)
        except (EOFError, OSError, ValueError):
            self._lose(host, "crashed", "its process has died in its call")

    def _accept(self, answer: Answer, episode: _Episode, host: _Host) -> None:
        turns, episode.turns = episode.turns or [], None
        if answer.status in FAILURES:
            self.end(answer.episode)
        else:
            episode.seen[len(turns)] = answer.digest
            if host.alone:  # it was not to blame, and goes on in a shared process
                self._kill(host)
                episode.host = None
                self._try_suspects()
        self._answers.append(answer)

    def _set_deadlines(self, host: _Host) -> None:
        """Let the deadlines of the calls of a process begin: it has imported the file."""
        host.ready, now = True, time.monotonic()
        for episode in map(self._episodes.__getitem__, host.episodes):
            episode.deadline = now + episode.budget

    def _lose(self, host: _Host, status: Status, detail: str) -> None:
        """End a process that has died or stands still. The episode in its call has failed; of
        several, each is played again alone."""
        self._kill(host)
        for number in host.episodes:
            self._episodes[number].host = None
        in_call = [n for n in host.episodes if self._episodes[n].turns is not None]
        if len(in_call) == 1:
            self._answers.append(Answer(in_call[0], status, detail=detail))
            del self._episodes[in_call[0]]
        for number in sorted(in_call) if len(in_call) > 1 else ():
            self._episodes[number].deadline = math.inf
            self._suspects.append(number)
        self._try_suspects()

    def _try_suspects(self) -> None:
        """Let episodes that wait for a process of their own have one, a few at once."""
        while self._suspects and sum(host.alone for host in self._hosts) < self._count:
            number = self._suspects.popleft()
            self._send(number, self._episodes[number], alone=True)

    def _kill(self, host: _Host) -> None:
        host.process.kill()
        host.outbox.put(None)
        self._all.remove(host.process)
        self._hosts.remove(host)


def _send_all(process: PoolProcess, outbox: SimpleQueue[object]) -> None:
    try:
        while (message := outbox.get()) is not None:
            process.connection.send(message)
        with socket.socket(fileno=os.dup(process.connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_WR)  # it reads the end, and answers no more
    except OSError:  # it has ended, or reads no more: `answers` finds that its pipe is closed
        process.popen.terminate()
