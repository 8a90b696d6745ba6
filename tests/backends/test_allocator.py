"""Freed memory that stays: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from worker_cases import Arrays

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's setting")

PROGRAM = """
import resource, sys
from quadriga.backends.ray.allocator import keep_freed_memory
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


def test_a_step_takes_the_pages_of_the_one_before():
    said, faults = run("keep")
    assert said == "True" and faults < PAGES / 20
    assert run("leave")[1] > PAGES / 2


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_choice_stands(name):
    assert run("keep", **{name: "65536" if name[0] == "M" else ""})[0] == "False"


def test_ranks_keep_theirs(ray_backend):
    pool = ray_backend.resource_pool([1], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Arrays))
    (steps,) = group.faults_of_steps(6)
    assert steps[2] < PAGES / 3 / 20
    group.shutdown()
    pool.release()
