"""Batches in two forms: local, and remote in shards of several ranks."""

import math
from collections.abc import Callable, Iterator

import pytest
import ray
import torch
from protocol_cases import CountedStore, shard

from quadriga.backends import get_backend
from quadriga.backends.ray.store import RayStore
from quadriga.protocol import DataProto, DataProtoConfig, message, use_store

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _padding_off() -> Iterator[None]:
    yield
    DataProtoConfig.auto_padding = False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    """A store that every field is put into, however small."""
    monkeypatch.setattr(message, "INLINE_BYTES", -1)
    local = CountedStore()
    with use_store(local):
        yield local


@pytest.fixture(params=["local", "remote"])
def form(request: pytest.FixtureRequest, store: CountedStore) -> Callable[[DataProto], DataProto]:
    """Convert a local batch into the form under test."""
    if request.param == "local":
        return lambda data: data
    return lambda data: shard(data, 3)


@pytest.fixture(scope="module")
def plane_backends():
    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local", num_cpus=16, object_store_memory=200 * 2**20, include_dashboard=False,
            logging_level="error",
        )  # fmt: skip
    backend = get_backend("ray")
    backend.start()
    # On one node nothing would be cut: `near` sends every read through the row server.
    rows = get_backend("ray", store=RayStore(math.inf, near=True))
    rows.start()
    yield {"ray": backend, "rows": rows, "local": get_backend("local")}
    rows.shutdown()
    backend.shutdown()
    if started:
        ray.shutdown()
