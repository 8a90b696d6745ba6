"""The host memory of a run: loading, offloaded states, shared files; and its refusal."""

from __future__ import annotations

import pytest
from run_cases import two_steps
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.trainer.memory import host as host_module
from quadriga.trainer.memory.host import host_memory
from quadriga.trainer.memory.plan import PROCESS_BYTES, memory_plan
from quadriga.trainer.memory.report import check_memory, plan_text

ENGINE = "actor_rollout_ref.actor.engine"
LOADING, OFFLOADED = "models while they are loaded", "offloaded states"
GPU = ("trainer.device=cuda", "trainer.device_memory_gb=80")


def planned(tiny_task, folder, *more, device="cuda"):
    config = load_config(TrainConfig, [*two_steps(tiny_task, folder), *more])
    plan = memory_plan(config, device)
    (pool,) = plan.pools
    return host_memory(config, plan), pool


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A folder whose tensors are not one-to-one with the parameters."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_tiny_model(folder, ["one two three"], TinyModel(hidden_size=24, num_layers=1))
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, num_attention_heads=4, **sizes)
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_without_offload_a_host_holds_processes_and_the_rollout_while_it_is_loaded(
    tiny_task, tmp_path
):
    found, pool = planned(tiny_task, tmp_path)
    assert found.parts == {
        "processes": PROCESS_BYTES["accelerator"], LOADING: pool.generation.weights,
    }  # fmt: skip
    assert found.whole == {}


def test_what_settings_keep_on_the_host_is_counted(tiny_task, tmp_path):
    offload = [f"{ENGINE}.param_offload=true", f"{ENGINE}.optimizer_offload=true"]
    found, pool = planned(tiny_task, tmp_path, *offload)
    actor = pool.engines["actor"]
    assert found.parts[OFFLOADED] == actor.parameters + actor.optimizer
    found, pool = planned(tiny_task, tmp_path, f"{ENGINE}.offload_policy=true")
    assert found.parts[OFFLOADED] == pool.engines["actor"].on_host > 0
    found, _ = planned(tiny_task, tmp_path, "actor_rollout_ref.rollout.take_turns=true")
    assert found.parts[OFFLOADED] == actor.parameters + actor.optimizer


def test_ranks_of_a_node_are_added_and_share_the_files(tiny_task, tmp_path):
    one, _ = planned(tiny_task, tmp_path)
    ranks = ("trainer.n_gpus_per_node=2", "trainer.backend=ray")
    two, _ = planned(tiny_task, tmp_path, *ranks, "actor_rollout_ref.model.use_shm=true")
    files = sum(file.stat().st_size for file in tiny_task.model.glob("*.safetensors"))
    assert two.parts["weight files in shared memory"] == files
    assert two.parts["processes"] == 2 * one.parts["processes"]


def test_a_model_that_each_rank_loads_whole_is_counted_and_named(tiny_task, experts, tmp_path):
    more = [f"actor_rollout_ref.model.path={experts}", "actor_rollout_ref.actor.use_kl_loss=true"]
    found, pool = planned(tiny_task, tmp_path, *more)
    assert set(found.whole) == {"actor", "ref"}
    assert found.parts[LOADING] == 4 * pool.engines["actor"].weights
    # On a CPU the actor is held while the reference, in float32 too, is loaded whole.
    on_cpu, pool = planned(tiny_task, tmp_path, *more, device="cpu")
    held = pool.engines["actor"].parameters
    whole = 4 * pool.engines["ref"].weights
    assert on_cpu.parts[LOADING] == max(
        held + whole, held + pool.engines["ref"].parameters + pool.generation.weights
    )


def test_host_memory_that_does_not_suffice_is_refused_with_the_arithmetic(
    tiny_task, experts, tmp_path, monkeypatch
):
    monkeypatch.setattr(host_module, "available_memory", lambda: 2**29)
    path = f"actor_rollout_ref.model.path={experts}"
    config = load_config(TrainConfig, [*two_steps(tiny_task, tmp_path), *GPU, path])
    with pytest.raises(ConfigError) as refused:
        check_memory(config)
    text = str(refused.value)
    assert "the ranks of a node need 1 GiB of host memory = 1 (processes) + " in text
    assert "but 0.5 GiB are available on this machine; each rank loads whole models (actor:" in text
    assert "host memory of a node" in plan_text(config) and "is loaded whole" in plan_text(config)
    monkeypatch.setattr(host_module, "available_memory", lambda: 2**32)
    check_memory(config)


def test_host_memory_of_other_machines_is_not_compared(tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "available_memory", lambda: 1)
    nodes = ("trainer.nnodes=2", "trainer.backend=ray")
    check_memory(load_config(TrainConfig, [*two_steps(tiny_task, tmp_path), *GPU, *nodes]))
