"""A run that loses ranks goes on by itself, and ends as if it had not lost them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fine_tuning_cases import six_steps
from run_cases import check_equal, metrics_of_run, often, two_steps

from quadriga import errors
from quadriga.backends.local import LocalBackend
from quadriga.cli.main import LOST as LOST_CODE, _failed
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, PlacementError, WorkerDiedError, WorkerMethodError
from quadriga.observability.jsonl import read_jsonl
from quadriga.single_controller.keepers import KeptValues
from quadriga.trainer import restarts as restarting, worker_groups
from quadriga.trainer.restarts import Restarts

SIX = (
    "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=3",
    "data.shuffle=true", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive", "trainer.n_gpus_per_node=4", "placement.actor=[0]",
    "placement.rollout=[1]", "placement.ref=[2]", "placement.critic=[3]",
    "trainer.max_restarts=5",
)  # fmt: skip


class Kills:
    """Ends ranks before or after a call of a method: (role, side, method, number from 1)."""

    def __init__(self, monkeypatch, moments):
        self.left, self.calls, self.groups = list(moments), {}, {}
        original, started = LocalBackend.submit, worker_groups.start_group

        def submit(backend, ranks, targets, calls, timeout):
            method = calls[0].method
            self.calls[method] = number = self.calls.get(method, 0) + 1
            self.kill("before", method, number)
            result = original(backend, ranks, targets, calls, timeout)
            self.kill("after", method, number)
            return result

        def start(*args):
            group = started(*args)
            self.groups |= dict.fromkeys(group.roles, group)
            return group

        monkeypatch.setattr(LocalBackend, "submit", submit)
        for module in ("worker_groups", "fine_tuning"):
            monkeypatch.setattr(f"quadriga.trainer.{module}.start_group", start)

    def kill(self, side, method, number):
        for moment in [m for m in self.left if m[1:] == (side, method, number)]:
            self.left.remove(moment)
            ranks = self.groups[moment[0]]._ranks
            ranks.backend.kill(ranks.handles[0])


# What is killed → the completed steps that are done again, the number of restarts, and which roles
# are started again whenever the run goes on. With validations before the first step and every third
# one, call 3 of the rollout is that of step 2.
ALL = "all roles"
KILLS = {
    "start, passes, updates, restart itself, sync": (
        [("critic", "before", "init_model", 1), ("ref", "before", "compute_ref_log_prob", 2),
         ("actor", "before", "update_actor", 4), ("critic", "before", "load_checkpoint", 1),
         ("rollout", "before", "receive_weights", 17)],
        1, 5, [ALL, "ref", ALL, ALL],
    ),
    "rollout": ([("rollout", "before", "generate_sequences", 3)], 0, 1, ["rollout"]),
    "rollout, beside the actor": ([("actor", "after", "generate_sequences", 4)], 0, 1, [ALL]),
    "passes, critic": ([("critic", "after", "compute_values", 4)], 1, 1, [ALL]),
    "updates, critic": ([("critic", "after", "update_critic", 4)], 1, 1, [ALL]),
    "updates, reference": ([("ref", "before", "update_actor", 4)], 0, 1, ["ref"]),
    "two roles": ([("ref", "before", "generate_sequences", 3),
                   ("rollout", "before", "generate_sequences", 3)], 0, 1, ["rollout, ref"]),
    "the start of one role": ([("ref", "before", "compute_ref_log_prob", 2),
                               ("ref", "before", "init_model", 5)], 0, 2, ["ref"]),
    "validation before step 1": ([("rollout", "before", "generate_sequences", 1)], 0, 1, [ALL]),
    "validation of step 3": ([("rollout", "before", "generate_sequences", 5)], 0, 1, [ALL]),
    "save": ([("actor", "before", "start_saving", 3)], 1, 1, [ALL]),
    "load": ([("actor", "before", "update_actor", 4), ("actor", "after", "load_checkpoint", 1),
              ("ref", "before", "init_model", 10)], 1, 3, [ALL]),
    "export": ([("actor", "before", "export_hf", 1)], 0, 1, [ALL]),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tiny_task, rule, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    metrics_of_run([*two_steps(tiny_task, folder), *SIX, rule])
    return folder / "run"


@pytest.mark.parametrize("moment", often(KILLS, "start, passes, updates, restart itself, sync"))
def test_a_run_that_loses_ranks_equals_one_that_does_not(
    tiny_task, rule, tmp_path, monkeypatch, whole, moment, caplog
):
    moments, lost, count, again = KILLS[moment]
    kills = Kills(monkeypatch, moments)
    metrics_of_run([*two_steps(tiny_task, tmp_path), *SIX, rule])
    assert not kills.left, kills.calls
    told = check_equal(tmp_path / "run", whole)
    assert sum(one["restarts/lost_steps"] for one in told) == lost
    assert not told or told[-1]["restarts/count"] == count
    lines = [record.getMessage() for record in caplog.records if "goes on" in record.message]
    assert [line.rpartition("started again: ")[2] for line in lines] == again
    assert lines[-1].startswith(f"restart {count} of 5: the run goes on after step ")


# Steps between snapshots, whether the keepers have lost them, what is killed → steps done again.
SNAPSHOTS = {
    "each step, twice": (1, False, [("actor", "before", "update_actor", 4),
                                    ("critic", "before", "load_snapshot", 2),
                                    ("critic", "after", "update_critic", 6)], 0),
    "every third step": (3, False, [("actor", "before", "update_actor", 5)], 1),
    "lost": (3, True, [("actor", "before", "update_actor", 4)], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", often(SNAPSHOTS, "each step, twice"))
def test_a_loss_costs_the_steps_since_the_last_snapshot(
    tiny_task, rule, tmp_path, monkeypatch, whole, name
):
    every, lost, moments, again = SNAPSHOTS[name]
    if lost:
        monkeypatch.setattr(KeptValues, "steps", lambda self, key: [])
    kills = Kills(monkeypatch, moments)
    more = [f"trainer.snapshot_freq={every}", *(["trainer.save_freq=0"] if not lost else [])]
    metrics_of_run([*two_steps(tiny_task, tmp_path), *SIX, rule, *more])
    assert not kills.left, kills.calls
    told = check_equal(tmp_path / "run", whole)
    assert sum(one["restarts/lost_steps"] for one in told) == again


@pytest.mark.nightly
def test_a_streamed_run_goes_on_with_the_prompts_on_their_way(
    tiny_task, rule, tmp_path, monkeypatch
):
    settings = (*SIX[:4], "trainer.max_staleness=2", "actor_rollout_ref.rollout.slice_tokens=3",
                "data.max_response_length=40")  # fmt: skip
    for name in ("whole", "kills"):
        (tmp_path / name).mkdir()
        if name == "kills":
            moments = [("actor_rollout", "before", "update_actor", 2),
                       ("actor_rollout", "before", "update_actor", 6)]  # fmt: skip
            kills = Kills(monkeypatch, moments)
        metrics_of_run([*two_steps(tiny_task, tmp_path / name), *settings, rule])
    assert not kills.left
    assert check_equal(tmp_path / "kills/run", tmp_path / "whole/run")
    events = [[*read_jsonl(tmp_path / name / "run/stream.jsonl")] for name in ("whole", "kills")]
    takes = [[e["take"] for e in found if "take" in e] for found in events]
    assert takes[0] == takes[1] and len(takes[0]) == 6


@pytest.mark.parametrize("command", often(["sft", "rm"], "sft"))
def test_fine_tuning_that_loses_a_rank_goes_on(tiny_task, tmp_path, monkeypatch, command):
    runs, more = six_steps(command, tiny_task, tmp_path), ("trainer.save_freq=2",)
    runs.run("whole", *more)
    role = "SFTWorker" if command == "sft" else "PairTrainingWorker"
    kills = Kills(monkeypatch, [(role, "before", f"update_{command}", n) for n in (1, 5)])
    runs.run("run", *more)
    assert not kills.left
    told = check_equal(tmp_path / "run", tmp_path / "whole")
    assert [one["restarts/lost_steps"] for one in told] == [0, 1]


# What is a loss


LOST = (
    "WorkerDiedError", "CallTimeoutError", "LostObjectError", "RolloutDiedError",
    "RolloutTimeoutError",
)  # fmt: skip
KEPT = (
    "WorkerInitError", "RolloutOutputError", "RewardError", "MismatchError", "CheckpointError",
    "PlacementError", "ConfigError", "CollectiveError",
)  # fmt: skip


@pytest.mark.parametrize("name", [*LOST, *KEPT])
def test_what_is_a_loss(name):
    error, around = getattr(errors, name)("x"), WorkerMethodError("a method raised")
    around.__cause__ = error
    trainer = load_config(TrainConfig, []).trainer
    restarts, local = Restarts(trainer, lambda: False), replace(trainer, backend="local")
    for one in (error, around):
        assert restarts.is_loss(one) == restarts.allows(one) == (name in LOST)
        assert not Restarts(trainer, lambda: True).allows(one)  # it was asked to stop
    assert Restarts(local, lambda: False).is_loss(error) == (name in set(LOST) - {LOST[1]})
    cluster = errors.ClusterLostError("x")  # of the user: a new process goes on (--supervise)
    assert restarts.is_loss(cluster) and not restarts.allows(cluster)
    assert restarts.allows(errors.ClusterLostError("x", own=True))
    assert _failed(cluster, None) == LOST_CODE
    around.__cause__ = restarting.DistError("a connection is lost")
    assert restarts.is_loss(around) and not restarts.is_loss(KeyboardInterrupt())


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(restarting, "time", clock)
    return clock


def losses(clock, *steps, seconds, **settings):
    """Return how many losses are restarted: one after each of these completed steps."""
    given = [f"trainer.{key}={value}" for key, value in settings.items()]
    restarts = Restarts(load_config(TrainConfig, given).trainer, lambda: False)
    for number, step in enumerate(steps):
        clock.now += seconds
        restarts.completed = step
        try:
            restarts.begin(WorkerDiedError(f"loss {number}"))
        except WorkerDiedError as error:
            return number, str(error)
    return len(steps), ""


def test_restarts_count_within_a_window_and_without_progress(clock):
    assert losses(clock, *range(9), seconds=2000)[0] == 9  # two in the window
    assert losses(clock, *range(9), seconds=1000)[0] == 3
    assert losses(clock, *range(9), seconds=1000, max_restarts=5)[0] == 9
    assert losses(clock, *range(9), seconds=1000, restart_window_s=500)[0] == 9
    count, text = losses(clock, 4, 4, 4, 4, seconds=10_000)
    assert count == 3 and text.startswith("loss 3\n") and text.endswith("losses: loss 0")
    assert "3 times" in text and "trainer.max_restarts=3" in text
    assert losses(clock, 1, seconds=1, max_restarts=0) == (0, "loss 0")


def test_a_restart_waits_for_nodes_and_goes_on_with_fewer(clock, caplog, capsys):
    asked = []

    def start(config):
        asked.append((config.trainer.nnodes, clock.now))
        if config.trainer.nnodes > fit_on:
            raise PlacementError(f"{config.trainer.nnodes} nodes do not exist")
        return f"on {config.trainer.nnodes}"

    def check(config):
        if config.trainer.nnodes == 2:
            raise ConfigError("8 rows do not divide over 2 nodes")

    config = load_config(TrainConfig, ["trainer.nnodes=3", "trainer.restart_wait_s=5"])
    restarts, fit_on = Restarts(config.trainer, lambda: False), 2
    with pytest.raises(PlacementError, match=r"^3 nodes do not exist$"):
        restarts.placed(start, config, check)
    assert capsys.readouterr().out.endswith("the models: 3 ranks, trainer.backend=ray\n")
    restarts.begin(WorkerDiedError("a node is lost"))
    began = clock.now
    assert restarts.placed(start, config, check) == "on 1"
    assert asked[1:] == [*((3, began + s) for s in (0, 2, 4, 5)), (1, began + 5)]
    assert "going on with 1 of 3 nodes" in caplog.text
    fit_on = 0
    with pytest.raises(PlacementError) as caught:
        restarts.placed(start, config, check)
    for text in ("3 nodes do", "waited 5 s (trainer.restart_wait_s)", "nnodes=2: 8 rows", "=1: 1"):
        assert text in str(caught.value)
    with pytest.raises(PlacementError, match=r"waited 5 s \(trainer.restart_wait_s\)\.$"):
        restarts.placed(start, config, None)
