"""Freed memory stays in the heap, and full garbage collections are rare but still free cycles."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import time
import weakref

import pytest
from worker_cases import Cycle, Cyclic

from quadriga.backends.ray import memory

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="no other C library has this setting"
)

PROGRAM = """
import resource, sys
from quadriga.backends.ray.memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(6):
    if step == 3:
        before = faults()
    blocks = [bytearray(b"x") * (16 * 2**20) for _ in range(6)]
    del blocks
print(faults() - before)
"""
PAGES = 3 * 6 * 16 * 2**20 // os.sysconf("SC_PAGE_SIZE")
"""Pages of three steps."""


def run(what: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, faults = done.stdout.split()
    return said, int(faults)


@glibc
def test_a_step_uses_the_pages_of_the_step_before():
    said, faults = run("keep")
    assert said == "True" and faults < PAGES / 20
    assert run("leave")[1] > PAGES / 2


@glibc
def test_ranks_keep_freed_memory(ray_cases):
    assert min(steps[2] for steps in ray_cases.faults_of_steps(6)) < PAGES / 3 / 20


@pytest.fixture
def default_interval():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_interval_of_full_collections_is_raised_once(default_interval):
    assert memory.collect_rarely(100) and gc.get_threshold() == (700, 10, 100)
    assert not memory.collect_rarely(1000)
    gc.set_threshold(0)  # the user's choice
    assert not memory.collect_rarely(100)


def test_a_full_collection_is_run_in_a_long_wait(default_interval):
    """At most one in 30 seconds, and none where the user has chosen the interval."""
    collect = memory._IdleCollector()
    assert not collect(5.0)
    memory.collect_rarely(memory.FULL_EVERY_IN_CONTROLLER)
    gc.collect()
    lost = Cycle()
    watched = weakref.ref(lost)
    gc.collect()  # it is in the oldest generation now
    del lost
    assert not collect(0.5) and watched() is not None
    assert collect(1.5) and watched() is None
    assert not collect(5.0)
    gc.disable()
    try:
        assert not memory._IdleCollector()(5.0)
    finally:
        gc.enable()


def test_cycles_that_exist_when_a_group_starts_are_freed_later(start_on_ray):
    """In the controller and in the ranks: a cycle may hold gigabytes."""
    held = Cycle()
    watched = weakref.ref(held)
    group = start_on_ray(Cyclic, 1)
    del held
    gc.collect()
    assert watched() is None and gc.get_freeze_count() == 0
    assert group.look() == [(0, True)]


def test_the_processes_of_a_dropped_group_end(ray_backend, ray_cases):
    """A group and its methods are a cycle, so the garbage collector finds a group that no variable
    names any more, also after another group has been started."""
    pool = ray_backend.resource_pool([1], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Cyclic))
    pids = [handle.facts.pid for handle in group._ranks.handles]
    assert ray_cases.take([group]) == [0, 1]
    ray_cases.run(gc.collect)  # what its ranks have received is a cycle, too
    del group
    gc.collect()
    deadline = time.monotonic() + 30
    while any(map(_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_exists, pids))
    assert ray_cases.take(0) == [0, 1]
    pool.release()


def _exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
