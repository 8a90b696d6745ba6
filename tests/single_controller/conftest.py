"""Groups on both backends. All tests of this folder share one Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from quadriga.backends import get_backend
from quadriga.single_controller import WorkerGroup


@pytest.fixture(scope="session")
def ray_backend() -> Iterator[object]:
    backend = get_backend("ray")
    backend.start(num_cpus=16, object_store_memory=200 * 2**20)
    yield backend
    backend.shutdown()


@pytest.fixture(params=["local", "ray"], scope="module")
def backend(request: pytest.FixtureRequest) -> object:
    if request.param == "ray":
        return request.getfixturevalue("ray_backend")
    return get_backend("local")


def starter(backend) -> Iterator[Callable[..., WorkerGroup]]:
    """`start(cls, ranks, *args, **options)` returns a group, which ends with the fixture."""
    groups, pools = [], []

    def start(cls, ranks=1, *args, **options):
        pools.append(backend.resource_pool([ranks], use_gpu=False))
        group = backend.worker_group(pools[-1], backend.class_with_args(cls, *args), **options)
        groups.append(group)
        return group

    yield start
    for group in groups:
        group.shutdown()
    for pool in pools:
        getattr(pool, "release", lambda: None)()


@pytest.fixture
def start(backend) -> Iterator[Callable[..., WorkerGroup]]:
    yield from starter(backend)


@pytest.fixture
def start_on_ray(ray_backend) -> Iterator[Callable[..., WorkerGroup]]:
    yield from starter(ray_backend)
