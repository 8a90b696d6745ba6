"""Workers that record the order of their calls."""

from __future__ import annotations

import asyncio
import os

from quadriga.single_controller import Dispatch, Worker, register


class Recorder(Worker):
    """Records what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def record(self, value, *ballast):
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def record_each(self, value):
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self):
        seen, self.seen = self.seen, []
        return seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what(self, value, nested=None):
        return value, type(nested[0]).__name__ if nested else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call_other(self, group, values):
        """Call another group from this process."""
        return [group.record(value).get() for value in values]


class Interleaver(Recorder):
    """The same, with coroutine methods."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def record_later(self, value, *ballast, seconds=0.0):
        self.seen.append(value)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def most_running(self):
        return self.most


class Shutdown(Worker):
    """Has a method with the name of a method of the group, and leaves a trace when it is built."""

    def __init__(self, path) -> None:
        super().__init__()
        with open(path, "w") as file:
            file.write(str(os.getpid()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shutdown(self): ...
