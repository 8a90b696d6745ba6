"""Processes that host environments: each failure costs the episode in which it happens."""

import sys
import time
from pathlib import Path

import pytest

from processes import run_python
from quadriga.agents import pool as pools
from quadriga.agents.environments import Action, EnvironmentRef
from quadriga.agents.pool import Answer, EpisodePool
from quadriga.errors import ConfigError, DataError, InputError

HOSTED = str(Path(__file__).with_name("hosted.py"))


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(pools, "_LATE_S", 0.5)
    made = []

    def make(name="Environment", processes=2, timeout_s=1.0, **options) -> EpisodePool:
        made.append(
            EpisodePool(EnvironmentRef(HOSTED, name, options).loaded(), processes, timeout_s)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def acts(texts: list[str]) -> list[Action]:
    return [Action(text, turn) for turn, text in enumerate(texts, 1)]


def answers(pool: EpisodePool, count: int) -> dict[int, Answer]:
    found = {}
    until = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < until, f"only {found}"
        pool.wait(1.0)
        new = pool.answers()
        assert not {answer.episode for answer in new} & set(found), "a call is answered once"
        found |= {answer.episode: answer for answer in new}
    return found


def play(pool: EpisodePool, *turns: str) -> dict[int, Answer]:
    for number, turn in enumerate(turns):
        pool.play(number, {"name": f"row {number}"}, acts([turn]))
    return answers(pool, len(turns))


def test_a_process_imports_no_torch():
    """It starts in half a second, and has a fifth of the memory."""
    code = "import sys, quadriga.agents.pool_worker; print('torch' in sys.modules)"
    assert run_python("-c", code).stdout == "False\n"


def test_environments_close_with_their_episode_and_with_the_pool(pool, tmp_path):
    own = pool("Closing", folder=str(tmp_path), timeout_s=60.0)
    play(own, "one", "two", "three")
    own.end(0)
    own.play(1, {}, acts(["two", "hang"]))
    own.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["row 0", "row 1", "row 2"]


def test_turns_are_answered(pool):
    own = pool(greeting="hello")
    own.play(7, {"name": "a"}, [])
    begun = Answer(7, "observed", [{"role": "user", "content": "hello"}])
    assert answers(own, 1) == {7: begun}
    own.play(7, {"name": "a"}, acts(["one"]))
    seen = [{"role": "user", "content": "a ['one']"}]
    assert answers(own, 1) == {7: Answer(7, "observed", seen, [0.5], {"seen": 1.0})}
    own.play(7, {"name": "a"}, acts(["one", "done"]))
    assert answers(own, 1) == {7: Answer(7, "done", [], [1.0], {"turns": 2.0})}
    # Another pool, as after the end of the controller, plays all turns again.
    again = pool(greeting="hello")
    again.play(7, {"name": "a"}, acts(["one", "done"]))
    rewards, metrics = [0.5, 1.0], {"seen": 1.0, "turns": 2.0}
    assert answers(again, 1) == {7: Answer(7, "done", [], rewards, metrics)}


def test_a_failure_costs_its_own_episode(pool):
    turns = ["one", "raise", "hang", "die", "nothing", "flood", "sleep", "two"]
    found = play(pool(), *turns)
    status = {turns[number]: answer.status for number, answer in found.items()}
    assert status == {
        "one": "observed", "raise": "raised", "hang": "timed_out", "die": "crashed",
        "nothing": "raised", "flood": "raised", "sleep": "observed", "two": "observed",
    }  # fmt: skip
    details = {turns[number]: answer.detail for number, answer in found.items()}
    assert details["raise"] == "ValueError: of the user"
    assert "step must return an Observation or Done, got NoneType" in details["nothing"]
    assert "2097152 characters" in details["flood"]
    assert details["hang"] == "exceeded its deadline of 1 s"


ODD = {
    "generator": ("observed", ""), "numpy": ("done", ""), "surrogate": ("observed", ""),
    "cancelled": ("raised", "CancelledError"), "large": ("raised", "reward must be a number up to"),
    "key": ("raised", "a metric must have a name"), "own": ("raised", "a metric must have a name"),
    "heavy": ("raised", "bytes, at most"), "none": ("raised", "reward must be a number"),
    "bytes": ("raised", "reward must be a number"), "nested": ("raised", "nested too deeply"),
}  # fmt: skip


def test_odd_answers_cost_their_own_episode(pool):
    found = play(pool("Odd", words=["a", "b"], timeout_s=5.0), *ODD)
    for number, (status, words) in enumerate(ODD.values()):
        assert found[number].status == status and words in found[number].detail, found[number]
    order = [*ODD]
    generated, given, repaired = (
        found[order.index(n)] for n in ("generator", "numpy", "surrogate")
    )
    assert [message["content"] for message in generated.messages] == ["a", "b"]
    assert (given.rewards, given.metrics) == ([0.5], {"hit": 1.0})
    assert repaired.messages[0]["content"] == "x?"


def test_an_interrupt_and_an_exit_of_a_task_end_no_other_episode(pool):
    found = play(pool("Threaded", processes=1), "interrupt", "one", "interrupt", "two")
    assert [found[number].status for number in range(4)] == ["raised", "observed"] * 2
    assert found[0].detail == "KeyboardInterrupt: "
    odd = pool("Odd", processes=1, words=[], timeout_s=5.0)
    found = play(odd, "leaves a task", "slow", "cancelled", "slow")
    process = odd._hosts[0].process
    assert [found[n].status for n in range(4)] == ["observed", "observed", "raised", "observed"]
    assert play(odd, "slow", "slow")[1].status == "observed"
    assert [host.process for host in odd._hosts] == [process]  # it has hosted all of them


def test_an_iterator_that_has_ended_raises(pool):
    (found,) = play(pool("Stops", timeout_s=30.0), "one").values()
    assert (found.status, found.detail) == ("raised", "RuntimeError: StopIteration")


def test_a_reward_of_reset_is_refused(pool):
    own = pool("Rewarding")
    own.play(0, {}, [])
    (found,) = answers(own, 1).values()
    assert found.status == "raised" and "reset returns has no reward" in found.detail


def test_of_several_calls_the_one_that_blocks_is_found(pool):
    own = pool("Odd", processes=1, words=[], timeout_s=1.0)
    found = play(own, "slow", "slow", "block", "slow")
    assert [found[i].status for i in range(4)] == ["observed", "observed", "timed_out", "observed"]
    own.play(0, {}, acts(["slow", "one"]))
    assert answers(own, 1)[0].messages[0]["content"] == "fine"


def test_the_import_of_the_file_is_not_part_of_the_deadline(pool, tmp_path, monkeypatch):
    text = Path(HOSTED).read_text(encoding="utf-8")
    (tmp_path / "slow.py").write_text(
        f"import time\ntime.sleep(1.5)\n{text[text.index('import asyncio') :]}"
    )
    monkeypatch.setattr(sys.modules[__name__], "HOSTED", str(tmp_path / "slow.py"))
    assert {a.status for a in play(pool(timeout_s=0.5), "one", "two", "three").values()} == {
        "observed"
    }


def test_turns_that_are_played_again_have_a_deadline_each(pool):
    own = pool("Odd", words=[], timeout_s=1.0)
    own.play(0, {}, acts(["slow"] * 5))  # 1.5 s
    assert answers(own, 1)[0].status == "observed"


def test_one_that_blocks_its_process_is_killed_and_the_others_go_on(pool):
    own = pool(processes=1)
    found = play(own, "one", "block", "sleep", "two")
    assert [found[i].status for i in range(4)] == ["observed", "timed_out", "observed", "observed"]
    own.play(0, {"name": "row 0"}, acts(["one", "three"]))
    assert answers(own, 1)[0].messages[0]["content"] == "row 0 ['one', 'three']"


def test_a_method_that_is_no_coroutine_has_a_thread(pool):
    found = play(pool("Threaded", processes=1), "hang", "one", "two")
    assert [found[i].status for i in range(3)] == ["timed_out", "observed", "observed"]


def test_an_environment_that_cannot_be_repeated_is_found(pool):
    own = pool(processes=1)
    play(own, "random", "one")
    own.play(1, {"name": "row 1"}, acts(["one", "die"]))
    assert answers(own, 1)[1].status == "crashed"
    own.play(0, {"name": "row 0"}, acts(["random", "one"]))
    (found,) = answers(own, 1).values()
    assert found.status == "raised" and "turn 1 has another answer than before" in found.detail


def test_many_slow_environments_answer_at_once(pool):
    own = pool(timeout_s=30.0)
    found = play(own, *["sleep"] * 200)  # a minute, one after the other
    assert {answer.status for answer in found.values()} == {"observed"}


def test_both_sides_can_send_more_than_a_pipe_holds(pool):
    own = pool(processes=1, timeout_s=30.0)
    text = "x" * 20_000
    found = play(own, *[text] * 100)
    assert {answer.status for answer in found.values()} == {"observed"}


def test_an_episode_that_ended_is_dropped(pool):
    own = pool(processes=1)
    own.play(0, {"name": "a"}, acts(["hang"]))
    own.end(0)
    assert not own.busy and own.answers() == []
    assert play(own, "one")[0].messages[0]["content"] == "row 0 ['one']"


def test_a_process_that_stands_still_does_not_hold_the_caller(pool, monkeypatch):
    monkeypatch.setattr("quadriga.rewards.pool._SEND_S", 3600)
    own = pool(processes=1)
    own.play(0, {"name": "a"}, acts(["block"]))
    for number in range(1, 9):
        own.play(number, {"name": "b" * (1 << 19)}, acts(["one"]))
    found = answers(own, 9)
    assert found.pop(0).status == "timed_out"
    assert {answer.status for answer in found.values()} == {"observed"}


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (
            "Environments",
            {},
            ConfigError,
            "does not exist; classes with a method step and coroutine functions: Environment",
        ),
        ("NoStep", {}, ConfigError, r"has no method step\(self, action\)"),
        ("NoArgument", {}, ConfigError, r"step must take \(self, action\)"),
        ("Environment", {"size": 3}, ConfigError, r"does not take agent.options=\{'size': 3\}"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name, options, error, words):
    with pytest.raises(error, match=words):
        EnvironmentRef(HOSTED, name, options).loaded()


def test_a_file_is_imported_once_in_a_process(tmp_path):
    game = tmp_path / "game.py"
    text = f"open({str(tmp_path / 'seen')!r}, 'a').write('x')\nfrom hosted import Environment\n"
    game.write_text(text)
    ref = EnvironmentRef(str(game), "Environment")
    assert ref.load() is ref.loaded().load()
    assert (tmp_path / "seen").read_text() == "x"
    game.write_text(text + "#")
    ref.load()
    assert (tmp_path / "seen").read_text() == "xx"


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"environment file .* does not exist"):
        EnvironmentRef(str(tmp_path / "none.py"), "Environment").loaded()
    (tmp_path / "broken.py").write_text("import no_such_module")
    with pytest.raises(InputError, match="no_such_module"):
        EnvironmentRef(str(tmp_path / "broken.py"), "Environment").loaded()
