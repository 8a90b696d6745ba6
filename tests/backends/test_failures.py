"""What a user sees when a worker fails."""

from __future__ import annotations

import pickle
import time

import pytest
from worker_cases import Faulty

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


def test_the_first_failure_is_shown_while_peers_hang(ray_group):
    began = time.monotonic()
    with pytest.raises(WorkerMethodError, match=r"Still running the same call: rank\(s\) 0") as e:
        ray_group.raise_while_others_wait(1, 3)
    assert e.value.rank == 1
    assert time.monotonic() - began < 2.9
    future = ray_group.raise_while_others_wait.submit(1, 3)
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
        CallTimeoutError, match="deadline of 1 s; still running on ranks \\[1\\]"
    ) as caught:
        ray_group.stuck_on.options(timeout=1)(1)
    assert list(caught.value.stacks) == [1]
    assert "in stuck_on" in caught.value.stacks[1]


def test_what_cannot_be_pickled(ray_group):
    import threading

    with pytest.raises(DispatchError, match=r"critic\.raise_on: an argument cannot be sent"):
        ray_group.raise_on(threading.Lock())
