"""Reduction of metrics, the table that describes them, and the times of spans."""

import ast
import re
from pathlib import Path

import pytest

from quadriga.observability.metrics import METRICS, MetricSet, Timer, add_metric, describe_metric

SOURCE = Path(__file__).resolve().parents[2] / "src/quadriga"
SPACES = "reward|val|response_length|batch|group|mismatch|actor|critic|sft|sync|time|perf|progress"
METRIC = re.compile(rf"({SPACES})/[a-z_]+(/[a-z_]+)*")


def test_each_kind_reduces_as_computed_by_hand():
    metrics = MetricSet()
    metrics.add({"reward/mean": 1.0, "reward/max": 3.0, "reward/min": 3.0, "batch/tokens": 10})
    metrics.add({"reward/mean": 4.0, "reward/max": 2.0, "reward/min": 2.0, "batch/tokens": 5})
    metrics.add({"reward/kl_coef": 0.5})
    metrics.add({"reward/kl_coef": 0.25})
    assert metrics.reduce() == {
        "reward/mean": 2.5,
        "reward/max": 3.0,
        "reward/min": 2.0,
        "batch/tokens": 15.0,
        "reward/kl_coef": 0.25,
    }


def test_lookup_by_exact_name_and_by_pattern():
    assert describe_metric("time/rollout").unit == "s"
    assert describe_metric("val/accuracy") is METRICS["val/accuracy"]
    assert describe_metric("time/a/b") is METRICS["time/*"]
    assert describe_metric("nothing/like/it") is None


def test_add_metric_refuses_a_name_that_is_described(monkeypatch):
    monkeypatch.setattr("quadriga.observability.metrics.METRICS", dict(METRICS))
    add_metric("mine/most", "1", "the most", "max")
    assert describe_metric("mine/most").kind == "max"
    with pytest.raises(ValueError, match="already described: the most"):
        add_metric("mine/most", "1", "something else")


def strings_of_the_code():
    """Return string → location for every string literal of the package except the table.

    `compat` is left out: its functions return metrics under verl's names to programs of the user.
    """
    found = {}
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "observability/metrics.py" or path.is_relative_to(SOURCE / "compat"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            value = getattr(node, "value", None)
            if isinstance(value, str):
                found[value] = f"{path.relative_to(SOURCE)}:{node.lineno}"
    return found


def test_every_metric_in_the_code_is_described():
    named = {text: at for text, at in strings_of_the_code().items() if METRIC.fullmatch(text)}
    assert {name: named[name] for name in named if describe_metric(name) is None} == {}
    assert len(named) > 10


def test_every_described_metric_is_in_the_code():
    ends = {text.rpartition("/")[2].removeprefix("mismatch_") for text in strings_of_the_code()}
    exact = [name for name in METRICS if "*" not in name]
    assert [name for name in exact if name.rpartition("/")[2] not in ends] == []


def test_spans_are_added_up_nested_and_reset_by_take(monkeypatch):
    now, timer = [100.0], Timer()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with pytest.raises(KeyError), timer("step"):
        now[0] += 1
        for _ in range(2):
            with timer("rollout"):
                now[0] += 2
        raise KeyError
    assert timer.take() == {"time/rollout": 4.0, "time/step": 5.0}
    assert timer.take() == {}
