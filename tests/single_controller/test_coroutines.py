"""Groups whose ranks interleave calls on an event loop."""

from __future__ import annotations

import pytest
from refilling import Refiller, numbers_in

from group_fixtures import Starter

KINDS = ["batch", "objects", "meta", "tensor", "arrays", "wrapped", "numbers"]


@pytest.fixture(scope="module")
def refiller(backend):
    start = Starter(backend)
    yield start(Refiller, 1)
    start.end()


@pytest.mark.parametrize("method", ["fill", "fill_later"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_does_not_change_when_the_next_call_fills_the_same_buffer(refiller, kind, method):
    for _ in range(3):
        futures = [getattr(refiller, method)(kind, i) for i in range(20)]
        seen = [numbers_in(future.get()[0]) for future in futures]
        assert seen == [{i} for i in range(20)]
