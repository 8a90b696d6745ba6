"""Attaching to existing ranks, detached groups, and pools without a connection to Ray."""

import contextlib
import os
import time

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from worker_cases import Adder, Cases, group_on, taken_over

from group_fixtures import local_group
from quadriga.backends import get_backend
from quadriga.backends.local import LocalWorkerGroup
from quadriga.backends.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    pool as placement,
    split_resource_pool,
    start,
)
from quadriga.backends.ray.start import join_register_center
from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    DispatchError,
    PlacementError,
    WorkerDiedError,
)


def test_attaching_to_a_busy_rank_says_so(ray_cases, monkeypatch, sign):
    monkeypatch.setattr(start, "ATTACH_TIMEOUT_S", 1.0)
    busy = ray_cases.stuck_on.submit(1, sign)
    with pytest.raises(CallTimeoutError, match=r"1 of 2 existing ranks did not say within 1 s"):
        taken_over(Cases, worker_handles=ray_cases.workers)
    with pytest.raises(CallTimeoutError, match="1 of 1 existing ranks"):
        RayClassWithInitArgs(Adder)(sharing_with=ray_cases.workers[1])
    assert not busy.done()


def test_an_option_that_only_a_start_reads_is_refused(ray_cases):
    given = {"worker_env": {"A": "1"}, "register_center": True}
    with pytest.raises(DispatchError, match="worker_env, register_center has no effect"):
        taken_over(Cases, worker_handles=ray_cases.workers, **given)


def test_errors_of_the_register_center(ray_backend, monkeypatch):
    monkeypatch.setattr(start, "JOIN_TIMEOUT_S", 0.5)
    name = "joined_register_center"
    with pytest.raises(CallTimeoutError, match="is missing for rank 1 of 2"):
        join_register_center(name, 1, 2)
    first = join_register_center(name, 0, 2)
    with pytest.raises(PlacementError, match=r"exists already: .* prefix 'joined'"):
        join_register_center(name, 0, 2)
    ray.get(first.center.get_rank_zero_info.remote(), timeout=30)  # it has started
    pid = first.center.__ray_call__.remote(lambda actor: os.getpid())
    stopped = psutil.Process(ray.get(pid, timeout=30))
    stopped.suspend()
    with pytest.raises(CallTimeoutError, match="did not answer rank 1 of 2 after 0 s"):
        join_register_center(name, 1, 2)
    stopped.kill()
    with pytest.raises(WorkerDiedError, match="has ended before rank 1 of 2 joined"):
        while True:
            with contextlib.suppress(CallTimeoutError):  # until Ray knows of the death
                join_register_center(name, 1, 2)


@pytest.mark.parametrize("option", ["max_restarts", "max_task_retries"])
def test_restarts_are_refused_by_name(option):
    cls = RayClassWithInitArgs(Adder)
    with pytest.raises(ConfigError, match=rf"Adder: the actor option {option}=3 is not supported"):
        cls.update_options({option: 3})
    with pytest.raises(ConfigError, match=option):
        RayClassWithInitArgs(ray.remote(**{option: 3})(Adder))
    cls.update_options({option: 0})


def test_a_detached_group_makes_its_pool_detached(ray_backend):
    """Else the placement groups, and with them the ranks, would end with the driver."""
    whole = ray_backend.resource_pool([2], use_gpu=False, max_colocate_count=1)
    part, other = split_resource_pool(whole, 1)
    group = group_on(part, detached=True)
    assert whole.detached and part.detached
    assert group_on(other, detached=True).add(0) == [0]
    group.shutdown()
    whole.detached = False
    with pytest.raises(PlacementError, match="end with this driver"):
        group_on(part, detached=True)
    whole.release()


def test_the_pool_of_a_detached_group_stays_at_shutdown(ray_backend):
    backend = get_backend("ray")
    mine = backend.resource_pool([1], use_gpu=False, max_colocate_count=1)
    lasting = backend.resource_pool([1], use_gpu=False, max_colocate_count=1)
    ours, group = group_on(mine), group_on(lasting, detached=True)
    backend.shutdown()
    assert mine.pgs is None and lasting.pgs is not None
    assert group.add(1) == [1]
    ours.shutdown()
    group.shutdown()
    lasting.release()


def test_pools_on_ray_without_a_connection_to_ray(monkeypatch):
    """A Ray pool with `backend=local`, for example."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(PlacementError, match="not connected to Ray, so the nodes"):
        RayResourcePool([2], use_gpu=False).get_placement_groups()
    with pytest.raises(PlacementError, match=r'get_backend\("ray"\)\.start\(\)'):
        get_backend("ray").check_placement([RayResourcePool([2], use_gpu=False)])


@pytest.mark.parametrize("timeout", ["60", -5, 0, True, float("inf"), float("nan")])
def test_a_deadline_that_is_no_number_of_seconds_is_refused_before_a_rank_starts(timeout):
    for options in ({"timeout": timeout}, {"start_timeout": timeout}):
        with pytest.raises(DispatchError, match=r"timeout=…\) expects a number of"):
            RayWorkerGroup(None, None, **options)
    with pytest.raises(DispatchError, match=r"^LocalWorkerGroup\(timeout=…\) expects a number of"):
        LocalWorkerGroup(None, None, timeout=timeout)
    with pytest.raises(DispatchError, match=r"options\(timeout=…\) expects a number of seconds"):
        local_group(Adder, 1).add.options(timeout=timeout)


def test_a_start_that_breaks_off_leaves_no_placement_group(ray_backend, monkeypatch):
    """An error of Ray, or Ctrl-C, while the groups of a pool are made or waited for."""
    made = []
    make = placement.placement_group

    def second_fails(**options):
        if made:
            raise KeyboardInterrupt
        made.append(make(**options))
        return made[-1]

    pool = ray_backend.resource_pool([1, 1], use_gpu=False)
    with monkeypatch.context() as patch:
        patch.setattr(placement, "placement_group", second_fails)
        with pytest.raises(KeyboardInterrupt):
            ray_backend.worker_group(pool, ray_backend.class_with_args(Adder))
    deadline = time.monotonic() + 60
    while state_of(made[0]) != "REMOVED" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert state_of(made[0]) == "REMOVED"


def state_of(group):
    return placement_group_table(group)["state"]
