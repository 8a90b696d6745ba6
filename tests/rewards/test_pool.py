"""`RewardPool`: deadlines per sample, crashes, reuse and end of its processes."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from quadriga.rewards.functions import FunctionRef, Sample
from quadriga.rewards.pool import RewardPool

USER_FILE = str(Path(__file__).with_name("user_rules.py"))


def sample(name, truth="ok"):
    return Sample(FunctionRef(USER_FILE, name), "src", "#### 1", truth, None)


def test_a_bad_sample_affects_only_itself_and_order_is_kept():
    truths = ["ok", "hang", "crash", "ok", "raise", "abort", "exit", "text", "nan", "ok"]
    with closing(RewardPool(2, timeout_s=4)) as pool:
        outcomes = pool.run([sample("moody", truth) for truth in truths])
    assert [outcome.status for outcome in outcomes] == [
        "scored",
        "timed_out",
        "crashed",
        "scored",
        "raised",
        "crashed",
        "raised",
        "raised",
        "raised",
        "scored",
    ]
    assert [outcome.score for outcome in outcomes] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert outcomes[1].detail == "exceeded its deadline of 4 s"
    assert "exit code 7" in outcomes[2].detail
    assert "RuntimeError: no mood" in outcomes[4].detail
    assert "signal 6" in outcomes[5].detail


def test_processes_are_reused_and_ended_by_close():
    pool = RewardPool(2)
    samples = [sample("process_id")] * 6
    first = {outcome.score for outcome in pool.run(samples)}
    second = {outcome.score for outcome in pool.run(samples)}
    assert second <= first and len(first) <= 2 and os.getpid() not in first
    pool.close()
    for pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_function_that_cannot_be_loaded_fails_only_its_sample():
    with closing(RewardPool(1)) as pool:
        [outcome] = pool.run([sample("no_such_function")])
    assert outcome.status == "raised" and "no_such_function" in outcome.detail


def test_an_interrupted_batch_leaves_no_outcomes_for_the_next(monkeypatch):
    pool = RewardPool(2)
    pool.run([sample("moody")])
    with monkeypatch.context() as patched:
        patched.setattr(RewardPool, "_ready", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.run([sample("moody", "hang")] * 2)
    assert [outcome.score for outcome in pool.run([sample("by_length")] * 2)] == [6.0, 6.0]
    pool.close()
