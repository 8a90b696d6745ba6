"""Groups on both backends. All tests of this folder share one Ray cluster."""

from __future__ import annotations

import pytest

from group_fixtures import Starter, backend, ray_backend, start

__all__ = ["backend", "pool", "ray_backend", "start", "start_for_module"]


@pytest.fixture(scope="module")
def start_for_module(backend):
    """`start` whose groups end after the module's tests on that backend."""
    starter = Starter(backend)
    yield starter
    starter.end()


@pytest.fixture
def pool(ray_backend):
    """Four bundles on Ray, released after the test."""
    from quadriga.backends.ray import RayResourcePool

    pool = RayResourcePool([4], use_gpu=False, max_colocate_count=1)
    yield pool
    pool.release()
