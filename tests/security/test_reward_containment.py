"""Reward functions that misbehave: each affects its own sample only, and leaves nothing behind.

Every case has a row in the table of docs/security.md. The functions are in `hostile_rules.py`.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from processes import gone, is_running, run_python
from quadriga.config.schema import RewardConfig
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, load_reward_function
from quadriga.rewards.functions import FunctionRef, Sample
from quadriga.rewards.pool import Report, RewardPool
from quadriga.rewards.pool_worker import OutputBudget

FILE = str(Path(__file__).with_name("hostile_rules.py"))


def sample(name, number=0, info=None):
    return Sample(FunctionRef(FILE, name), "src", str(number), "ok", info)


def run(name, count=1, info=None, **options):
    """Score the numbers 1 … `count`; a well-behaved function returns its number."""
    with closing(RewardPool(options.pop("processes", 1), **options)) as pool:
        return pool.run([sample(name, number, info) for number in range(1, count + 1)])


# Scores of other samples


def test_a_function_that_forks_and_returns_shifts_no_scores():
    outcomes = run("fork_and_return", 8, timeout_s=20)
    assert [outcome.score for outcome in outcomes] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {outcome.status for outcome in outcomes} == {"scored"}


def test_a_copy_of_the_process_does_not_hold_the_connection():
    assert run("look_for_the_connection_in_a_copy")[0].score == 0


@pytest.mark.parametrize(
    ("name", "detail"),
    [("report_for_another_sample", "expected sample"),
     ("report_several", "sent 2 outcomes for 1 samples"),
     pytest.param("report_as_another_process", "expected sample", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_a_report_with_another_sample_or_process_is_refused(name, detail):
    outcomes = run(name, 3, timeout_s=20)
    assert [outcome.status for outcome in outcomes] == ["scored", "crashed", "scored"]
    assert [outcome.score for outcome in outcomes] == [1, 0, 3]
    assert detail in outcomes[1].detail


def test_messages_of_a_process_run_no_code_in_the_controller(tmp_path):
    outcomes = run("send_a_pickle", 2, info=str(tmp_path / "executed"), timeout_s=20)
    assert [outcome.status for outcome in outcomes] == ["crashed", "crashed"]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "message",
    [b"", b"{}", b"[1]", b"[1, 2, {}]", b'["1", 2, null]', b"[" * 100_000, b"\xff\xfe",
     b'[1, 2, [{"status": "scored", "score": NaN}]]', b'[1, 2, [{"status": "won", "score": 1.0}]]',
     b'[1, 2, [{"status": "scored", "score": "1"}]]',
     b'[1, 2, [{"status": "raised", "detail": 3}]]'],
)  # fmt: skip
def test_a_message_that_is_no_report_is_a_value_error(message):
    with pytest.raises(ValueError):
        Report.decode(message)


def test_an_alarm_of_one_sample_does_not_interrupt_the_next():
    outcomes = run("set_an_alarm", 3, timeout_s=20)
    assert [outcome.score for outcome in outcomes] == [1, 2, 3]


def test_a_crash_after_the_return_is_not_a_failure_of_the_next_sample():
    with closing(RewardPool(1, timeout_s=20)) as pool:
        first = pool.run([sample("end_a_moment_later", 1)])
        time.sleep(0.6)
        others = pool.run([sample("end_a_moment_later", number) for number in (2, 3)])
    assert [outcome.score for outcome in first + others] == [1, 2, 3]


# What a function leaves behind


@pytest.mark.parametrize("name", ["leave_a_session", "leave_an_orphan"])
def test_close_ends_the_children_of_a_function(name):
    with closing(RewardPool(1, timeout_s=30)) as pool:
        [outcome] = pool.run([sample(name, 1)])
        child = int(outcome.score)
        assert outcome.status == "scored" and is_running(child)
    assert gone([child])


def test_a_deadline_ends_the_children_of_a_function(tmp_path):
    note = tmp_path / "child"
    with closing(RewardPool(1, timeout_s=4)) as pool:
        [outcome] = pool.run([sample("hang_with_a_child", info=str(note))])
        assert outcome.status == "timed_out"
        assert gone([int(note.read_text())])


CONTROLLER = """
from quadriga.rewards.pool import RewardPool
from security.test_reward_containment import sample
pool = RewardPool(1, timeout_s=600)
print(int(pool.run([sample("leave_a_session", 1)])[0].score), flush=True)
print([process.process for process in pool._processes][0], flush=True)
pool.run([sample("hang_in_c")])
"""


def test_a_killed_controller_leaves_no_process():
    with subprocess.Popen(
        [sys.executable, "-c", CONTROLLER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    ) as controller:
        pids = [int(controller.stdout.readline()) for _ in range(2)]
        time.sleep(0.5)
        assert all(map(is_running, pids))
        controller.send_signal(signal.SIGKILL)
        controller.wait(timeout=30)
    assert gone(pids)


def test_a_killed_controller_leaves_no_traceback_of_its_processes():
    program = f"""if True:
        import os, threading
        from security.{__name__} import run
        threading.Timer(2.0, os.kill, (os.getpid(), 9)).start()
        while True:
            run("process_id", 1000)
    """
    end = -signal.SIGKILL
    done = run_python("-c", program, status=end, timeout=60, cwd=Path(__file__).parents[1])
    assert done.stderr == ""


def test_a_pool_without_a_reference_ends_its_processes():
    pool = RewardPool(1)
    pid = int(pool.run([sample("process_id")])[0].score)
    del pool
    assert gone([pid])


# Memory and output


def test_memory_beyond_the_limit_fails_only_its_sample():
    first, second = run("allocate", 2, memory_gb=0.5, timeout_s=30)
    assert first.status == "raised" and "MemoryError" in first.detail
    assert second.score == 2


def test_output_is_bounded(capfd):
    [outcome] = run("print_a_lot", timeout_s=20)
    assert outcome.score == 1
    shown = capfd.readouterr()
    assert shown.out == "" and 1000 < len(shown.err) < 400_000
    assert shown.err.count("the rest is left out") == 1


def test_the_budget_of_output_is_that_of_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    budget = OutputBudget(size=4)
    assert budget.allow(b"abc") == b"abc"
    assert budget.allow(b"def").startswith(b"d\n") and budget.allow(b"ghi") == b""
    now[0] = 60.0
    assert budget.allow(b"jk") == b"jk"


def test_what_a_function_returns_is_bounded():
    outcomes = run("return_much", 4, timeout_s=30)
    assert [outcome.status for outcome in outcomes] == ["scored", "raised", "raised", "scored"]
    assert len(outcomes[0].extra["text"]) < 1100  # 10 million characters
    assert "100001 entries" in outcomes[1].detail
    assert len(outcomes[2].detail) < 2100  # an exception with a message of 10 million characters


@pytest.mark.parametrize(
    "how",
    ["kill_itself", *(pytest.param(how, marks=pytest.mark.nightly) for how in
                      ("read_invalid_memory", "stop_itself"))],
)  # fmt: skip
def test_a_process_that_breaks_is_replaced(how):
    outcomes = run("break_the_process", 2, info=how, timeout_s=2)
    assert outcomes[0].status in ("crashed", "timed_out")
    assert outcomes[1].score == 2


def test_exceptions_of_any_class_fail_only_their_sample():
    outcomes = run("raise_anything", 4, timeout_s=20)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised", "raised", "scored"]


def test_what_a_function_returns_can_be_written_as_text():
    outcomes = run("return_half_a_pair", 2, timeout_s=20)
    assert outcomes[0].extra == {"half ?": 1.0, "note": "?"}
    assert outcomes[1].detail == "ValueError: half ?"


@pytest.mark.nightly
def test_a_message_that_is_begun_and_not_ended_holds_up_the_pool_for_a_bounded_time(monkeypatch):
    monkeypatch.setattr("quadriga.rewards.pool._RECEIVE_S", 1)
    outcomes = run("begin_a_message", 3, timeout_s=60)
    assert [outcome.status for outcome in outcomes] == ["scored", "crashed", "scored"]
    assert "BlockingIOError" in outcomes[1].detail


# Functions in the controller


class Numbers:
    """A tokenizer whose ids are their own text."""

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


def batch_of(numbers, **arrays):
    ids = torch.tensor([[number] for number in numbers])
    return DataProto.from_dict({"responses": ids, "response_mask": torch.ones_like(ids)}, arrays)


def output_of(program):
    """Run a program that may end early with exit code 0, and return what it has printed."""
    code = f"from security.{__name__} import *\n{program}"
    return run_python("-c", code, timeout=60, cwd=Path(__file__).parents[1]).stdout


def scores_of(name, numbers, **options):
    manager = RewardManager(Numbers(), load_reward_function(FILE, name), **options)
    scores = manager(batch_of(numbers)).batch["token_level_scores"].sum(-1).tolist()
    manager.close()
    failed = sum(manager.metrics[f"reward/{how}"] for how in ("raised", "crashed"))
    return scores, failed


@pytest.mark.parametrize("processes", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_function_cannot_end_the_controller(processes):
    program = f"print(scores_of('exit_at_two', [1, 2, 3], num_processes={processes}))"
    assert output_of(program) == "([1.0, 0.0, 3.0], 1.0)\n"


@pytest.mark.nightly
def test_a_copy_of_the_controller_ends_with_the_function():
    program = "print(scores_of('fork_and_return', [1, 2]), flush=True)"
    assert output_of(program) == "([1.0, 2.0], 0.0)\n"


# Settings


def manager_of(name, **settings):
    return RewardManager.from_settings(RewardConfig(path=FILE, name=name, **settings), Numbers())


def test_by_default_functions_run_in_two_processes_with_a_deadline():
    manager = manager_of("process_id", memory_gb=3.0)
    scores = manager(batch_of([1] * 40)).batch["token_level_scores"].sum(-1).tolist()
    manager.close()
    assert os.getpid() not in scores and 1 <= len(set(scores)) <= 2
    assert RewardConfig().num_processes == 2 and RewardConfig().timeout_s == 10
    assert manager._pool.memory_gb == 3.0


@pytest.mark.parametrize(("policy", "masked"), [("zero", []), ("mask", [1])])
def test_failed_samples_are_counted_and_masked_on_request(policy, masked):
    manager = manager_of("exit_at_two", num_processes=1, on_failure=policy)
    scores = manager(batch_of([1, 2, 3, 4])).batch["token_level_scores"].sum(-1).tolist()
    assert scores == [1, 0, 3, 4]
    assert manager.masked_rows == masked
    assert manager.metrics["reward/failed"] == 0.25
    assert manager.metrics["reward/masked"] == len(masked)
    manager(batch_of([1, 3]))
    manager.close()
    assert manager.masked_rows == [] and manager.metrics["reward/failed"] == 0


def test_a_failed_sample_ends_the_run_on_request():
    manager = manager_of("exit_at_two", num_processes=1, on_failure="fail")
    with pytest.raises(RewardError, match="1 of 2 samples have no score; the first is row 1") as e:
        manager(batch_of([1, 2]))
    manager.close()
    assert (e.value.row, e.value.status) == (1, "crashed")


# Data that cannot be scored


def test_a_function_of_the_user_needs_no_ground_truth_and_no_data_source():
    manager = manager_of("exit_at_two", num_processes=0)
    manager.check([{"index": 0}, {"index": 1, "reward_model": None, "data_source": "any"}])
    assert manager(batch_of([7])).batch["token_level_scores"].sum() == 7
