"""Ray's own tools show a group under the names of its ranks, its class and its methods."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import ray
from worker_cases import Adder, group_on

DASHBOARD = ("aiohttp", "aiohttp_cors", "opencensus", "colorful")
"""Packages of ray[default], without which Ray starts no dashboard."""


def test_ranks_are_named_actors_until_their_group_ends(pool):
    group = group_on(pool, name_prefix="tools_")
    assert group.worker_names == [f"tools_Adder_0:{i}" for i in range(2)]
    assert set(group.worker_names) <= set(ray.util.list_named_actors())
    found = ray.get_actor("tools_Adder_0:1")
    assert found == group.workers[1]
    group.shutdown()
    group.wait_until_ended()
    assert not set(group.worker_names) & set(ray.util.list_named_actors())


PROGRAM = """
import subprocess
import sys
import time

import ray
from ray.util.state import get_actor, list_actors, list_tasks, summarize_actors
from worker_cases import Adder

from quadriga.backends import get_backend

backend = get_backend("ray")
backend.start(num_cpus=3, object_store_memory=100 * 2**20, include_dashboard=True)
pool = backend.resource_pool([2], use_gpu=False)
group = backend.worker_group(pool, backend.class_with_args(Adder), name_prefix="run_")
assert group.add(1) == [1, 2]
assert ray._private.worker.global_worker.node.webui_url  # the dashboard of the caller's choice


def until(condition, seconds=60):
    expires = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < expires, condition.__doc__
        time.sleep(0.2)


alive = {actor.name: actor for actor in list_actors(filters=[("state", "=", "ALIVE")])}
assert {"run_Adder_0:0", "run_Adder_0:1"} <= set(alive), sorted(alive)
assert {alive[name].class_name for name in group.worker_names} == {"Adder"}
assert get_actor(alive["run_Adder_0:1"].actor_id).pid == group._ranks.handles[1].facts.pid
assert "Adder" in summarize_actors()["cluster"]["summary"]
until(lambda: "Adder.add" in {task.name for task in list_tasks(limit=1000)})
printed = subprocess.run(
    [sys.executable, "-m", "ray.scripts.scripts", "list", "actors", "--format", "json"],
    capture_output=True, text=True, timeout=90,
)
assert printed.returncode == 0 and "run_Adder_0:0" in printed.stdout, printed.stderr
group.shutdown()
until(lambda: not list_actors(filters=[("class_name", "=", "Adder"), ("state", "=", "ALIVE")]))
backend.shutdown()
print("seen")
"""


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in DASHBOARD),
    reason="the extra quadriga[dashboard] is not installed",
)
def test_the_state_api_and_ray_list_actors_show_the_ranks(tmp_path):
    """In a process of its own: the cluster of the other tests has no dashboard."""
    folder = os.path.dirname(os.path.abspath(sys.modules[Adder.__module__].__file__))
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path, capture_output=True, text=True, timeout=170,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip().endswith("seen")
