"""The random program of one controller thread: calls, each checked.

The choices of step `n` of thread `t` depend on the seed, `t` and `n` only.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import chaos_model
from chaos_model import as_batch, random_rows
from chaos_world import CALL_S, Generation, Slot, StepEnded, Tracked, World

from quadriga.protocol import DataProtoFuture

WIDTHS = (3, 40, 3000, 60_000)
"""Widths of `x`: 12 bytes to 240 KB per row. Larger fields are stored, small ones sent inline."""
KEPT = 4
"""Batches that a thread keeps."""
PAUSE_S = 0.1
"""The pause after a failed step. A group that was killed takes seconds to start again."""


class Program:
    """One thread's program. `run` executes steps until the world is finished."""

    def __init__(self, world: World, name: str, seed: int) -> None:
        self.world, self.name, self.seed = world, name, seed
        self.batches: list[Tracked] = []
        self.steps = 0

    def run(self) -> None:
        """Run steps. An error outside of an operation is a violation: the program is wrong."""
        while not self.world.finished.is_set():
            self.step()
        self.batches.clear()

    def step(self) -> None:
        """Run one step."""
        rng = random.Random(f"{self.seed}/{self.name}/{self.steps}")
        self.steps += 1
        action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        where = f"{self.name} step {self.steps}: {action.__name__}"
        try:
            action(self, rng)
        except StepEnded:
            self.forget_lost()
            self.world.finished.wait(PAUSE_S)
        except Exception as error:  # recorded as a violation, the program goes on
            text = f"{type(error).__name__}: {error}"
            self.world.report.violation("error outside of an operation", text, where)
        del self.batches[: max(0, len(self.batches) - KEPT)]

    def forget_lost(self) -> None:
        """Drop batches whose group was killed."""
        self.batches = [
            tracked
            for tracked in self.batches
            if all(generation.killed_at is None for generation in tracked.sources)
        ]

    def pick(self, rng: random.Random) -> Tracked:
        """Return one of the batches, or a new one."""
        if not self.batches or rng.random() < 0.25:
            self.batches.append(new_batch(rng))
        return rng.choice(self.batches)

    def pick_ready(self, rng: random.Random) -> Tracked:
        """Return one of the batches. If it is a future, wait for it."""
        tracked = self.pick(rng)
        if isinstance(tracked.data, DataProtoFuture):
            with self.world.operation("get of a kept future", tracked.sources):
                tracked.data = tracked.data.get()
        return tracked

    def slot(self, rng: random.Random, coroutines: bool = False) -> tuple[Slot, Generation]:
        """Return a slot and its group."""
        slots = [s for s in self.world.slots if s.has_coroutines or not coroutines]
        slot = rng.choice(slots)
        if slot.current is None:
            raise StepEnded(f"{slot.name} has no group")
        return slot, slot.current


def new_batch(rng: random.Random) -> Tracked:
    """Return a local batch. Its number of rows divides among the ranks of every slot."""
    rows = random_rows(rng, 6 * rng.randint(1, 3), rng.choice(WIDTHS))
    return Tracked(as_batch(rows), rows)


# Calls


def call(program: Program, rng: random.Random) -> None:
    """Call a method, blocking or through a future that is kept."""
    slot, generation = program.slot(rng)
    tracked = program.pick_ready(rng)
    method = rng.choice(list(chaos_model.METHODS))
    number = rng.choice(WIDTHS) if method == "fresh" else rng.randint(2, 5)
    uses = tracked.sources | {generation}
    bound = getattr(generation.group, method).options(timeout=CALL_S)
    keep_future = rng.random() < 0.4
    label = f"call {slot.name}.{method}({number}) of {len(tracked.rows)} rows"
    with program.world.operation(label, uses):
        result = bound.submit(tracked.data, number) if keep_future else bound(tracked.data, number)
    result = Tracked(result, chaos_model.METHODS[method](tracked.rows, number), uses)
    if not keep_future and rng.random() < 0.6:
        program.world.check(result, f"result of {slot.name}.{method}")
    program.world.check(tracked, "the argument after the call")
    program.batches.append(result)


def call_chain(program: Program, rng: random.Random) -> None:
    """Pass futures as arguments through groups of other sizes, without waiting."""
    tracked = program.pick(rng)
    current = Tracked(tracked.data, tracked.rows, tracked.sources)
    for _ in range(rng.randint(2, 4)):
        slot, generation = program.slot(rng)
        factor = rng.randint(2, 5)
        uses = current.sources | {generation}
        method = generation.group.affine.options(timeout=CALL_S)
        with program.world.operation(f"submit {slot.name}.affine({factor})", uses):
            future = method.submit(current.data, factor)
        current = Tracked(future, chaos_model.affine(current.rows, factor), uses)
    if rng.random() < 0.2:
        return  # nothing reads this future
    if rng.random() < 0.5:
        current = chunked(program, rng, current)
    program.world.check(current, "a chain of futures")
    program.batches.append(current)


def chunked(program: Program, rng: random.Random, tracked: Tracked) -> Tracked:
    """Split a future and join its parts in another order, without waiting."""
    count = rng.choice([2, 3])
    order = rng.sample(range(count), count)
    size = len(tracked.rows) // count
    with program.world.operation("split of a future", tracked.sources):
        pieces = tracked.data.chunk(count)
        joined = DataProtoFuture.concat([pieces[i] for i in order])
    index = [row for i in order for row in range(i * size, (i + 1) * size)]
    return Tracked(joined, tracked.rows.take(index), tracked.sources)


def call_coroutines(program: Program, rng: random.Random) -> None:
    """Start several calls of a coroutine method whose results share one buffer in each rank."""
    slot, generation = program.slot(rng, coroutines=True)
    rows = random_rows(rng, 6, rng.choice(WIDTHS[2:])).select(["id", "x"])
    uses = frozenset({generation})
    started = []
    method = generation.group.affine_later.options(timeout=CALL_S)
    for factor in range(2, 2 + rng.randint(2, 6)):
        with program.world.operation(f"submit {slot.name}.affine_later({factor})", uses):
            future = method.submit(as_batch(rows), factor, rng.random() * 0.05)
        started.append(Tracked(future, chaos_model.affine(rows, factor), uses))
    rng.shuffle(started)
    for tracked in started:
        program.world.check(tracked, f"{slot.name}.affine_later")


def call_note(program: Program, rng: random.Random) -> None:
    """Leave a token on every rank. At the end all ranks have the same order of tokens."""
    slot, generation = program.slot(rng)
    token = f"{program.name}-{program.steps}"
    group = generation.group
    later = slot.has_coroutines and rng.random() < 0.7
    method = (group.note_later if later else group.note).options(timeout=CALL_S)
    with program.world.operation(f"note on {slot.name}", frozenset({generation})):
        method(token)


def read(program: Program, rng: random.Random) -> None:
    """Compare a batch that was kept."""
    program.world.check(program.pick_ready(rng), "a kept batch")


ACTIONS: dict[Callable[[Program, random.Random], None], int] = {
    call: 20,
    call_chain: 10,
    call_coroutines: 6,
    call_note: 8,
    read: 6,
}
"""Every action with its weight."""
