"""`Timer` with a clock that the test controls."""

from __future__ import annotations

import pytest

from quadriga.observability.metrics import Timer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_are_added_up_nested_and_reset_by_take():
    clock = Clock()
    timer = Timer(clock=clock)
    with timer("step"):
        clock.now += 1
        for _ in range(2):
            with timer("rollout"):
                clock.now += 2
    assert timer.take() == {"time/rollout": 4.0, "time/step": 5.0}
    assert timer.take() == {}


def test_a_span_that_raises_is_counted():
    clock = Clock()
    timer = Timer(clock=clock)
    with pytest.raises(KeyError), timer("save"):
        clock.now += 3
        raise KeyError
    assert timer.take() == {"time/save": 3.0}
