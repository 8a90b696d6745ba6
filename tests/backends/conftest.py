"""Groups on both backends. The tests of this folder share one Ray cluster and one group on it."""

from collections.abc import Iterator

import pytest
from worker_cases import Cases

from group_fixtures import Starter, backend, ray_backend, shared, start, start_on_ray

__all__ = ["backend", "pool", "ray_backend", "start", "start_on_ray"]


@pytest.fixture(scope="session")
def ray_cases(ray_backend) -> Iterator[object]:
    """Two ranks of `Cases` on Ray, whose role is called "critic"."""
    yield from shared(ray_backend, Cases, 1, role="critic")


@pytest.fixture(scope="module")
def cases(request, backend) -> Iterator[object]:
    """Two ranks of `Cases` on each backend."""
    if backend.name == "ray":
        yield request.getfixturevalue("ray_cases")
    else:
        yield Starter(backend)(Cases, 2, 1, role="critic")


@pytest.fixture
def pool(ray_backend):
    """Two bundles on Ray, released after the test."""
    from quadriga.backends.ray import RayResourcePool

    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    yield pool
    pool.release()


@pytest.fixture
def sign(tmp_path) -> Iterator[str]:
    """A file for which ranks wait; it exists at the end of the test."""
    path = tmp_path / "sign"
    yield str(path)
    path.touch()
