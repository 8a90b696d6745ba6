"""`quadriga generate` and `quadriga eval` with replicas: each response once, also after losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.trainer import replicas as rollout
from quadriga.trainer.evaluation import generate as ranks
from quadriga.trainer.evaluation.generate import run_generation
from quadriga.trainer.replicas import Replicas

TWO = (
    "trainer.backend=local", "trainer.n_gpus_per_node=2", "rollout.replicas.enable=true",
    "rollout.replicas.request_rows=4",
)  # fmt: skip


def given(tiny_task, *more: str) -> list[str]:
    """16 prompts in batches of 6 with 3 responses each."""
    return [
        f"model.path={tiny_task.model}", f"data_files={tiny_task.data('test')}", "n=3",
        "sampling.temperature=1", "max_response_length=6", "batch_size=6", "seed=5",
        "trainer.threads_per_worker=1", "trainer.device=cpu", *more,
    ]  # fmt: skip


@pytest.fixture
def generate(tiny_task, tmp_path):
    def run(*more: str, output: str = "answers.jsonl") -> Path:
        path = tmp_path / output
        run_generation(load_config(GenerateConfig, given(tiny_task, *more, f"output={path}")))
        return path

    return run


@pytest.fixture
def started(monkeypatch) -> list[Replicas]:
    """The replicas of every command that starts some."""
    found: list[Replicas] = []
    start = ranks.start_replicas

    def noted(*arguments, **named):
        found.append(start(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(ranks, "start_replicas", noted)
    return found


@pytest.fixture
def requests(monkeypatch) -> list[tuple[int, int]]:
    """(replica, rows) of every request."""
    found: list[tuple[int, int]] = []
    ask = rollout._Call._ask

    def noted(self, members, replica):
        found.append((replica.number, sum(len(member.rows) for member in members)))
        ask(self, members, replica)

    monkeypatch.setattr(rollout._Call, "_ask", noted)
    return found


def before_batch(monkeypatch, number: int, action) -> None:
    """Call `action(replicas)` before the batch with this number, from 0."""
    generate, count = ranks.FolderReplicas.generate_sequences, iter(range(100))

    def disturbed(self, prompts):
        if next(count) == number:
            action(self.replicas)
        return generate(self, prompts)

    monkeypatch.setattr(ranks.FolderReplicas, "generate_sequences", disturbed)


def test_replicas_write_the_file_of_one_rank(generate, requests):
    one = generate().read_bytes()
    assert not requests
    assert generate(*TWO, output="two.jsonl").read_bytes() == one
    assert {replica for replica, _ in requests} == {0, 1}
    assert sum(rows for _, rows in requests) == 16 * 3
    assert all(rows == 3 for _, rows in requests)  # the samples of a prompt are one request


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_replica_that_is_lost_in_the_middle_loses_no_response(
    generate, started, requests, monkeypatch, restarts
):
    one = generate().read_bytes()
    before_batch(monkeypatch, 1, lambda replicas: replicas.all[0].group.shutdown())
    two = generate(*TWO, f"rollout.replicas.restarts={restarts}", output="two.jsonl")
    assert two.read_bytes() == one
    (replicas,) = started
    # It is noticed in batch 1, and replica 0 is started again before batch 2.
    assert [replica.starts for replica in replicas.all] == [1 + restarts, 1]
    assert (replicas.all[0].loss is None) == (restarts == 1)
    last = [replica for replica, _ in requests[-4:]]
    assert (0 in last) == (restarts == 1)
