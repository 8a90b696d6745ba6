"""Faults, injected one after the other by a thread of their own. Each has a rule for its error.

The choices of fault `n` depend on the seed and `n` only.
"""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos_model import as_batch, random_rows
from chaos_world import CALL_S, Expected, Generation, World

from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError, WorkerMethodError

PAUSE_S = 1.0
"""Seconds between two faults."""
SHORT_S = 2.0
"""The deadline of a call that cannot finish."""
MEDIUM_S = 20.0
"""The deadline of a call that must fail before it."""


class Faults:
    """The fault thread. `run` injects faults until the world is finished."""

    def __init__(self, world: World, folder: Path, seed: int) -> None:
        self.world, self.folder, self.seed = world, folder, seed
        self._numbers = itertools.count()

    def run(self) -> None:
        """Inject faults with pauses between them."""
        self.world.repeat(self.step, PAUSE_S)

    def step(self) -> None:
        """Inject one fault."""
        rng = random.Random(f"{self.seed}/faults/{next(self._numbers)}")
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        generation = rng.choice(self.world.slots).current
        if generation is not None:
            self.world.action(f"{fault.__name__} on {generation.slot.name}")
            fault(self, generation, rng)

    @contextmanager
    def gate(self) -> Iterator[str]:
        """Yield the path of a closed gate. The end of the block opens it."""
        path = self.folder / f"gate-{next(self._numbers)}"
        try:
            yield str(path)
        finally:
            path.touch()

    def kill(self, generation: Generation, rank: int) -> None:
        """Kill a rank."""
        self.world.mark_killed(generation)
        os.kill(generation.pids[rank], signal.SIGKILL)

    def restart(self, generation: Generation, rng: random.Random) -> None:
        """Replace a group some of whose ranks are dead."""
        self.world.end(generation)
        self.world.start(generation.slot, rng)


def kill(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """Kill an idle rank. The next call names it."""
    slot = generation.slot
    rank = rng.randrange(slot.size)
    faults.kill(generation, rank)
    time.sleep(rng.choice([0.0, 0.5, 2.0]))
    died = Expected(WorkerDiedError, slot, rank)
    with faults.world.operation("call after a kill", {generation}, MEDIUM_S, died):
        generation.group.note.options(timeout=MEDIUM_S)("x")
    faults.restart(generation, rng)


def kill_in_call(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """Kill a rank that runs a call while another controller thread waits for it."""
    slot = generation.slot
    rank = rng.randrange(slot.size)
    died = Expected(WorkerDiedError, slot, rank)
    with faults.gate() as gate:
        future = generation.group.wait_on.options(timeout=MEDIUM_S).submit(rank, gate)
        time.sleep(rng.choice([0.2, 1.0]))
        faults.kill(generation, rank)
        with faults.world.operation("get after a kill in a call", {generation}, MEDIUM_S, died):
            future.get()
    faults.restart(generation, rng)


def stop_beyond_deadline(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """Stop a rank for longer than the deadline of a call."""
    slot = generation.slot
    rank = rng.randrange(slot.size)
    late = Expected(CallTimeoutError, slot, rank)
    os.kill(generation.pids[rank], signal.SIGSTOP)
    try:
        with faults.world.operation("deadline of a stopped rank", {generation}, SHORT_S, late):
            generation.group.note.options(timeout=SHORT_S)(f"late{next(faults._numbers)}")
    finally:
        os.kill(generation.pids[rank], signal.SIGCONT)


def raise_through_future(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """A rank raises while another group waits for the result as its argument."""
    slot = generation.slot
    consumer = rng.choice([s for s in faults.world.slots if s is not slot]).current
    if consumer is None:
        return
    rank = rng.randrange(slot.size)
    batch = as_batch(random_rows(rng, 6, 40))
    raised = Expected(WorkerMethodError, consumer.slot)
    with faults.gate() as gate:
        made = generation.group.rows_or_raise.options(timeout=MEDIUM_S).submit(batch, rank, gate)
        method = consumer.group.affine.options(timeout=MEDIUM_S)
        with faults.world.operation("error in an argument", {consumer}, MEDIUM_S, raised):
            method(made, 2)


def cancel(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """Cancel a call that runs and one that waits behind it. Later calls work."""
    group, uses = generation.group, {generation}
    with faults.gate() as gate:
        first = group.wait_on.options(timeout=MEDIUM_S).submit(0, gate)
        second = group.note.options(timeout=MEDIUM_S).submit(f"off{next(faults._numbers)}")
        for future in (second, first):
            with faults.world.operation("cancel", uses, SHORT_S):
                future.cancel()
    for future in (first, second):
        get = faults.world.operation("get of a cancelled call", uses, MEDIUM_S)
        with get, suppress(QuadrigaError):
            future.get()
    with faults.world.operation("call after a cancelled one", uses):
        group.pid.options(timeout=CALL_S)()


def check_order(faults: Faults, generation: Generation, rng: random.Random) -> None:
    """Every rank has received the calls of all threads in the same order."""
    with faults.world.operation("notes", {generation}):
        notes = generation.group.notes.options(timeout=CALL_S)()
    # Only tokens that all ranks have: the calls that this one has overtaken are not compared.
    shared = set(notes[0]).intersection(*notes[1:])
    orders = [[token for token in tokens if token in shared] for tokens in notes]
    for rank, order in enumerate(orders[1:], start=1):
        wrong = [i for i, (a, b) in enumerate(zip(orders[0], order, strict=True)) if a != b]
        if wrong:
            at = slice(max(0, wrong[0] - 1), wrong[0] + 3)
            message = f"rank 0 ran {orders[0][at]}, rank {rank} ran {order[at]}"
            faults.world.violation("order differs", f"{generation.slot.name}: {message}")
            return


FAULTS: dict[Callable[[Faults, Generation, random.Random], None], int] = {
    kill: 2,
    kill_in_call: 2,
    stop_beyond_deadline: 2,
    raise_through_future: 3,
    cancel: 3,
    check_order: 5,
}
"""Every fault with its weight."""
