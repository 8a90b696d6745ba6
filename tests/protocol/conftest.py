"""Batches in two forms: here, and by reference in shards of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from protocol_cases import shard

from quadriga.backends.local.store import LocalStore
from quadriga.protocol import DataProto, DataProtoConfig, use_store
from quadriga.protocol import message_content as wire

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _padding_off() -> Iterator[None]:
    yield
    DataProtoConfig.auto_padding = False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    """A store that every field goes to, however small."""
    monkeypatch.setattr(wire, "INLINE_BYTES", -1)
    local = LocalStore()
    with use_store(local):
        yield local


@pytest.fixture(params=["here", "elsewhere"])
def form(request: pytest.FixtureRequest, store: LocalStore) -> Callable[[DataProto], DataProto]:
    """CallOrder a local batch into the form under test."""
    if request.param == "here":
        return lambda data: data
    return lambda data: shard(data, 3)
