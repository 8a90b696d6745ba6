"""The random program of one controller thread: calls, each checked.

The choices of step `n` of thread `t` depend on the seed, `t` and `n` only.
"""

import random
from collections.abc import Callable

import chaos_model
from chaos_model import as_batch, random_rows, take
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
        """Run steps."""
        self.world.repeat(self.step)
        self.batches.clear()

    def step(self) -> None:
        """Run one step. After an error, batches whose group was killed are dropped."""
        rng = random.Random(f"{self.seed}/{self.name}/{self.steps}")
        self.steps += 1
        action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        try:
            action(self, rng)
        except StepEnded:
            whole = (one for one in self.batches if not any(g.killed for g in one.sources))
            self.batches = list(whole)
            self.world.finished.wait(PAUSE_S)
        del self.batches[:-KEPT]

    def pick(self, rng: random.Random) -> Tracked:
        """Return one of the batches, or a new one whose rows divide among the ranks of every slot.
        It may be a future."""
        if not self.batches or rng.random() < 0.25:
            rows = random_rows(rng, 6 * rng.randint(1, 3), rng.choice(WIDTHS))
            self.batches.append(Tracked(as_batch(rows), rows))
        return rng.choice(self.batches)

    def slot(self, rng: random.Random, coroutines: bool = False) -> tuple[Slot, Generation]:
        """Return a slot and its group."""
        slots = [s for s in self.world.slots if s.has_coroutines or not coroutines]
        slot = rng.choice(slots)
        if slot.current is None:
            raise StepEnded(f"{slot.name} has no group")
        return slot, slot.current


def call(program: Program, rng: random.Random) -> None:
    """Call a method, blocking or through a future that is kept."""
    slot, generation = program.slot(rng)
    tracked = program.pick(rng)
    program.world.wait(tracked)
    method = rng.choice(list(chaos_model.METHODS))
    number = rng.choice(WIDTHS) if method == "fresh" else rng.randint(2, 5)
    uses = tracked.sources | {generation}
    bound = getattr(generation.group, method).options(timeout=CALL_S)
    keep_future = rng.random() < 0.4
    with program.world.operation(f"call {slot.name}.{method}({number})", uses):
        result = bound.submit(tracked.data, number) if keep_future else bound(tracked.data, number)
    result = Tracked(result, chaos_model.METHODS[method](tracked.rows, number), uses)
    if not keep_future and rng.random() < 0.6:
        program.world.check(result, f"result of {slot.name}.{method}")
    program.world.check(tracked, "the argument after the call")
    program.batches.append(result)


def call_chain(program: Program, rng: random.Random) -> None:
    """Pass futures as arguments through groups of other sizes, without waiting."""
    current = program.pick(rng)
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
    size = len(tracked.rows["id"]) // count
    with program.world.operation("split of a future", tracked.sources):
        pieces = tracked.data.chunk(count)
        joined = DataProtoFuture.concat([pieces[i] for i in order])
    index = [row for i in order for row in range(i * size, (i + 1) * size)]
    return Tracked(joined, take(tracked.rows, index), tracked.sources)


def call_coroutines(program: Program, rng: random.Random) -> None:
    """Start several calls of a coroutine method whose results share one buffer in each rank."""
    slot, generation = program.slot(rng, coroutines=True)
    whole = random_rows(rng, 6, rng.choice(WIDTHS[2:]))
    rows = {key: whole[key] for key in ("id", "x")}
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
    group = generation.group
    later = slot.has_coroutines and rng.random() < 0.7
    method = (group.note_later if later else group.note).options(timeout=CALL_S)
    with program.world.operation(f"note on {slot.name}", frozenset({generation})):
        method(f"{program.name}-{program.steps}")


def read(program: Program, rng: random.Random) -> None:
    """Compare a batch that was kept."""
    program.world.check(program.pick(rng), "a kept batch")


ACTIONS: dict[Callable[[Program, random.Random], None], int] = {
    call: 20,
    call_chain: 10,
    call_coroutines: 6,
    call_note: 8,
    read: 6,
}
"""Every action with its weight."""
