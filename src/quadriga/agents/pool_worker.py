"""The program of a process that hosts episodes (`EpisodePool`).

Each call of an environment is a task of one event loop. Methods that are no coroutines run in
threads, so an environment that sleeps or hangs holds its own episode alone.
"""

import asyncio
import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn, cast

from quadriga.agents.environments import (
    Done,
    Environment,
    EnvironmentRef,
    Message,
    Observation,
    checked,
)
from quadriga.agents.pool import CLOSE_S, FORM, MAX_BYTES, READY, Answer, End, Play, digest, encoded
from quadriga.agents.program import Program, Request
from quadriga.agents.sandbox import python
from quadriga.agents.tool_calls import Tool
from quadriga.containment import describe
from quadriga.errors import InputError
from quadriga.rewards.pool_worker import run_program

_log = logging.getLogger("quadriga")
_THREADS = 1024  # calls of methods that are no coroutines, at once


class Host:
    """The environments of this process by the numbers of their episodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._found: dict[int, _Hosted] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._class: Callable[..., Environment] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        # A thread sends, so that this process also reads while the pool sends.
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        Thread(target=self._send, daemon=True).start()

    async def serve(self) -> None:
        """Answer the messages of the pool until it closes its end."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        loop.add_reader(self._connection.fileno(), self._receive)
        await self._ended.wait()
        loop.remove_reader(self._connection.fileno())
        for number in [*self._found]:
            self._end(number)
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._ended.set()
            return
        if isinstance(message, End):
            self._end(message.episode)
        else:
            self._tasks[message.episode] = asyncio.create_task(self._play(message))

    def _end(self, episode: int) -> None:
        if (task := self._tasks.pop(episode, None)) is not None:
            task.cancel()
        if (own := self._found.pop(episode, None)) is not None:
            self._closing.add(closing := asyncio.create_task(own.close()))
            closing.add_done_callback(self._closing.discard)

    async def _play(self, play: Play) -> None:
        """Call the environment, and send its answer."""
        try:
            # The import of the file is not part of the deadline of a call.
            if self._class is None:
                self._class = _class_of(play.environment)
                self._answers.put(encoded(vars(READY)))
            message = encoded(vars(await self._answered(play, self._class)))
            if len(message) > MAX_BYTES:
                raise InputError(f"an answer has {len(message)} bytes, at most {MAX_BYTES} may be")
            try:
                FORM.validate_json(message)  # as the pool reads it
            except ValueError as error:
                raise InputError(f"an answer is nested too deeply: {message[:80]!r}") from error
        except BaseException as error:  # code of the user may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the episode has ended
            answer = Answer(play.episode, "raised", detail=describe(error))
            if isinstance(error, _LateError):
                late = f"exceeded its deadline of {play.timeout_s:g} s"
                answer = Answer(play.episode, "timed_out", detail=late)
            message = encoded(vars(answer))
        self._answers.put(message)

    def _send(self) -> None:
        with suppress(OSError):  # the pool has closed its end
            while True:
                self._connection.send_bytes(self._answers.get())

    async def _answered(self, play: Play, kind: Callable[..., Environment]) -> Answer:
        """Begin the episode, if this process does not have it, play its turns, and return the
        answer to the last one."""
        own, call = self._found.get(play.episode), partial(_call, play.timeout_s)
        turns, rewards, metrics = play.turns[-1:], list[float](), defaultdict[str, float](float)
        answer = Answer(play.episode, "observed")
        if own is None:
            turns = play.turns
            own = _Hosted(await call(partial(kind, **play.environment.options)), [*play.prompt])
            self._found[play.episode] = own
            found = checked(await call(own.environment.reset, dict(play.row)), ends=False)
            answer = own.answer(play, found)
            answer = _compared(answer, play, 0)
        for action in turns:
            found = checked(await call(own.environment.step, action), ends=True)
            own.chat.append({"role": "assistant", "content": action.text})
            answer = own.answer(play, found)
            answer = _compared(answer, play, action.turn)
            assert found is not None
            rewards.append(found.reward)
            for name, value in found.metrics.items():
                metrics[name] += value
        return replace(answer, rewards=rewards, metrics=dict(metrics))


def _class_of(ref: EnvironmentRef) -> Callable[..., Environment]:
    """Return what makes an environment. Raises as `EnvironmentRef.load`."""
    loaded = ref.load()
    if not isinstance(loaded, type) or "tool_format" in ref.options:
        Tool.of(python)  # imports what writes schemas, in seconds that no call has
    if isinstance(loaded, type):
        return loaded
    return cast("Callable[..., Environment]", partial(Program, loaded, ref.tool_format))


@dataclass
class _Hosted:
    """An environment, and the conversation in the context of its policy."""

    environment: Environment
    chat: list[Message]

    def answer(self, play: Play, found: Observation | Done | None) -> Answer:
        """Return what the policy sees next."""
        if not isinstance(found, Observation):
            return Answer(play.episode, "observed" if found is None else "done")
        assert not isinstance(found.messages, str)  # see `checked`
        messages = [dict(message) for message in found.messages]
        self.chat = [*([] if found.new_context else self.chat), *messages]
        answer = Answer(play.episode, "observed", messages, new_context=found.new_context)
        if isinstance(found, Request):
            self.chat = list(found.chat)
            answer = replace(
                answer, tools=found.tools, text=found.text, max_tokens=found.max_tokens
            )
        return replace(answer, chat=self.chat) if play.tells_chat else answer

    async def close(self) -> None:
        """Call the method `close` of the environment, if it has one."""
        close = getattr(self.environment, "close", None)
        try:
            if callable(close):
                await _returned(close)
        except BaseException as error:  # code of the user may raise anything
            _log.warning("close of an environment has failed: %s", describe(error))


def _compared(answer: Answer, play: Play, turn: int) -> Answer:
    """Return the answer with its digest.

    Raises:
        InputError: a turn that is played again has another answer than before.
    """
    ended, own = answer.status == "done" and turn < len(play.turns), digest(answer)
    if ended or own != play.seen.get(turn, own):
        raise InputError(
            f"the episode was begun again, and turn {turn} has another answer than before; draw "
            "random numbers of an environment with a seed of its row"
        )
    return replace(answer, digest=own)


class _LateError(Exception):
    """A call has exceeded its deadline."""


async def _call(timeout_s: float, method: Callable[..., Any], *arguments: object) -> Any:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await _returned(method, *arguments)
    except TimeoutError as error:
        raise _LateError if limit.expired() else error from error


async def _returned(method: Callable[..., Any], *arguments: object) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)

    def called() -> object:
        try:
            return method(*arguments)
        except StopIteration as error:  # asyncio cannot send it to the task that waits
            raise RuntimeError("StopIteration") from error

    found = await asyncio.to_thread(called)
    return await found if inspect.isawaitable(found) else found


def serve(connection: Connection) -> NoReturn:
    """Host episodes until the pool closes its end."""
    loop = asyncio.new_event_loop()
    serving = loop.create_task(Host(connection).serve())
    while not serving.done():
        try:
            loop.run_until_complete(serving)
        except (KeyboardInterrupt, SystemExit) as error:  # of a task that code of the user has left
            _log.warning("a task of an environment has failed: %s", describe(error))
    os._exit(0)  # threads that hang do not hold the process


if __name__ == "__main__":
    run_program(serve)
