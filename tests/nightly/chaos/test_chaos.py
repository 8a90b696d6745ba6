"""The chaos program reports planted faults, and a minute of it ends without a violation."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import chaos_model
import chaos_world
import pytest
import torch
from chaos_faults import Faults, check_order
from chaos_model import Rows, as_batch, differences
from chaos_program import Program
from chaos_workers import ChaosWorker, CoroutineWorker
from chaos_world import Generation, Report, Slot, StepEnded, Watchdog, World

from quadriga.backends import get_backend
from quadriga.errors import CallTimeoutError, LengthError, WorkerDiedError

STEPS = 60


@pytest.fixture
def world():
    report = Report(seed=0)
    watchdog = Watchdog(report, on_hang=lambda: None)
    yield World(get_backend("local"), watchdog, report)
    watchdog.stop()


def local_groups(world):
    """Two groups on the local backend, where the programs run in a fraction of a second."""
    for name, cls, nodes in [("left", ChaosWorker, (2,)), ("tide", CoroutineWorker, (3,))]:
        world.start(world.add_slot(name, cls, nodes), random.Random(0))
    return world


def killed_generation(slot, killed):
    generation = Generation(slot, None, [], watched=False)
    if killed:
        generation.killed_at = time.monotonic()
    return generation


def kinds(report):
    return [violation.kind for violation in report.violations]


def judged(world, error, killed):
    """The kinds of violations that an error of a call gives, with or without a kill before it."""
    slot = Slot("left", ChaosWorker, (2,), None)
    world.slots.append(slot)
    uses = frozenset({killed_generation(slot, killed)})
    with pytest.raises(StepEnded), world.operation("call", uses):
        raise error
    return kinds(world.report)


def test_a_wrong_value_is_reported(world, monkeypatch):
    right = chaos_model.affine

    def wrong(rows, factor):
        expected = right(rows, factor)
        expected.columns["x"][-1, -1] += 1
        return expected

    monkeypatch.setitem(chaos_model.METHODS, "affine", wrong)
    program = Program(local_groups(world), "thread0", seed=0)
    for _ in range(STEPS):
        program.step()
    assert "wrong value" in kinds(world.report)
    assert "field 'x': " in world.report.violations[0].message
    assert any("affine" in action for action in world.report.violations[0].actions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.take([0, 1]), "3 rows, expected 2"),
        (lambda rows: rows.take([0, 2, 1]), "field 'id': "),
        (lambda rows: rows.select(["id"]), "fields ['id', 'x'], expected ['id']"),
        (lambda rows: rows.replaced(x=rows.columns["x"].double()), "'dtype'"),
        (lambda rows: rows.replaced(x=rows.columns["x"][:, :2]), "'shape'"),
    ],
)
def test_every_difference_is_found(change, message):
    rows = Rows({"id": torch.arange(3), "x": torch.ones(3, 4)})
    assert differences(as_batch(rows), rows) == []
    assert message in "; ".join(differences(as_batch(rows), change(rows)))


def test_a_hang_is_reported_with_the_stacks_of_all_threads():
    report, ended = Report(seed=0), threading.Event()
    watchdog = Watchdog(report, on_hang=ended.set, grace_s=0.1)
    with watchdog.watch("call that never returns", deadline_s=0.1):
        assert ended.wait(timeout=10)
    assert kinds(report) == ["hang"]
    assert "test_a_hang_is_reported" in report.violations[0].message
    assert "call that never returns" in report.violations[0].actions[-1]


def test_errors_that_a_fault_explains_are_counted(world):
    died = WorkerDiedError("left.note died", role="left", rank=1, method="note")
    assert judged(world, died, killed=True) == []
    assert world.report.errors == {"WorkerDiedError": 1}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("raw"), "untyped error"),
        (WorkerDiedError("left died", role="left", rank=5, method="note"), "unnamed error"),
        (WorkerDiedError("a rank died", rank=1, method="note"), "unnamed error"),
        (WorkerDiedError("left died", role="left", rank=1), "unnamed error"),
        (LengthError("5 rows"), "unexpected error"),
        (
            CallTimeoutError("left.note", role="left", rank=0, method="note"),
            "deadline instead of an error",
        ),
    ],
)
def test_errors_of_the_wrong_kind_are_reported_after_a_kill(world, error, kind):
    assert judged(world, error, killed=True) == [kind]


def test_a_process_that_is_left_is_reported(world, monkeypatch):
    monkeypatch.setattr(chaos_world, "SETTLE_S", 0.2)
    ended = subprocess.Popen(["true"])
    ended.wait()
    world.expect_no_process([ended.pid], "after shutdown")
    assert kinds(world.report) == []
    world.expect_no_process([os.getpid()], "after shutdown")
    assert kinds(world.report) == ["leaked process"]


@pytest.mark.parametrize(
    ("notes", "violations"),
    [
        ([["a", "b", "c"], ["a", "b"]], []),
        ([["a", "b", "c"], ["b", "a", "c"]], ["order differs between ranks"]),
    ],
)
def test_ranks_with_another_order_of_calls_are_reported(world, notes, violations):
    slot = Slot("left", ChaosWorker, (2,), None)
    method = SimpleNamespace(options=lambda timeout: lambda: notes)
    generation = Generation(slot, SimpleNamespace(notes=method), [], watched=False)
    check_order(Faults(world, None, 0), slot, generation, random.Random(0))
    assert kinds(world.report) == violations


PROGRAM = Path(__file__).with_name("chaos_run.py")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_of_chaos(seed):
    command = [sys.executable, PROGRAM, "--seconds", "60", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    counts = json.loads(done.stdout[done.stdout.index("{") :])
    assert sum(counts["operations"].values()) > 100
    assert sum(counts["faults"].values()) > 3
    assert counts["violations"] == []
