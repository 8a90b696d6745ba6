"""An environment whose turns name what it does."""

import asyncio
import os
import random
import time

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


class Threaded(Environment):
    def reset(self, row):
        self.row = row

    def step(self, action):
        if action.text == "hang":
            time.sleep(100)
        return Observation(action.text)


class NoStep:
    def reset(self, row): ...


class NoArgument:
    def reset(self, row): ...

    def step(self): ...
