"""Freed memory that stays, counted in page faults; what the collector of garbage leaves alone."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest
from worker_cases import Arrays, Cycle, Cyclic

from quadriga.backends.ray.process.heap import freeze_heap

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="no other C library has this setting"
)

PROGRAM = """
import resource, sys
from quadriga.backends.ray.process.heap import keep_freed_memory
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
"""Of three steps."""


def run(what: str, **variables: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what],
        capture_output=True, text=True, check=True, env={**os.environ, **variables},
    )  # fmt: skip
    said, faults = done.stdout.split()
    return said, int(faults)


@glibc
def test_a_step_takes_the_pages_of_the_one_before():
    said, faults = run("keep")
    assert said == "True" and faults < PAGES / 20
    assert run("leave")[1] > PAGES / 2


@glibc
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_choice_stands(name):
    assert run("keep", **{name: "65536" if name[0] == "M" else ""})[0] == "False"


@glibc
def test_ranks_keep_theirs(ray_backend):
    pool = ray_backend.resource_pool([1], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Arrays))
    (steps,) = group.faults_of_steps(6)
    assert steps[2] < PAGES / 3 / 20
    group.shutdown()
    pool.release()


def test_garbage_is_not_kept_for_good():
    lost, kept = Cycle(), Cycle()
    watched = weakref.ref(lost)
    del lost
    before = gc.get_freeze_count()
    freeze_heap()
    assert watched() is None and gc.get_freeze_count() > before
    assert not any(thing is kept for thing in gc.get_objects())


def test_a_rank_freezes_its_modules_and_none_of_its_workers_objects(ray_backend):
    pool = ray_backend.resource_pool([2], use_gpu=False)
    gc.unfreeze()
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Cyclic))
    assert gc.get_freeze_count() > 10_000  # here, in the controller
    assert group.look() == [(True, True)] * 2
    group.shutdown()
    pool.release()
