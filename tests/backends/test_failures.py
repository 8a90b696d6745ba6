"""What a user sees when a worker fails."""

from __future__ import annotations

import pickle
import time

import pytest
from worker_cases import Collective, Faulty

from quadriga.errors import (
    CallTimeoutError,
    DispatchError,
    WorkerDiedError,
    WorkerInitError,
    WorkerMethodError,
)


def test_a_method_that_raises(start):
    group = start(Faulty, 2)
    with pytest.raises(WorkerMethodError) as caught:
        group.raise_on(1)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("Faulty", 1, "raise_on")
    assert str(error).startswith("KeyError in Faulty.raise_on, rank 1 of 2 on ")
    assert "worker_cases.py" in error.remote_traceback
    assert isinstance(error.__cause__, KeyError)
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert group.ping() == [0, 1]


def test_an_init_that_raises(start):
    with pytest.raises(WorkerInitError, match="no such weights") as caught:
        start(Faulty, 2, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.fixture
def ray_group(ray_backend):
    pool = ray_backend.resource_pool([2], use_gpu=False, max_colocate_count=1)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Faulty), role="critic")
    yield group
    group.shutdown()
    pool.release()


@pytest.fixture(scope="module")
def healthy_group(ray_backend):
    """For tests after which every rank is idle again."""
    pool = ray_backend.resource_pool([2], use_gpu=False, max_colocate_count=1)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Faulty), role="critic")
    yield group
    group.shutdown()
    pool.release()


def test_the_first_failure_is_shown_while_peers_hang(healthy_group):
    began = time.monotonic()
    with pytest.raises(WorkerMethodError, match=r"Still running the same call: rank\(s\) 0") as e:
        healthy_group.raise_while_others_wait(1, 3)
    assert e.value.rank == 1
    assert time.monotonic() - began < 2.9
    future = healthy_group.raise_while_others_wait.submit(1, 3)
    with pytest.raises(WorkerMethodError, match="reward_model"):
        future.get()


def test_a_process_that_dies(ray_group):
    with pytest.raises(WorkerDiedError, match="out of luck") as caught:
        ray_group.die_on(1)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("critic", 1, "die_on")
    alive = [ray_group._is_worker_alive(worker) for worker in ray_group.workers]
    assert alive == [True, False]


def test_a_deadline_shows_the_stuck_stack(ray_group):
    assert ray_group.stuck_on.options(timeout=30)(5) == [None, None]
    with pytest.raises(
        CallTimeoutError, match=r"deadline of 1 s; still running on rank\(s\) 1 "
    ) as caught:
        ray_group.stuck_on.options(timeout=1)(1)
    assert list(caught.value.stacks) == [1]
    assert "in stuck_on" in caught.value.stacks[1]


def test_a_deadline_holds_for_futures(ray_group):
    future = ray_group.stuck_on.options(timeout=1).submit(0)
    with pytest.raises(CallTimeoutError, match=r"stuck_on passed its deadline of 1 s"):
        future.get()


def test_a_long_wait_says_for_whom(ray_group, monkeypatch, caplog):
    from quadriga.backends.ray import waiting

    monkeypatch.setattr(waiting, "SPEAK_S", 1.0)
    with pytest.raises(CallTimeoutError):
        ray_group.stuck_on.options(timeout=2.5)(1)
    said = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("waiting for critic.stuck_on on rank(s) 1 (") for line in said)


def test_results_that_cannot_be_pickled(healthy_group):
    with pytest.raises(WorkerMethodError, match=r"around critic\.unpicklable") as caught:
        healthy_group.unpicklable()
    assert caught.value.method == "unpicklable"
    assert healthy_group.ping() == [0, 1]


def test_what_cannot_be_pickled(healthy_group):
    import threading

    with pytest.raises(DispatchError, match=r"critic\.raise_on: an argument cannot be sent"):
        healthy_group.raise_on(threading.Lock())


@pytest.fixture
def collective_group(ray_backend):
    pool = ray_backend.resource_pool([2], use_gpu=False, max_colocate_count=1)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Collective), role="actor")
    group.connect()
    yield group
    group.shutdown()
    pool.release()


def test_peers_stuck_in_a_collective_are_cancelled_and_named_after_the_cause(collective_group):
    assert collective_group.reduce_unless(5) == [2.0, 2.0]
    with pytest.raises(WorkerMethodError, match=r"^ValueError in actor\.reduce_unless") as caught:
        collective_group.reduce_unless(1)
    assert caught.value.rank == 1
    assert "Stuck in a collective and cancelled: rank(s) 0." in str(caught.value)
    with pytest.raises(WorkerDiedError, match=r"cannot be called: rank.* were cancelled"):
        collective_group.reduce_unless(5)


def test_a_death_comes_before_the_collective_errors_it_causes(collective_group):
    with pytest.raises(WorkerDiedError) as caught:
        collective_group.reduce_or_die(1)
    assert caught.value.rank == 1


def test_a_watched_group_ends_waits_on_other_groups(ray_backend, ray_group):
    pool = ray_backend.resource_pool([1], use_gpu=False, max_colocate_count=1)
    other = ray_backend.worker_group(pool, ray_backend.class_with_args(Faulty), role="other")
    ray_group.start_worker_aliveness_check(0.2)
    doomed = ray_group.die_on.submit(1)
    with pytest.raises(WorkerDiedError) as caught:
        other.stuck_on.options(timeout=30)(0)
    assert (caught.value.role, caught.value.rank) == ("critic", 1)
    ray_group.stop_worker_aliveness_check()
    with pytest.raises(WorkerDiedError):
        doomed.get()
    other.shutdown()
    pool.release()
