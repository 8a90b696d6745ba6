"""Random operations on batches, each with its index into the rows of the model."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING

import torch
from chaos_model import Rows
from chaos_world import Tracked

from quadriga import DataProto

if TYPE_CHECKING:
    from chaos_program import Program

LARGEST_ROWS = 40


def permute(program: Program, rng: random.Random) -> None:
    """Put the rows of a copy in another order, in place."""
    tracked = program.pick_ready(rng)
    order = rng.sample(range(len(tracked.rows)), len(tracked.rows))
    with program.world.operation("reorder", tracked.sources):
        data = tracked.data.select()
        data.reorder(torch.tensor(order))
    finish(program, rng, data, tracked.rows.take(order), tracked)


def index(program: Program, rng: random.Random) -> None:
    """Take rows by a list, a mask or a slice."""
    tracked = program.pick_ready(rng)
    count = len(tracked.rows)
    form = rng.choice(["list", "mask", "slice"])
    if form == "list":
        rows = [rng.randrange(count) for _ in range(rng.choice([6, 12]))]
        key: object = rows
    elif form == "mask":
        mask = [True] + [rng.random() < 0.7 for _ in range(count - 1)]
        rows, key = [i for i, keep in enumerate(mask) if keep], torch.tensor(mask)
    else:
        stop = rng.randint(1, count)
        rows, key = list(range(0, stop)), slice(0, stop)
    with program.world.operation(f"index by {form}", tracked.sources):
        data = tracked.data[key]
    finish(program, rng, data, tracked.rows.take(rows), tracked)


def chunk_concat(program: Program, rng: random.Random) -> None:
    """Split a batch and join its parts in another order."""
    tracked = program.pick_ready(rng)
    count = rng.choice([n for n in (1, 2, 3) if len(tracked.rows) % n == 0])
    order = rng.sample(range(count), count)
    size = len(tracked.rows) // count
    with program.world.operation("chunk and concat", tracked.sources):
        pieces = tracked.data.chunk(count)
        data = DataProto.concat([pieces[i] for i in order])
    rows = [row for i in order for row in range(i * size, (i + 1) * size)]
    finish(program, rng, data, tracked.rows.take(rows), tracked)


def select_union(program: Program, rng: random.Random) -> None:
    """Take a batch apart by fields and join the parts again."""
    tracked = program.pick_ready(rng)
    arrays = [key for key in tracked.rows.columns if key == "name"]
    tensors = [key for key in tracked.rows.columns if key != "name"]
    left = [key for key in tensors if key == "id" or rng.random() < 0.5]
    right = [key for key in tensors if key not in left or rng.random() < 0.3]
    with program.world.operation("select and union", tracked.sources):
        data = tracked.data.select(left, []).union(tracked.data.select(right, arrays))
    finish(program, rng, data, tracked.rows, tracked)


def read(program: Program, rng: random.Random) -> None:
    """Compare a batch. Half of the time a copy is read, and the fields of the batch stay remote."""
    tracked = program.pick_ready(rng)
    if rng.random() < 0.5:
        tracked = Tracked(tracked.data.select(), tracked.rows, tracked.sources)
    program.world.check(tracked, "a kept batch")


def write(program: Program, rng: random.Random) -> None:
    """Write to a deep copy. The original keeps its values."""
    tracked = program.pick_ready(rng)
    with program.world.operation("write to a copy", tracked.sources):
        copied = copy.deepcopy(tracked.data)
        copied.batch["x"] += 1
    program.world.check(tracked, "the original of a copy")


def finish(
    program: Program, rng: random.Random, data: DataProto, rows: Rows, source: Tracked
) -> None:
    """Keep the result of an operation on a batch, and check it half of the time."""
    result = Tracked(data, rows, source.sources)
    if rng.random() < 0.5:
        program.world.check(result, "result of an operation")
    program.batches.append(result)
