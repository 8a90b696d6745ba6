"""Replicas of a run on Ray join with a node and leave with it; no row is lost or doubled."""

from collections import Counter

import pytest
from ray.cluster_utils import Cluster
from run_process import started_run
from test_replicas import KEY

from quadriga.observability.jsonl import read_jsonl, read_samples

STEPS = 24
SLOW = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.1)
    return float(len(solution_str) % 3)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_node_joins_and_leaves_while_a_run_goes_on(
    staleness, train_overrides, tmp_path, monkeypatch
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    more = [
        "trainer.backend=ray", "trainer.n_gpus_per_node=2", "placement.actor=[0]",
        "placement.rollout=[1]", f"{KEY}.enable=true", f"{KEY}.elastic=true",
        f"{KEY}.request_rows=2", f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=9",
        f"trainer.max_staleness={staleness}", f"reward.path={tmp_path / 'slow.py'}",
        "trainer.samples_per_step=16",
    ]  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        with started_run([*train_overrides, *more], tmp_path / "out") as run:
            said = lambda text: text in run.output.read_text()  # noqa: E731
            run.wait_until(lambda: metrics.exists() and len(list(read_jsonl(metrics))) > 1, 120)
            node = cluster.add_node(num_cpus=1)
            run.wait_until(lambda: said("replica 1 of the rollout has joined"), 120)
            joined = len(list(read_jsonl(metrics)))
            run.wait_until(lambda: len(list(read_jsonl(metrics))) > joined + 1, 60)
            cluster.remove_node(node, allow_graceful=False)
            assert run.popen.wait(240) == 0, run.output.read_text()[-3000:]
            assert said("replica 1 of the rollout is lost, 1 of 2 are left")
    finally:
        cluster.shutdown()
    assert [row["step"] for row in read_jsonl(metrics)] == list(range(STEPS + 1))  # 0: validation
    samples = [s for s in read_samples(tmp_path / "run" / "samples.jsonl") if s.split == "train"]
    assert Counter(s.step for s in samples) == dict.fromkeys(range(1, STEPS + 1), 16)
    rows = Counter((s.step, s.prompt) for s in samples)
    assert all(count % 2 == 0 for count in rows.values())  # n is 2; prompts can be equal
