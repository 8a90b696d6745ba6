"""`RewardPool`: deadlines per sample, crashes, reuse and end of its processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.rewards.functions import FunctionRef
from quadriga.rewards.outcome import Sample
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


@pytest.mark.parametrize(("processes", "timeout"), [(0, 1.0), (1, 0.0)])
def test_arguments_are_checked(processes, timeout):
    with pytest.raises(ConfigError):
        RewardPool(processes, timeout)


def test_an_interrupted_batch_leaves_no_outcomes_for_the_next(monkeypatch):
    pool = RewardPool(2)
    pool.run([sample("moody")])
    with monkeypatch.context() as patched:
        patched.setattr(RewardPool, "_ready", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.run([sample("moody", "hang")] * 2)
    assert [outcome.score for outcome in pool.run([sample("by_length")] * 2)] == [6.0, 6.0]
    pool.close()


ORPHAN = """
from quadriga.rewards.pool import RewardPool
from quadriga.rewards.pool import PoolProcess
from tests.rewards.test_pool import sample
pool = RewardPool(1, timeout_s=600)
print(int(pool.run([sample("process_id")])[0].score), flush=True)
pool.run([sample("moody", "hang")])
"""


def test_a_hanging_function_ends_when_its_parent_is_killed():
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, cwd=root
    ) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=30)
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} outlived its parent by 30 s")
