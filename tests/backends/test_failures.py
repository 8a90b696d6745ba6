"""The errors that a user sees when a worker fails."""

import os
import signal
import traceback

import pytest
import ray
import torch
from worker_cases import Adder, Cases, Collective, Coroutines, Unreadable

from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError, WorkerMethodError
from quadriga.protocol import DataProto


@pytest.fixture
def ray_group(start_on_ray):
    return start_on_ray(Cases, 2, role="critic")


def test_the_first_failure_is_shown_while_peers_hang(ray_cases, sign):
    # The error names rank 0 as still running, so it was raised before that rank had ended.
    with pytest.raises(WorkerMethodError, match=r"Still running the same call: rank\(s\) 0") as e:
        ray_cases.raise_on(1, sign)
    assert e.value.rank == 1
    future = ray_cases.raise_on.submit(1, sign)
    open(sign, "w").close()
    with pytest.raises(WorkerMethodError, match="reward_model"):
        future.get()


@pytest.mark.parametrize(("half", "count"), [("\\ud83d", 1), ("a line\\n", 500_000)])
def test_an_exception_with_any_text_leaves_the_rank_alive(cases, half, count):
    def fail():
        raise ValueError(half.encode().decode("unicode_escape") * count + "end")

    with pytest.raises(WorkerMethodError, match=r"ValueError in critic\.run, rank [01]") as caught:
        cases.run(fail)
    assert len(str(caught.value)) < 100_000 and caught.value.remote_traceback.endswith("end")
    str(caught.value).encode()
    assert cases.take(1) == [0, 1]


def test_a_process_that_dies(ray_group):
    with pytest.raises(WorkerDiedError, match="out of luck") as caught:
        ray_group.die_on(1)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("critic", 1, "die_on")
    alive = [ray_group._is_worker_alive(worker) for worker in ray_group.workers]
    assert alive == [True, False]


def test_a_deadline_shows_the_stuck_stack_and_the_wait_is_logged(
    ray_cases, sign, monkeypatch, caplog
):

    from quadriga.backends.ray import calls

    monkeypatch.setattr(calls, "LOG_S", 0.5)
    assert ray_cases.stuck_on.options(timeout=30)(5, sign) == [None, None]
    late = r"deadline of 1\.2 s; still running on rank\(s\) 1 "
    with pytest.raises(CallTimeoutError, match=late) as caught:
        ray_cases.stuck_on.options(timeout=1.2)(1, sign)
    assert list(caught.value.stacks) == [1]
    assert "in stuck_on" in caught.value.stacks[1]
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("waiting for critic.stuck_on on rank(s) 1 (") for line in said)
    future = ray_cases.stuck_on.options(timeout=0.3).submit(0, sign)
    with pytest.raises(CallTimeoutError, match=r"stuck_on exceeded its deadline of 0\.3 s"):
        future.get()


def test_a_deadline_shows_where_a_coroutine_waits(start_on_ray):
    group = start_on_ray(Coroutines, timeout=3)
    with pytest.raises(CallTimeoutError, match=r"await_forever exceeded its deadline of 3 s") as e:
        group.await_forever(0)
    frames = [line.split(" in ")[-1] for line in e.value.stacks[0].splitlines()]
    assert frames == ["sleep", "_wait_for_weights", "await_forever"]
    assert group.sleep(1, 0) == [0, 1]  # the loop is free
    # Calls of coroutine methods interleave.
    futures = [group.meet(3) for _ in range(3)]
    assert [future.get() for future in futures] == [[3] * 2] * 3
    # An argument that cannot be read ends its turn, in the order of tickets.
    with pytest.raises(WorkerMethodError, match=r"argument of .*: OSError: no such weights"):
        group.take(Unreadable())
    assert group.take(0) == [0, 1]


@pytest.fixture
def collective_group(start_on_ray):
    group = start_on_ray(Collective, 2, role="actor")
    group.connect()
    return group


