"""The output of `RunConsole` on a terminal and in a file, and the silence of libraries."""

import io
import re

import pytest
from rich.console import Console

from quadriga.observability.console import RunConsole


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(total_steps):
    clock, out = Clock(), io.StringIO()
    return RunConsole(total_steps, file=out, clock=clock), clock, out


def test_plain_lines_show_step_reward_accuracy_speed_and_time_left():
    console, clock, out = plain(10)
    clock.now = 6.0
    console.log(
        1,
        {
            "reward/mean": 0.5,
            "reward/failed": 0.25,
            "val/accuracy": 0.125,
            "perf/tokens_per_second": 1234.5,
            "x": 1,
        },
    )
    assert (
        out.getvalue()
        == "train 1/10  reward 0.500  failed 25.0%  accuracy 12.5%  tokens/s 1,234  left 54s\n"
    )


def test_a_score_that_is_no_accuracy_is_shown_as_a_number():
    console, _, out = plain(2)
    console.log(0, {"val/score": 0.0, "val/accuracy": 0.0, "reward/failed": 0.0})
    console.log(1, {"val/score": -0.155})
    assert out.getvalue().splitlines() == [
        "train 0/2  accuracy 0.0%",
        "train 1/2  score -0.155  left 0s",
    ]


def test_a_long_run_prints_about_twenty_lines_and_every_validation():
    console, _, out = plain(1000)
    for step in range(1, 1001):
        console.log(step, {"val/score": 0.5} if step == 7 else {"reward/mean": 0.1})
    lines = out.getvalue().splitlines()
    assert len(lines) == 22  # the first, every 50th, and step 7
    assert any(line.startswith("train 7/1000 ") for line in lines)
    assert all("\x1b" not in line for line in lines)


def test_time_left_of_a_resumed_run_counts_only_its_own_steps():
    console, clock, _ = plain(20)
    clock.now = 10.0
    console.log(11, {"reward/mean": 0.0})
    assert console.seconds_left(11) == pytest.approx(90.0)


def terminal(total_steps, width=60):
    console, clock, out = plain(total_steps)
    console.console = Console(file=out, force_terminal=True, width=width, highlight=False)
    return console, clock, out


def test_a_terminal_shows_progress_lines_and_then_the_table():
    console, clock, out = terminal(4)
    for step in (1, 2):
        clock.now += 1
        console.phase("rollout")
        console.log(step, {"reward/mean": 0.5, "time/rollout": 1.25, "time/step": 9.0})
    console.table("done", [("accuracy", "90%"), ("steps", "4")])
    console.close()
    text = out.getvalue()
    for part in ("2/4", "reward 0.500", "(rollout 1.2s)", "waits for rollout, step 2"):
        assert part in text, part
    assert text.rstrip().endswith("┘")
    assert text.count("\x1b[?25h") >= 1  # the cursor is visible, for a debugger


def test_no_line_is_longer_than_a_narrow_terminal_and_none_is_colored(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console, _, out = terminal(1000)
    times = {f"time/{name}": 12.5 for name in ("rollout", "evaluate", "update_actor", "validate")}
    console.note("run folder runs/first")
    console.log(10, {"reward/mean": 0.5, "val/score": 0.25, "perf/tokens_per_second": 1e6, **times})
    console.sample(10, "a question " * 90, "words " * 90, 1.0)
    console.close()
    text = out.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text)
    lines = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 60
    assert sum("question" in line for line in lines) == 3


def test_about_ten_responses_of_a_run_are_shown_without_what_controls_a_terminal():
    console, _, out = plain(100)
    for step in range(1, 101):
        console.sample(step, "2 + 2?\n\x1b[31mred", "4", 1.0)
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "response in step 1, reward 1.000",
        "  prompt    2 + 2? red",
        "  response  4",
    ]
    assert len(lines) == 30 and lines[-3] == "response in step 91, reward 1.000"


def test_the_last_turns_of_an_episode_are_shown_with_what_was_observed():
    console, _, out = plain(1)
    turns = [{"sampled": str(i), "observed": "larger" if i < 6 else ""} for i in range(1, 7)]
    console.sample(1, "guess", "1larger…", 1.0, turns)
    assert out.getvalue().splitlines()[1:] == [
        "  prompt    guess", "  turn 3    3", "  observed  larger", "  turn 4    4",
        "  observed  larger", "  turn 5    5", "  observed  larger", "  turn 6    6",
    ]  # fmt: skip
