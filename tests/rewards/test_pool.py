"""`RewardPool`: deadlines per sample, crashes, reuse and end of its processes."""

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.errors import RewardError
from quadriga.rewards.functions import CallForm, FunctionRef, Sample, load_reward_function
from quadriga.rewards.pool import PoolProcess, RewardPool

USER_FILE = str(Path(__file__).with_name("user_rules.py"))


def sample(name, truth="ok"):
    return Sample(FunctionRef(USER_FILE, name), "src", "#### 1", truth, None)


def test_a_bad_sample_affects_only_itself_and_order_is_kept():
    truths = ["ok", "hang", "crash", "ok", "raise", "abort", "exit", "text", "nan", "ok"]
    with closing(RewardPool(2, timeout_s=4)) as pool:
        outcomes = pool.run([sample("moody", truth) for truth in truths])
    expected = "scored timed_out crashed scored raised crashed raised raised raised scored"
    assert statuses(outcomes) == expected
    assert [outcome.score for outcome in outcomes] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert outcomes[1].detail == "exceeded its deadline of 4 s"
    assert "exit code 7" in outcomes[2].detail
    assert "RuntimeError: no mood" in outcomes[4].detail
    assert "signal 6" in outcomes[5].detail


def statuses(outcomes):
    return " ".join(outcome.status for outcome in outcomes)


def waiting(truth):
    own = sample("waiting", truth)
    return replace(own, function=replace(own.function, form=CallForm(waits=True)))


def test_coroutines_wait_side_by_side_and_a_bad_one_affects_only_itself():
    truths = ["meet", "ok", "raise", "sleep", "meet"]  # two meet only if they run at once
    with closing(RewardPool(1, timeout_s=4)) as pool:
        outcomes = pool.run([waiting(truth) for truth in truths])
        assert statuses(outcomes) == "scored scored raised timed_out scored"
        assert outcomes[3].detail == "exceeded its deadline of 4 s"
        outcomes = pool.run([waiting(truth) for truth in ("ok", "block", "exit", "crash", "ok")])
    assert statuses(outcomes) == "scored timed_out raised crashed scored"
    assert len(list(RewardPool(2)._calls([waiting("ok")] * 70))) == 5


def test_coroutines_that_block_exceed_their_deadlines_at_once(monkeypatch):
    started = []
    start = PoolProcess.__init__
    monkeypatch.setattr(PoolProcess, "__init__", lambda *a, **k: started.append(start(*a, **k)))
    truths = ["block", "ok", "block", "main thread", "block", "raise", "block"]
    with closing(RewardPool(1, timeout_s=4)) as pool:
        outcomes = pool.run([waiting(truth) for truth in truths])
        expected = "timed_out scored timed_out scored timed_out raised timed_out"
        assert (statuses(outcomes), len(started)) == (expected, 2)
        assert pool.run([waiting("ok")])[0].status == "scored"


def test_a_semaphore_of_the_file_works_in_later_calls():
    with closing(RewardPool(1)) as pool:
        for _ in range(2):
            outcomes = pool.run([waiting("one by one")] * 3)
            assert statuses(outcomes) == "scored scored scored", outcomes
        assert pool.run([waiting("one by one")])[0].status == "scored"


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


@pytest.mark.parametrize(("kills", "outcome"), [(1, "scored"), (9, "crashed")])
def test_a_sample_whose_process_the_system_kills_is_scored_once_more(tmp_path, kills, outcome):
    calls = tmp_path / "calls"
    with closing(RewardPool(1)) as pool:
        found = pool.run([sample("killed", f"{kills} {calls}")])
    assert [one.status for one in found] == [outcome] and len(calls.read_text()) == 2


def test_a_file_that_ends_each_process_at_its_import_ends_the_run(tmp_path, monkeypatch):
    started = []
    start = PoolProcess.__init__
    monkeypatch.setattr(PoolProcess, "__init__", lambda *a, **k: started.append(start(*a, **k)))
    file = tmp_path / "dies.py"
    file.write_text("import os\nos.abort()")
    dying = Sample(FunctionRef(str(file), "compute_score"), "src", "", "", None)
    pool = RewardPool(2)
    problem = (
        r"6 processes in a row .* compute_score of .*dies.py.*: its process ended with signal 6"
    )
    with pytest.raises(RewardError, match=problem):
        pool.run([sample("moody"), dying] * 20)  # another function works between
    assert 6 <= len(started) <= 12  # two processes work at once


def test_a_file_that_cannot_be_imported_is_imported_once_by_a_process(tmp_path):
    file = tmp_path / "raises.py"
    file.write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('.')\nraise KeyError('no')")
    with closing(RewardPool(1)) as pool:
        outcomes = pool.run([Sample(FunctionRef(str(file), "f"), "src", "", "", None)] * 4)
    assert {(o.status, "KeyError: 'no'" in o.detail) for o in outcomes} == {("raised", True)}
    assert (tmp_path / "imports").read_text() == "."


def test_processes_run_what_the_run_has_loaded(tmp_path):
    file = tmp_path / "rule.py"
    rule = "import os\ndef f(response, ground_truth):\n    return SCORE if response else os.abort()"
    file.write_text(rule.replace("SCORE", "1"))
    ref = load_reward_function(file, "f")
    file.write_text(rule.replace("SCORE", "2"))
    with closing(RewardPool(1)) as pool:
        outcomes = pool.run([Sample(ref, "src", text, "", None, {"ground_truth": ""})
                             for text in ("a", "", "b")])  # fmt: skip
    assert [o.score for o in outcomes] == [1, 0, 1] and outcomes[1].status == "crashed"


def test_an_interrupted_batch_leaves_no_outcomes_for_the_next(monkeypatch):
    pool = RewardPool(2)
    pool.run([sample("moody")])
    with monkeypatch.context() as patched:
        patched.setattr(RewardPool, "_ready", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.run([sample("moody", "hang")] * 2)
    assert [outcome.score for outcome in pool.run([sample("by_length")] * 2)] == [6.0, 6.0]
    pool.close()
