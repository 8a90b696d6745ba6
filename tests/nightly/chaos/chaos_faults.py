"""Faults, injected one after the other by a thread of their own. Each has a rule for its error.

The choices of fault `n` depend on the seed and `n` only.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from chaos_cluster import ThreeNodes, send_signal, stopped
from chaos_model import as_batch, random_rows
from chaos_world import CALL_S, Generation, Slot, StepEnded, World

from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError, WorkerMethodError

PAUSE_S = 1.0
"""Seconds between two faults."""
SHORT_S = 2.0
"""The deadline of a call that cannot finish."""
MEDIUM_S = 20.0
"""The deadline of a call that must fail before it."""


class Faults:
    """The fault thread. `run` injects faults until the world is finished."""

    def __init__(self, world: World, nodes: ThreeNodes, seed: int) -> None:
        self.world, self.nodes, self.seed = world, nodes, seed
        self.count = 0
        self._gates = itertools.count()

    def run(self) -> None:
        """Inject faults with pauses between them."""
        while not self.world.finished.wait(PAUSE_S):
            self.step()

    def step(self) -> None:
        """Inject one fault."""
        rng = random.Random(f"{self.seed}/faults/{self.count}")
        self.count += 1
        fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        slot = rng.choice(self.world.slots)
        if slot.current is None:
            return
        name = fault.__name__
        self.world.report.action(f"[faults] {self.count}: {name} on {slot.name}")
        self.world.report.count_fault(name)
        try:
            fault(self, slot, slot.current, rng)
        except StepEnded:
            return
        except Exception as error:  # recorded as a violation, the program goes on
            text = f"{type(error).__name__}: {error}"
            self.world.report.violation("error outside of an operation", text, f"fault {name}")

    @contextmanager
    def gate(self) -> Iterator[str]:
        """Yield the path of a closed gate. The end of the block opens it."""
        path = self.nodes.folder / f"gate-{next(self._gates)}"
        try:
            yield str(path)
        finally:
            path.touch()

    def expect(
        self,
        label: str,
        kinds: tuple[type[QuadrigaError], ...],
        deadline_s: float,
        run: Callable[[], object],
        generation: Generation,
        rank: int | None = None,
    ) -> None:
        """Run a call that must raise one of `kinds`, which must name the slot and the rank.

        An error that another fault explains is accepted too.
        """
        with self.world.watchdog.watch(label, deadline_s) as operation:
            try:
                value = run()
            except kinds as error:
                error.__traceback__ = None
                # Several ranks may be late: those that run calls of other threads are too.
                ranks = {vars(error).get("rank"), *vars(error).get("stacks", ())}
                seen = vars(error).get("role"), ranks
                if rank is not None and (seen[0] != generation.slot.name or rank not in ranks):
                    message = f"expected {generation.slot.name}, rank {rank}, got {seen}: {error}"
                    self.world.report.violation("wrong name in an error", message, label)
                self.world.report.count_error(error)
                return
            except Exception as error:
                self.world.judge(error, operation, frozenset({generation}))
                error.__traceback__ = None
                return
        names = " or ".join(kind.__name__ for kind in kinds)
        self.world.report.violation("no error", f"expected {names}, got {value!r:.200}", label)

    def restart(self, generation: Generation, rng: random.Random) -> None:
        """Replace a group some of whose ranks are dead."""
        slot = generation.slot
        slot.current = None
        self.world.end(generation)
        self.world.start(slot, rng)


def kill(faults: Faults, slot: Slot, generation: Generation, rng: random.Random) -> None:
    """Kill an idle rank. The next call names it."""
    rank = rng.randrange(slot.size)
    faults.world.mark_killed(generation)
    send_signal(generation.pids[rank], signal.SIGKILL)
    time.sleep(rng.choice([0.0, 0.5, 2.0]))
    method = generation.group.note.options(timeout=MEDIUM_S)
    died = (WorkerDiedError,)
    faults.expect(
        f"call after kill of {slot.name} {rank}",
        died,
        MEDIUM_S,
        lambda: method("x"),
        generation,
        rank,
    )
    faults.restart(generation, rng)


def kill_in_call(faults: Faults, slot: Slot, generation: Generation, rng: random.Random) -> None:
    """Kill a rank that runs a call while another controller thread waits for it."""
    rank = rng.randrange(slot.size)
    with faults.gate() as gate:
        future = generation.group.wait_on.options(timeout=MEDIUM_S).submit(rank, gate)
        time.sleep(rng.choice([0.2, 1.0]))
        faults.world.mark_killed(generation)
        send_signal(generation.pids[rank], signal.SIGKILL)
        died = (WorkerDiedError,)
        label = f"get after kill of {slot.name} {rank} in a call"
        faults.expect(label, died, MEDIUM_S, future.get, generation, rank)
    faults.restart(generation, rng)


def stop_beyond_deadline(
    faults: Faults, slot: Slot, generation: Generation, rng: random.Random
) -> None:
    """Stop a rank for longer than the deadline of a call."""
    rank = rng.randrange(slot.size)
    method = generation.group.note.options(timeout=SHORT_S)
    with stopped(generation.pids[rank]):
        late = (CallTimeoutError,)
        label = f"deadline of stopped {slot.name} {rank}"
        faults.expect(label, late, SHORT_S, lambda: method(f"late{faults.count}"), generation, rank)


def raise_through_future(
    faults: Faults, slot: Slot, generation: Generation, rng: random.Random
) -> None:
    """The same, and another group waits for the result as its argument."""
    other = rng.choice([s for s in faults.world.slots if s is not slot])
    consumer = other.current
    if consumer is None:
        return
    rank = rng.randrange(slot.size)
    batch = as_batch(random_rows(rng, 6, 40))
    with faults.gate() as gate:
        made = generation.group.rows_or_raise.options(timeout=MEDIUM_S).submit(batch, rank, gate)
        method = consumer.group.affine.options(timeout=MEDIUM_S)
        label = f"error of {slot.name} {rank} in an argument of {other.name}"
        raised = (WorkerMethodError,)
        faults.expect(label, raised, MEDIUM_S, lambda: method(made, 2), consumer)


def cancel(faults: Faults, slot: Slot, generation: Generation, rng: random.Random) -> None:
    """Cancel a call that runs and one that waits behind it. Later calls work."""
    with faults.gate() as gate:
        first = generation.group.wait_on.options(timeout=MEDIUM_S).submit(0, gate)
        second = generation.group.note.options(timeout=MEDIUM_S).submit(f"cancelled{faults.count}")
        for future in (second, first):
            with faults.world.watchdog.watch(f"cancel on {slot.name}", SHORT_S):
                future.cancel()
    for future in (first, second):
        with faults.world.watchdog.watch(f"get of a cancelled call on {slot.name}", MEDIUM_S):
            try:
                future.get()
            except QuadrigaError as error:
                error.__traceback__ = None
                faults.world.report.count_error(error)
    with faults.world.operation(f"call after cancel on {slot.name}", frozenset({generation})):
        generation.group.pid.options(timeout=CALL_S)()


def check_order(faults: Faults, slot: Slot, generation: Generation, rng: random.Random) -> None:
    """Every rank has received the calls of all threads in the same order."""
    with faults.world.operation(f"notes of {slot.name}", frozenset({generation})):
        notes = generation.group.notes.options(timeout=CALL_S)()
    # Only tokens that all ranks have: the calls that this one has overtaken are not compared.
    shared = set(notes[0]).intersection(*notes[1:])
    orders = [[token for token in tokens if token in shared] for tokens in notes]
    for rank, order in enumerate(orders[1:], start=1):
        wrong = [i for i, (a, b) in enumerate(zip(orders[0], order, strict=True)) if a != b]
        if wrong:
            at = slice(max(0, wrong[0] - 1), wrong[0] + 3)
            message = f"{slot.name}: rank 0 ran {orders[0][at]}, rank {rank} ran {order[at]}"
            faults.world.report.violation("order differs between ranks", message, "notes")
            return


FAULTS: dict[Callable[[Faults, Slot, Generation, random.Random], None], int] = {
    kill: 2,
    kill_in_call: 2,
    stop_beyond_deadline: 2,
    raise_through_future: 3,
    cancel: 3,
    check_order: 5,
}
"""Every fault with its weight."""
