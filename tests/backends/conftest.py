"""One small Ray cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quadriga.backends import get_backend


@pytest.fixture(scope="session")
def ray_backend() -> Iterator[object]:
    backend = get_backend("ray")
    backend.start(num_cpus=16, object_store_memory=200 * 2**20)
    yield backend
    backend.shutdown()


@pytest.fixture(params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> object:
    if request.param == "ray":
        return request.getfixturevalue("ray_backend")
    return get_backend("local")


@pytest.fixture
def start(backend):
    """start(cls, ranks, *args, **options) -> a group; ended after the test."""
    started = []

    def _start(cls, ranks=2, *args, roles=None, **options):
        pool = backend.resource_pool([ranks], use_gpu=False, max_colocate_count=1)
        held = backend.colocate(roles) if roles else backend.class_with_args(cls, *args)
        group = backend.worker_group(pool, held, **options)
        started.append((group, pool))
        return group

    yield _start
    for group, pool in started:
        group.shutdown()
        if hasattr(pool, "release"):
            pool.release()
