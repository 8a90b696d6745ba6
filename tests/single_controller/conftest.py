"""Groups on both backends. All tests of this folder share one Ray cluster."""

from group_fixtures import backend, ray_backend, start, start_on_ray

__all__ = ["backend", "ray_backend", "start", "start_on_ray"]
