"""Fixtures of the folders that start worker groups on both backends, for their conftest files."""

from collections.abc import Iterator

import pytest

from quadriga.backends import get_backend


@pytest.fixture(scope="session")
def ray_backend() -> Iterator[object]:
    """One small Ray cluster for the tests of a folder."""
    backend = get_backend("ray")
    backend.start(num_cpus=16, object_store_memory=200 * 2**20)
    yield backend
    backend.shutdown()


@pytest.fixture(params=["local", "ray"], scope="module")
def backend(request: pytest.FixtureRequest) -> object:
    if request.param == "ray":
        return request.getfixturevalue("ray_backend")
    return get_backend("local")


ray_nightly = pytest.mark.parametrize(
    "backend", ["local", pytest.param("ray", marks=pytest.mark.nightly)], indirect=True
)
"""Mark of a test that says the same of both backends: on Ray it runs nightly."""


class Starter:
    """Starts groups, and ends them all."""

    def __init__(self, backend):
        self.backend = backend
        self.started = []

    def __call__(self, cls, ranks=2, *args, roles=None, pool=None, actor=(), **options):
        """Return a group of `cls(*args)`, or of several roles in one process.

        `pool`: arguments of its pool. `actor`: options of its actors.
        """
        given = {"use_gpu": False, "max_colocate_count": 1, **(pool or {})}
        made = self.backend.resource_pool([ranks], **given)
        self.started.append(made)
        held = self.backend.colocate(roles) if roles else self.backend.class_with_args(cls, *args)
        if actor:
            held.update_options(dict(actor))
        group = self.backend.worker_group(made, held, **options)
        self.started.append(group)
        return group

    def end(self):
        for started in reversed(self.started):
            (getattr(started, "shutdown", None) or getattr(started, "release", lambda: None))()


def local_group(cls, ranks=2, *args, **options):
    """A group of `cls(*args)` in this process."""
    return Starter(get_backend("local"))(cls, ranks, *args, **options)


def group_on_ray(cls, ranks=2, **options):
    """Return a fixture: a group on Ray for the tests of a module."""

    @pytest.fixture(scope="module")
    def group(ray_backend):
        starter = Starter(ray_backend)
        yield starter(cls, ranks, **options)
        starter.end()

    return group


def group_on_both(cls, ranks=2, **options):
    """Return a fixture: a group on each backend for the tests of a module."""

    @pytest.fixture(scope="module")
    def group(backend):
        starter = Starter(backend)
        yield starter(cls, ranks, **options)
        starter.end()

    return group


def shared(backend, cls, *args, **options) -> Iterator[object]:
    """A group of two ranks of `cls(*args)`, for a fixture of the session on Ray."""
    starter = Starter(backend)
    yield starter(cls, 2, *args, pool={"name_prefix": "shared_"}, **options)
    starter.end()


@pytest.fixture
def start(backend) -> Iterator[Starter]:
    """`start(cls, ranks, *args, **options)` returns a group, which ends with the test."""
    starter = Starter(backend)
    yield starter
    starter.end()


@pytest.fixture
def start_on_ray(ray_backend) -> Iterator[Starter]:
    """`start` on Ray alone."""
    starter = Starter(ray_backend)
    yield starter
    starter.end()