def test_peers_stuck_in_a_collective_are_cancelled_and_named_after_the_cause(collective_group):
    assert collective_group.reduce_unless(5) == [2.0, 2.0]
    with pytest.raises(WorkerMethodError, match=r"^ValueError in actor\.reduce_unless") as caught:
        collective_group.reduce_unless(1)
    assert caught.value.rank == 1
    assert "Stuck in a collective and killed: rank(s) 0." in str(caught.value)
    with pytest.raises(WorkerDiedError, match=r"cannot be called: rank.* were killed"):
        collective_group.reduce_unless(5)


@pytest.mark.nightly
def test_a_death_comes_before_the_collective_errors_it_causes(collective_group):
    with pytest.raises(WorkerDiedError) as caught:
        collective_group.reduce_unless(1, dies=True)
    assert caught.value.rank == 1


@pytest.mark.nightly
@pytest.mark.parametrize("idle", [False, True])
def test_a_watched_group_ends_waits_on_other_groups(ray_cases, ray_group, idle, sign):
    """Before the deadline of the waiting call, which would be another error.

    The error names the call that the dead rank was running, if any.
    """
    ray_group.start_worker_aliveness_check(0.2)
    doomed = None
    if idle:
        ray_group.say("loading weights")
        os.kill(ray_group._ranks.handles[1].facts.pid, signal.SIGKILL)
    else:
        doomed = ray_group.die_on.submit(1)
    with pytest.raises(WorkerDiedError) as caught:
        ray_cases.stuck_on.options(timeout=30)(0, sign)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("critic", 1, "" if idle else "die_on")
    assert ("loading weights" if idle else "out of luck") in str(error)
    assert error.node
    ray_group.stop_worker_aliveness_check()
    if doomed is not None:
        with pytest.raises(WorkerDiedError):
            doomed.get()


def test_a_process_that_left_ray_reports_no_death(ray_cases, ray_backend, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    ranks = ray_cases._ranks
    assert ray_backend.dead(ranks.handles) == ranks.handles
    assert ray_backend.death(ranks, ranks.handles[0]) is None


SCREEN = 40
"""Lines of a terminal."""


def bad_calls(group, backend):
    """Return wrong calls, by the text that the first line of their error must have."""
    import threading

    pool = backend.resource_pool([1], use_gpu=False, max_colocate_count=1)
    batch = DataProto.from_dict(tensors={"a": torch.arange(3)})
    return {
        "no registered method 'rais_on'. Did you mean raise_on?": lambda: group.rais_on(1),
        "has 3 entries for 2 ranks": lambda: group.each([1, 2, 3]),
        "has 3 rows, which do not divide into 2": lambda: group.rows(batch),
        "has not registered the mesh 'nowhere'": lambda: group.lost(batch),
        "that is 500 CPU; no node has that much": lambda: backend.worker_group(
            backend.resource_pool([500], use_gpu=False), backend.class_with_args(Adder)
        ),
        "ValueError in Cases.__init__, rank 0 of 1": lambda: backend.worker_group(
            pool, backend.class_with_args(Cases, 0, 0)
        ),
        "An actor named 'taken_Adder_0:0' exists already": lambda: [
            backend.worker_group(pool, backend.class_with_args(Adder), name_prefix="taken_")
            for _ in range(2)
        ],
        "an argument cannot be sent": lambda: group.raise_on(threading.Lock()),
        "around critic.unpicklable, rank 0": lambda: group.unpicklable(),
        "A result of critic.unreadable from rank 0": lambda: group.unreadable(),
        "An argument of critic.take could not be read by rank": lambda: group.take(Unreadable()),
        "KeyError in critic.raise_on, rank 1 of 2": lambda: group.raise_on(1),
    }


def test_bad_input_is_a_typed_error_on_one_screen_with_the_cause_first(ray_cases, ray_backend):
    shown = {}
    for cause, call in bad_calls(ray_cases, ray_backend).items():
        try:
            call()
        except QuadrigaError as error:
            first = str(error).splitlines()[0]
            whole = traceback.format_exception_only(error)
            shown[cause] = cause in first and len("".join(whole).splitlines()) <= SCREEN
            assert shown[cause], f"{type(error).__name__}: {error}"
    assert len(shown) == 12
