"""Runs that train a mixture of experts with the experts of the rollout (`replay_routes`)."""

import re
import shutil

import pytest
import torch
from run_cases import STREAMED, metrics_of_run, often
from test_agent_runs import GAME
from test_megatron_runs import STAGES, megatron
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import megatron_on_cpu

ROLLOUT = "actor_rollout_ref.rollout"
APART = ["trainer.n_gpus_per_node=3", "placement.actor=[0]", "placement.rollout=[1,2]"]
LORA = ["actor_rollout_ref.model.lora.rank=4"]
FULL_KL = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full"]
WAYS = {
    "stream": STREAMED,
    "replicas": [*STREAMED, *APART],
    "adapters": [*LORA, *FULL_KL],
    "megatron": megatron(*STAGES),
    "checkpointing": ["actor_rollout_ref.model.gradient_checkpointing=true"],
    "turns": [
        "agent.max_turn_tokens=4",
        f"{ROLLOUT}.slice_tokens=3",
        "data.max_response_length=60",
    ],
}


@pytest.fixture
def experts(train_overrides, tmp_path):
    """The settings of a run of a mixture of experts, with a rollout of 16 bits."""
    folder, base = tmp_path / "experts", train_overrides[0].partition("=")[2]
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(base)), hidden_size=32, num_hidden_layers=2,
        moe_intermediate_size=8, head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        num_experts=64, num_experts_per_tok=8, norm_topk_prob=True, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = f"actor_rollout_ref.model.path={folder}"
    return [*train_overrides, model, f"{ROLLOUT}.dtype=bfloat16"]


@pytest.mark.parametrize("way", [*often(WAYS, "stream", "turns"), "no replay"])
def test_training_with_the_experts_of_the_rollout(experts, rule, tmp_path, way):
    """The log-probabilities differ by rounding to 16 bits, and without replay by other experts."""
    if way == "turns":
        (tmp_path / "game.py").write_text(GAME)
        rule = f"agent.path={tmp_path / 'game.py'}"
    if way == "megatron":
        (tmp_path / "on_cpu.py").write_text(megatron_on_cpu.USER_FILE)
        experts.append(f"algorithm.user_files=[{tmp_path / 'on_cpu.py'}]")
    replay = f"{ROLLOUT}.replay_routes={str(way in WAYS).lower()}"
    rows = metrics_of_run([*experts, rule, replay, *WAYS.get(way, [])])
    largest = rows[1]["mismatch/max"]
    assert largest < 0.06 if way in WAYS else largest > 0.1


def test_a_dense_model_is_refused(refused):
    problem = "LlamaForCausalLM .* has 0 layers with experts whose choice can be replayed"
    assert re.search(problem, refused(f"{ROLLOUT}.replay_routes=true"))
