"""A run that loses ranks goes on by itself, and ends as if it had not lost them."""

from __future__ import annotations

import pytest
from run_cases import assert_equal_tensors, metrics_of_run, timeless, two_steps

from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer import worker_groups
from quadriga.trainer.roles.workers import ROLES_OF_USE  # noqa: F401

SIX = (
    "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=3",
    "data.shuffle=true", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive", "trainer.n_gpus_per_node=4", "placement.actor=[0]",
    "placement.rollout=[1]", "placement.ref=[2]", "placement.critic=[3]",
)  # fmt: skip


class Kills:
    """Ends the rank of a role before or after a call of a method in a step, once each.

    moments: (role, "before" or "after", method, its number from 1) for each kill.
    """

    def __init__(self, monkeypatch, moments):
        from quadriga.backends.local import LocalBackend

        self.left, self.calls = list(moments), {}
        self.groups = {}
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
        monkeypatch.setattr(worker_groups, "start_group", start)

    def kill(self, side, method, number):
        for moment in [m for m in self.left if m[1:] == (side, method, number)]:
            self.left.remove(moment)
            ranks = self.groups[moment[0]]._ranks
            ranks.backend.kill(ranks.handles[0])


@pytest.fixture(scope="module")
def whole(tiny_task, rule, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    metrics_of_run([*two_steps(tiny_task, folder), *SIX, rule])
    return folder / "run"


# What is killed → the steps that are done again, and whether all roles are started again. With
# validations before the first step and every third one, call 3 of the rollout is that of step 2.
KILLS = {
    "start": ([("critic", "before", "init_model", 1)], 0, False),
    "rollout": ([("rollout", "before", "generate_sequences", 3)], 0, True),
    "rollout, beside the actor": ([("actor", "after", "generate_sequences", 4)], 0, False),
    "passes, reference": ([("ref", "before", "compute_ref_log_prob", 2)], 0, True),
    "passes, critic": ([("critic", "after", "compute_values", 4)], 1, False),
    "updates, critic": ([("critic", "after", "update_critic", 4)], 1, False),
    "updates, actor": ([("actor", "before", "update_actor", 6)], 1, False),
    "updates, reference": ([("ref", "before", "update_actor", 4), ], 0, True),
    "sync": ([("rollout", "before", "receive_weights", 4)], 0, False),
    "validation before step 1": ([("rollout", "before", "generate_sequences", 1)], 0, False),
    "validation of step 3": ([("rollout", "before", "generate_sequences", 5)], 0, False),
    "save": ([("actor", "before", "save_checkpoint", 3)], 1, False),
    "load and restart itself": (
        [("actor", "before", "update_actor", 4), ("critic", "before", "load_checkpoint", 1),
         ("ref", "before", "init_model", 10)], 1, False),
    "export": ([("actor", "before", "export_hf", 1)], 0, False),
}  # fmt: skip


@pytest.mark.parametrize("moment", KILLS)
def test_a_run_that_loses_ranks_equals_one_that_does_not(
    tiny_task, rule, tmp_path, monkeypatch, whole, moment, caplog
):
    moments, lost, alone = KILLS[moment]
    kills = Kills(monkeypatch, moments)
    metrics_of_run([*two_steps(tiny_task, tmp_path), *SIX, rule])
    assert not kills.left, kills.calls
    run = tmp_path / "run"
    rows = timeless([*read_jsonl(run / "metrics.jsonl")])
    told = [{k: row.pop(k) for k in list(row) if k.startswith("restarts/")} for row in rows]
    told = [one for one in told if one]
    print(told)
    assert rows == timeless([*read_jsonl(whole / "metrics.jsonl")])
    assert [*read_jsonl(run / "samples.jsonl")] == [*read_jsonl(whole / "samples.jsonl")]
    for name in ("checkpoints/global_step_6", "model"):
        assert_equal_tensors(run / name, whole / name)
    assert not told or told[-1]["restarts/count"] == len(moments)
    assert sum(one["restarts/lost_steps"] for one in told) == lost
    assert ("all roles" not in caplog.text) == alone
