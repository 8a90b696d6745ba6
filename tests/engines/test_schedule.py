"""Learning rates against numbers computed by hand."""

from __future__ import annotations

import pytest

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers.sharded import learning_rate


def rates(total=6, **settings):
    return [learning_rate(step, OptimConfig(lr=1.0, **settings), total) for step in range(total)]


def test_constant_schedule():
    assert rates() == [1.0] * 6
    assert rates(lr_warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_schedule():
    assert rates(lr_scheduler="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(lr_scheduler="linear", lr_warmup_steps=1, min_lr_ratio=0.2) == pytest.approx(
        [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_schedule():
    assert rates(5, lr_scheduler="cosine") == pytest.approx(
        [1.0, 0.85355, 0.5, 0.14645, 0.0], abs=1e-5
    )


def test_rate_stays_at_its_minimum_after_the_last_step():
    config = OptimConfig(lr=1.0, lr_scheduler="linear", min_lr_ratio=0.1)
    assert learning_rate(99, config, 6) == pytest.approx(0.1)
