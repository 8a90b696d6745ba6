"""An environment whose turns name what it does."""

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quadriga.agents.environments import Done, Observation


class Environment:
    def __init__(self, greeting: str | None = None):
        self.greeting, self.turns = greeting, []

    async def reset(self, row):
        self.row = row
        return self.greeting

    async def step(self, action):
        self.turns.append(action.text)
        if action.text == "sleep":
            await asyncio.sleep(0.3)
        elif action.text == "hang":
            await asyncio.sleep(100)
        elif action.text == "block":
            time.sleep(100)
        elif action.text == "die":
            os._exit(3)
        elif action.text == "raise":
            raise ValueError("of the user")
        elif action.text == "nothing":
            return None
        elif action.text == "flood":
            return "x" * (1 << 21)
        elif action.text == "random":
            return Observation(str(random.SystemRandom().random()))
        elif action.text == "done":
            return Done(reward=1.0, metrics={"turns": len(self.turns)})
        return Observation(f"{self.row['name']} {self.turns}", reward=0.5, metrics={"seen": 1})


EMPTY = {"role": "user", "content": ""}


class Odd(Environment):
    """Returns what is named, which no run may end of."""

    def __init__(self, words):
        super().__init__()
        self.words = words

    async def step(self, action):
        if action.text == "cancelled":
            task = asyncio.create_task(asyncio.sleep(9))
            task.cancel()
            await task
        if action.text == "leaves a task":
            asyncio.get_running_loop().call_later(0.01, sys.exit, 3)
        if action.text == "slow":
            await asyncio.sleep(0.3)
        if action.text == "block":
            time.sleep(100)
        return {
            "generator": Observation({"role": "user", "content": word} for word in self.words),
            "large": Done(1e39),
            "numpy": Done(np.float32(0.5), {"hit": np.bool_(True)}),
            "key": Done(1.0, {("a", 1): 1.0}),
            "own": Done(1.0, {"raised": 1.0}),
            "surrogate": Observation("x\udc80"),
            "heavy": Observation([{**EMPTY, "more": "x" * (1 << 23)}]),
            "none": Done(None),
            "bytes": Done(b"1"),
            "nested": Observation([{**EMPTY, "more": json.loads("[" * 300 + "]" * 300)}]),
        }.get(action.text, "fine")


class Closing(Environment):
    """Leaves a file when it is closed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def close(self):
        Path(self.folder, self.row["name"]).touch()


class Stops(Environment):
    def reset(self, row): ...

    def step(self, action):
        return next(iter([]))


@dataclass
class Rewarding:
    """Gives a reward before the first turn."""

    size: int = 1

    def reset(self, row):
        return Observation("hello", reward=1.0)

    def step(self, action): ...


class Threaded(Environment):
    def reset(self, row):
        self.row = row

    def step(self, action):
        if action.text == "hang":
            time.sleep(100)
        if action.text == "interrupt":
            raise KeyboardInterrupt
        return Observation(action.text)


class NoStep:
    def reset(self, row): ...


class NoArgument:
    def reset(self, row): ...

    def step(self): ...
