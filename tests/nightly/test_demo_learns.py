"""`quadriga demo` from start to end: reinforcement learning improves on imitation."""

import pytest

from processes import accuracies, quadriga

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("setting", "least"), [("seed=0", 0.9), ("adv_estimator=gae", 0.9), ("lora_rank=32", 0.75)]
)
def test_the_demo_learns(tmp_path, setting, least):
    """Greedy accuracy on the validation problems rises from below 0.6 to above `least`."""
    quadriga("demo", setting, cwd=tmp_path)
    accuracy = accuracies(tmp_path / "runs/demo/train")
    assert accuracy[0] < 0.6
    assert accuracy[-1] > least
