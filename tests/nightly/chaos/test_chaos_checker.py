"""The chaos program reports planted faults, so that a clean report says something."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from types import SimpleNamespace

import chaos_model
import chaos_world
import pytest
import torch
from chaos_cluster import ThreeNodes
from chaos_faults import Faults, check_order
from chaos_model import Rows, as_batch, differences, random_rows
from chaos_program import Program
from chaos_watch import Report, Watchdog
from chaos_workers import ChaosWorker, CoroutineWorker
from chaos_world import Generation, Slot, StepEnded, World

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
    assert "field 'x': rows [" in world.report.violations[0].message
    assert any("affine" in action for action in world.report.violations[0].actions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.take([0, 1]), "3 rows, expected 2"),
        (lambda rows: rows.take([0, 2, 1]), "field 'id': rows [1, 2] differ"),
        (lambda rows: rows.select(["id"]), "fields ['id', 'x'], expected ['id']"),
        (lambda rows: rows.replaced(x=rows.columns["x"].double()), "expected torch.float64"),
        (lambda rows: rows.replaced(x=rows.columns["x"][:, :2]), "expected [3, 2]"),
    ],
)
def test_every_difference_is_found(change, message):
    rows = Rows({"id": torch.arange(3), "x": torch.ones(3, 4)})
    assert differences(as_batch(rows), rows) == []
    assert message in "; ".join(differences(as_batch(rows), change(rows)))


def test_a_difference_in_jagged_and_object_fields_is_found():
    rng = random.Random(0)
    rows = next(r for r in iter(lambda: random_rows(rng, 4, 2), None) if len(r.columns) == 6)
    batch = as_batch(rows)
    assert differences(batch, rows) == []
    rows.columns["rag"][2] = rows.columns["rag"][2] + 1
    rows.columns["name"][1] = {"id": -1}
    assert [d[:12] for d in differences(batch, rows)] == ["field 'rag':", "field 'name'"]


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


def test_a_file_that_is_left_is_reported(tmp_path):
    nodes = ThreeNodes.__new__(ThreeNodes)
    nodes.folder = tmp_path
    (tmp_path / "ray").mkdir()
    for name in ("quadriga-stack-77-x.txt", "gate-0", "log.4242.txt", "ray/4242"):
        (tmp_path / name).touch()
    assert nodes.files_of({4242}) == ["log.4242.txt", "quadriga-stack-77-x.txt"]


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
    check_order(Faults(world, None, 0, 1.0), slot, generation, random.Random(0))
    assert kinds(world.report) == violations


def test_the_choices_of_a_run_follow_from_its_seed(world):
    """Two programs of one name and seed submit the same operations, those of other seeds do not."""
    local_groups(world)
    labels = []
    for seed in (1, 1, 2):
        program = Program(world, "thread0", seed)
        before = len(world.report._actions)
        for _ in range(8):
            program.step()
        labels.append([a[9:] for a in list(world.report._actions)[before:]])
        world.report._actions.clear()
    assert labels[0] == labels[1] != labels[2]
