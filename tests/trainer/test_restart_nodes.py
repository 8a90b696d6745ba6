"""A run on several nodes goes on after the loss of one: when it comes back, or without it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from run_cases import assert_equal_tensors, metrics_of_run, timeless, two_steps

from quadriga.trainer import restarts, stages

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
SETTINGS = (
    "trainer.backend=ray", "trainer.nnodes=2", "trainer.total_training_steps=5",
    "trainer.save_freq=1", "trainer.device=cpu",
)  # fmt: skip


@pytest.fixture
def cluster(monkeypatch):
    """A head without ranks, and two nodes with one rank each."""
    import ray
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    cluster.nodes = [cluster.add_node(num_cpus=1, **store) for _ in range(2)]
    cluster.grow = lambda: cluster.add_node(num_cpus=1, **store)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("returns", [True, False])
def test_a_run_that_loses_a_node(tiny_task, rule, tmp_path, monkeypatch, caplog, cluster, returns):
    folders = [tmp_path / name for name in ("whole", "lost")]
    wait = f"trainer.restart_wait_s={300 if returns else 3}"
    settings = [[*two_steps(tiny_task, folder), *SETTINGS, rule, wait] for folder in folders]
    for folder in folders:
        folder.mkdir()
    whole = metrics_of_run(settings[0])
    original, steps = stages.measure_batch, []

    def lose_a_node(batch):
        steps.append(batch)
        if len(steps) == 3:
            cluster.remove_node(cluster.nodes[1], allow_graceful=False)
        return original(batch)

    def sleep(seconds):
        time.sleep(seconds)
        if returns and len(cluster.list_all_nodes()) == 2:
            cluster.grow()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(restarts, "time", clock)

    monkeypatch.setattr(stages, "measure_batch", lose_a_node)
    rows = metrics_of_run(settings[1])
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    assert [row["restarts/count"] for row in rows if "restarts/count" in row] == [1.0]
    assert ("going on with 1 of 2 nodes" in caplog.text) == (not returns)
    if returns:
        ours = [{k: v for k, v in r.items() if "restarts" not in k} for r in timeless(rows)]
        assert ours == timeless(whole)
        assert_equal_tensors(folders[1] / "run/model", folders[0] / "run/model")
