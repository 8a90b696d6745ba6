"""Groups on both backends. All tests of this folder share one Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from group_fixtures import Starter, backend, ray_backend, start

__all__ = ["backend", "ray_backend", "start", "start_on_ray"]


@pytest.fixture
def start_on_ray(ray_backend) -> Iterator[Starter]:
    """`start` on Ray alone."""
    starter = Starter(ray_backend)
    yield starter
    starter.end()
