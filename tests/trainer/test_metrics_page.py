"""Runs emit the metrics of the page docs/concepts/metrics.md: all of them, and no others."""

import re
from dataclasses import replace
from fnmatch import filter as filter_names
from pathlib import Path

import pytest
from fine_tuning_cases import six_steps
from run_cases import metrics_of_run, two_steps
from test_reward_model_runs import scorer  # noqa: F401

from quadriga.errors import WorkerDiedError
from quadriga.observability import trackers
from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.metrics import METRICS, describe_metric
from quadriga.trainer.dataflow import balance_of
from quadriga.trainer.ppo import MismatchWatch

PAGE = Path(__file__).parents[2] / "docs/concepts/metrics.md"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RUNS = {
    "GRPO": [
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.policy_loss.name=clip_cov",
        "algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill",
        "algorithm.overlong.enable=true", "algorithm.overlong.buffer_length=4",
        "algorithm.rollout_correction.level=token", "reward_model.enable=true",
        "reward.on_failure=mask", f"{ROLLOUT}.val_n=2",
        f"{ROLLOUT}.val_sampling.temperature=1", "trainer.save_freq=1",
        f"{ROLLOUT}.take_turns=true", "trainer.loggers=[jsonl,mine]",
    ],
    "PPO": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "stream": [
        "trainer.max_staleness=1", f"{ROLLOUT}.slice_tokens=5",
        f"{ACTOR}.policy_loss.name=decoupled_ppo",
    ],
    "episodes": ["agent.max_turn_tokens=4", f"{ROLLOUT}.slice_tokens=4"],
}  # fmt: skip
GAME = """
from quadriga.agents.environments import Done

class Environment:
    def reset(self, row): ...

    def step(self, action):
        return Done(reward=len(action.text) / 10, metrics={"characters": len(action.text)})
"""


def listed() -> dict[str, tuple[str, str, str]]:
    """Name → unit, reduction and meaning, as the page says."""
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == len({row[0] for row in rows})
    return {name: (unit, kind, text) for name, unit, kind, text in rows}


def test_the_page_is_the_table_of_the_package():
    table = {name: (info.unit, info.kind, info.meaning) for name, info in METRICS.items()}
    assert {name: [one.replace("\\|", "|") for one in row] for name, row in listed().items()} == {
        name: [*row] for name, row in table.items()
    }


class Mine:
    """A tracker of the user that takes samples."""

    samples, steps = [], []

    def log(self, step, metrics):
        self.steps.append(step)

    def log_samples(self, step, samples):
        assert step not in self.steps  # before the metrics of the step
        self.samples.extend((step, *map(one.get, ("split", "prompt", "reward"))) for one in samples)

    def close(self):
        pass


@pytest.fixture(scope="module")
def emitted(tiny_task, rule, scorer, tmp_path_factory):  # noqa: F811
    """Run → the names in its metrics.jsonl."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(trackers.TRACKERS, "mine", lambda run: Mine())
        for name, settings in RUNS.items():
            folder = tmp_path_factory.mktemp("run")
            model = f"reward_model.model.path={scorer}"
            scored = rule
            if name == "episodes":
                (folder / "game.py").write_text(GAME)
                scored = f"agent.path={folder / 'game.py'}"
            given = [*two_steps(tiny_task, folder), scored, model, *settings]
            with pytest.MonkeyPatch.context() as more:
                if name == "PPO":
                    lose_a_rank(more)
                if name == "GRPO":  # rows are ordered as for two ranks
                    more.setattr("quadriga.trainer.ppo.balance_of", balance_of_two)
                found[name] = {key for row in metrics_of_run(given) for key in row} - {"step"}
        for command in ("sft", "rm"):
            runs = six_steps(command, tiny_task, tmp_path_factory.mktemp(command))
            runs.run("run", "trainer.total_training_steps=2", "trainer.loggers=[jsonl]")
            rows = read_jsonl(runs.folder / "run/metrics.jsonl")
            found[command] = {key for row in rows for key in row} - {"step"}
    return found


def balance_of_two(*args):
    return replace(balance_of(*args), ranks=2)


def lose_a_rank(patch):
    """Let step 2 fail once, as if a rank were lost."""
    check, failures = MismatchWatch.check, [WorkerDiedError("lost", role="actor", rank=0)]

    def once(watch, step, metrics):
        if step == 2 and failures:
            raise failures.pop()
        check(watch, step, metrics)

    patch.setattr(MismatchWatch, "check", once)


def test_no_metric_is_unlisted(emitted):
    assert [n for names in emitted.values() for n in names if describe_metric(n) is None] == []


def test_every_listed_metric_is_emitted(emitted):
    names = {name for names in emitted.values() for name in names}
    patterns = [name for name in METRICS if "*" in name and filter_names(names - {*METRICS}, name)]
    assert sorted({*METRICS} - names - {*patterns}) == []


def test_a_tracker_receives_the_samples_of_each_validation(emitted):
    assert {(step, split) for step, split, _, _ in Mine.samples} == {(0, "val"), (2, "val")}
    assert all("user: " in prompt and 0 <= reward < 1 for _, _, prompt, reward in Mine.samples)
