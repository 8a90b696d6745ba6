"""Freed memory stays in the heap, and full garbage collections are rare but still free cycles."""

import gc
import os
import platform
import weakref

import pytest
from worker_cases import Adder

from processes import gone
from quadriga.backends.ray import calls, rank_process

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="no other C library has this setting"
)

PAGES = 6 * 16 * 2**20 // os.sysconf("SC_PAGE_SIZE")
"""Pages of one step."""


def test_the_users_choice_of_heap_limits_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert not rank_process.keep_freed_memory()


@glibc
def test_ranks_keep_freed_memory(ray_cases):
    assert min(steps[2] for steps in ray_cases.faults_of_steps(6)) < PAGES / 20


@pytest.fixture
def default_interval():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_interval_of_full_collections_is_raised_once(default_interval):
    assert rank_process.collect_rarely(100) and gc.get_threshold() == (700, 10, 100)
    assert not rank_process.collect_rarely(1000)
    gc.set_threshold(0)  # the user's choice
    assert not rank_process.collect_rarely(100)


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.me = self


def test_a_full_collection_is_run_in_a_long_wait(default_interval, monkeypatch):
    """At most one in 30 seconds, and none where the user has chosen the interval."""
    monkeypatch.setattr(calls, "_next_collection", 0.0)
    gc.collect()
    lost = Cycle()
    watched = weakref.ref(lost)
    gc.collect()  # it is in the oldest generation now
    del lost
    calls._collect_in_wait(5.0)
    gc.set_threshold(700, 10, calls.FULL_EVERY)
    calls._collect_in_wait(0.5)
    assert watched() is not None
    calls._collect_in_wait(1.5)
    assert watched() is None
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("two in 30 seconds"))
    calls._collect_in_wait(5.0)


def test_the_processes_of_a_dropped_group_end(ray_backend, ray_cases):
    """A group and its methods are a cycle, so the garbage collector finds a group that no variable
    names any more, also after another group has been started."""
    pool = ray_backend.resource_pool([1], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Adder))
    pids = [handle.facts.pid for handle in group._ranks.handles]
    assert ray_cases.take([group]) == [0, 1]
    ray_cases.run(gc.collect)  # what its ranks have received is a cycle, too
    del group
    gc.collect()
    assert gone(pids)
    assert ray_cases.take(0) == [0, 1]
    pool.release()
