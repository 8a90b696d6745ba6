"""The chaos program reports planted faults, and a minute of it ends without a violation."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chaos_model
import chaos_world
import pytest
import torch
from chaos_faults import Faults, check_order
from chaos_model import as_batch, differences, take
from chaos_program import Program
from chaos_workers import ChaosWorker, CoroutineWorker
from chaos_world import Generation, Slot, StepEnded, World

from quadriga.backends import get_backend
from quadriga.errors import CallTimeoutError, LengthError, WorkerDiedError

STEPS = 60
TESTS = Path(__file__).parents[2]


@pytest.fixture
def world():
    """Two groups on the local backend, where the programs run in a fraction of a second."""
    world = World(get_backend("local"))
    for name, cls, ranks in [("left", ChaosWorker, 2), ("tide", CoroutineWorker, 3)]:
        slot = Slot(name, cls, (ranks,), world.backend.resource_pool([ranks]))
        world.slots.append(slot)
        world.start(slot, random.Random(0))
    return world


def kinds(world):
    return [violation["kind"] for violation in world.violations]


def test_a_wrong_value_is_reported(world, monkeypatch):
    right = chaos_model.affine

    def wrong(rows, factor):
        expected = right(rows, factor)
        expected["x"][-1, -1] += 1
        return expected

    program = Program(world, "thread0", seed=0)
    for _ in range(STEPS):
        program.step()
    assert kinds(world) == []
    monkeypatch.setitem(chaos_model.METHODS, "affine", wrong)
    for _ in range(STEPS):
        program.step()
    assert {*kinds(world)} == {"wrong value"}
    assert "field 'x': " in world.violations[0]["message"]
    assert any("affine" in action for action in world.violations[0]["actions"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: take(rows, [0, 1]), "3 rows, expected 2"),
        (lambda rows: take(rows, [0, 2, 1]), "field 'id': "),
        (lambda rows: {"id": rows["id"]}, "fields ['id', 'x'], expected ['id']"),
        (lambda rows: rows | {"x": rows["x"].double()}, "'dtype'"),
        (lambda rows: rows | {"x": rows["x"][:, :2]}, "'shape'"),
    ],
)
def test_every_difference_is_found(change, message):
    rows = {"id": torch.arange(3), "x": torch.ones(3, 4)}
    assert differences(as_batch(rows), rows) == []
    assert message in "; ".join(differences(as_batch(rows), change(rows)))


DIED = {"role": "left", "rank": 1, "method": "note"}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerDiedError("left.note died", **DIED), None),
        (OSError("raw"), "untyped error"),
        (WorkerDiedError("left died", **DIED | {"rank": 5}), "no rank"),
        (WorkerDiedError("a rank died", **DIED), "no role"),
        (WorkerDiedError("left died", role="left", rank=1), "no method"),
        (LengthError("5 rows"), "unexpected error"),
        (CallTimeoutError("left.note", **DIED), "deadline"),
    ],
)
def test_errors_of_the_wrong_kind_are_reported_after_a_kill(world, error, kind):
    generation = world.slots[0].current
    world.mark_killed(generation)
    with pytest.raises(StepEnded), world.operation("call", {generation}):
        raise error
    assert kinds(world) == ([] if kind is None else [kind])


def test_late_operations_and_processes_that_are_left_are_reported(world, monkeypatch):
    monkeypatch.setattr(chaos_world, "SETTLE_S", 0.2)
    with world.operation("call", deadline_s=-20.0):
        pass
    world.end(Generation(world.slots[0], world.slots[0].current.group, [os.getpid()], False))
    assert kinds(world) == ["late", "leaked process"]


@pytest.mark.parametrize(
    ("notes", "violations"),
    [
        ([["a", "b", "c"], ["a", "b"]], []),
        ([["a", "b", "c"], ["b", "a", "c"]], ["order differs"]),
    ],
)
def test_ranks_with_another_order_of_calls_are_reported(world, notes, violations):
    method = SimpleNamespace(options=lambda timeout: lambda: notes)
    generation = Generation(world.slots[0], SimpleNamespace(notes=method), [], False)
    check_order(Faults(world, None, 0), generation, random.Random(0))
    assert kinds(world) == violations


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_chaos(seed):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("chaos_run.py"), "60", str(seed)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    counts = json.loads(done.stdout[done.stdout.index("{") :])["counts"]
    assert counts["call"] + counts["submit"] > 100 and counts["kill"] + counts["kill_in_call"] > 1
