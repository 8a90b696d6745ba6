"""vLLM computes with the adapters of the actor, and only they are sent after the first sync."""

import pytest
import torch
from agreement import GREEDY, needs, requests, write_model, write_task

from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig, TrainConfig
from quadriga.engines import build_engine
from quadriga.errors import ModelError, WorkerError
from quadriga.models.adapters import is_stored_part
from quadriga.observability.jsonl import read_jsonl
from quadriga.rollout import build_rollout
from quadriga.rollout.guard import probe_ids
from quadriga.trainer.main import run_training
from quadriga.weight_sync.sync import WeightSync
from quadriga.weight_sync.transport import trained_scores
from training_step import train_once

ROLLOUT = "actor_rollout_ref.rollout"

pytestmark = [needs("vllm"), pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("model", ["qwen2, tied", "llama, grouped queries"])
def test_log_probabilities_are_those_of_the_trainer_with_adapters_of_five_steps(tmp_path, model):
    folder = write_model(model, tmp_path / "model")
    config = ModelConfig(path=folder, lora=LoraConfig(rank=3, alpha=7.0))  # scaling 7 / 3
    trainer = build_engine(config, EngineConfig(), OptimConfig(lr=0.05))
    ours = build_rollout("vllm", config, dtype="float32", kv_cache_mb=64)
    merged = build_rollout("hf", config.frozen(), dtype="float32")
    try:
        to_hf = WeightSync(trainer, merged)
        sync = WeightSync(trainer, ours)
        base = sync.run(1)
        prompt_ids, mask, seeds = requests()
        for version in range(2, 7):
            before = ours.generate(prompt_ids, mask, GREEDY, seeds)
            train_once(trainer, tokens=20)
            report = sync.run(version)
            to_hf.run(version)
            assert report.num_bytes < base.num_bytes / 2
            assert ours.version == version
            probes = probe_ids(ours.abilities, version)
            found = ours.score(probes, torch.ones_like(probes))[:, 1:]
            expected = trained_scores(trainer, ours.abilities, version)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            out, of_hf = (each.generate(prompt_ids, mask, GREEDY, seeds) for each in (ours, merged))
            assert torch.equal(out.response_ids, of_hf.response_ids)
            torch.testing.assert_close(
                out.rollout_log_probs, of_hf.rollout_log_probs, atol=1e-4, rtol=0
            )
            assert set(out.weight_versions.tolist()) == {version}
        assert not torch.equal(before.rollout_log_probs, out.rollout_log_probs)
        _check_a_fault_is_named(trainer, ours)
        with pytest.raises(ModelError, match=r"lora_A.* with shape \(4, 64\), .* has shape \(3, 6"):
            name = next(name for name in ours.weight_dtypes() if "q_proj.lora_A" in name)
            ours.update_weights([(name, torch.zeros(4, 64))], 9)
    finally:
        ours.close()
        merged.close()


# Rewards that differ, although the model is random.
RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3
"""
PLACEMENTS = {
    "one process": ["trainer.backend=local"],
    "one process, taking turns": [
        "trainer.backend=local", f"{ROLLOUT}.take_turns=true", f"{ROLLOUT}.options.sleep_level=2",
    ],
    "apart": [
        "trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2",
        "placement.actor=[0]", "placement.rollout=[1]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_trains_adapters_on_what_its_actor_computes(tmp_path, placement):
    write_task(tmp_path)
    config = load_config(
        TrainConfig,
        [f"actor_rollout_ref.model.path={tmp_path / 'base'}", "actor_rollout_ref.model.lora.rank=4",
         f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]",
         f"data.val_files=[{tmp_path / 'data' / 'test.parquet'}]",
         "data.train_batch_size=8", "data.max_response_length=12", f"{ROLLOUT}.n=2",
         "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=1e-2",
         "actor_rollout_ref.actor.engine.dtype=float32", f"{ROLLOUT}.dtype=float32",
         f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.load_adapters=true", "algorithm.adv_estimator=grpo",
         f"{ROLLOUT}.mismatch.bound=1e-3", "trainer.total_training_steps=5", "trainer.test_freq=0",
         "trainer.threads_per_worker=1", f"trainer.default_local_dir={tmp_path / 'run'}",
         "trainer.loggers=[jsonl]", f"reward.path={tmp_path / 'rule.py'}", "reward.num_processes=0",
         "actor_rollout_ref.actor.skip_zero_advantages=false", *PLACEMENTS[placement]],
    )  # fmt: skip
    (tmp_path / "rule.py").write_text(RULE)
    run_training(config)
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 5
    for row in rows:
        assert row["mismatch/max"] < 1e-3, row
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def _check_a_fault_is_named(trainer, ours):
    """An adapter that is lost on the way differs from the trainer's, and is named."""

    class Lossy:
        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            return getattr(self.target, name)

        def update_weights(self, stream, version):
            kept = [(n, t) for n, t in stream if "layers.1.mlp.up_proj.lora_B" not in n]
            self.target.update_weights(kept, version)

    train_once(trainer, tokens=20)
    with pytest.raises(WorkerError, match="differs between trainer and rollout") as raised:
        WeightSync(trainer, Lossy(ours)).run(8)
    assert raised.value.tensors == ("base_model.model.model.layers.1.mlp.up_proj.lora_B.weight",)
    assert all(map(is_stored_part, raised.value.tensors))
