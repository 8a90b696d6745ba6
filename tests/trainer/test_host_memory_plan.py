"""The host memory of a run: loading, offloaded states, shared files; and its refusal."""

from __future__ import annotations

import pytest
from run_cases import two_steps
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from quadriga.config.commands import GenerateConfig, RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.data.conversations import ConversationLengths
from quadriga.data.pairs import PairLengths
from quadriga.errors import ConfigError
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.trainer.memory import host as host_module
from quadriga.trainer.memory.generation import check_generation_memory, generation_plan_text
from quadriga.trainer.memory.host import host_memory, host_settings
from quadriga.trainer.memory.phases import PROCESS_BYTES
from quadriga.trainer.memory.plan import memory_plan
from quadriga.trainer.memory.report import check_memory, plan_text
from quadriga.trainer.memory.rm import check_rm_memory, rm_plan_text
from quadriga.trainer.memory.sft import check_sft_memory, sft_plan_text

ENGINE = "actor_rollout_ref.actor.engine"
LOADING, OFFLOADED = "models while they are loaded", "offloaded states"
GPU = ("trainer.device=cuda", "trainer.device_memory_gb=80")


def planned(tiny_task, folder, *more, device="cuda"):
    config = load_config(TrainConfig, [*two_steps(tiny_task, folder), *more])
    plan = memory_plan(config, device)
    (pool,) = plan.pools
    return host_memory(host_settings(config), plan), pool


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A folder with experts of two dtypes, which is loaded whole."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_tiny_model(folder, ["one two three"], TinyModel(hidden_size=24, num_layers=1))
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, num_attention_heads=4, **sizes)
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    up = "model.layers.0.mlp.experts.1.up_proj.weight"
    save_file({**tensors, up: tensors[up].half()}, folder / "model.safetensors", {"format": "pt"})
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


# Runs that train one engine, and generations.

SEVEN_BILLION = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "architectures": ["Qwen2ForCausalLM"],
}  # fmt: skip
HOST = 24 * 2**30
LENGTHS = ConversationLengths(rows=64, longest=256, targets=128, share=0.5)


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory):
    """A folder with the config.json of a model of 7.6 billion parameters."""
    folder = tmp_path_factory.mktemp("config")
    Qwen2Config(**SEVEN_BILLION).save_pretrained(folder)
    return folder


def check_sft(config):
    check_sft_memory(config, LENGTHS, None, None)


def check_rm(config):
    check_rm_memory(config, PairLengths(longest=256, own=128))


@pytest.mark.parametrize(("settings", "check"), [(SFTConfig, check_sft), (RMConfig, check_rm)])
def test_one_engine_on_a_host_that_is_too_small_is_refused(
    seven_billion, monkeypatch, settings, check
):
    monkeypatch.setattr(host_module, "available_memory", lambda: HOST)
    given = (f"model.path={seven_billion}", "model.gradient_checkpointing=true", *GPU)
    on_device = load_config(settings, [*given, "trainer.device_memory_gb=60"])
    with pytest.raises(ConfigError, match=r"engine.offload_policy=true \(.* GiB of each rank"):
        check(on_device)
    hosted = load_config(settings, [*given, "engine.offload_policy=true"])
    with pytest.raises(ConfigError) as refused:
        check(hosted)
    text = str(refused.value)
    assert "of host memory = 1 (processes) + " in text and "(offloaded states)" in text
    assert "but 24 GiB are available on this machine" in text
    assert "keep states on the devices (engine.offload_policy=false)" in text
    assert "trainer.check_memory=false" in text and "offload_policy=true" not in text
    check(
        load_config(settings, [*given, "engine.offload_policy=true", "trainer.check_memory=false"])
    )
    monkeypatch.setattr(host_module, "available_memory", lambda: 8 * HOST)
    check(hosted)


def test_the_plans_of_one_engine_and_of_generation_show_the_host(seven_billion, monkeypatch):
    monkeypatch.setattr(host_module, "available_memory", lambda: HOST)
    given = (f"model.path={seven_billion}", *GPU)
    offload = "engine.offload_policy=true"
    generate = load_config(GenerateConfig, [*given, "rollout.micro_batch_size=1"])
    texts = [
        sft_plan_text(load_config(SFTConfig, [*given, offload]), LENGTHS, None, None),
        rm_plan_text(load_config(RMConfig, [*given, offload]), PairLengths(256, 128)),
    ]
    for text in texts:
        assert "host memory of a node" in text and OFFLOADED in text
        assert "the ranks of a node need" in text
        assert "    keep states on the devices (engine.offload_policy=false)" in text
    text = generation_plan_text(generate)
    assert "host memory of a node" in text and LOADING in text
    assert "the ranks of a node need" not in text


def test_a_rank_of_generation_loads_the_whole_model_on_its_host(seven_billion, monkeypatch):
    monkeypatch.setattr(host_module, "available_memory", lambda: HOST)
    prompts = type("Prompts", (), {"longest": 16, "__len__": lambda self: 1})()
    given = (f"model.path={seven_billion}", *GPU)
    check_generation_memory(load_config(GenerateConfig, given), prompts)
    two = load_config(GenerateConfig, [*given, "trainer.n_gpus_per_node=2"])
    with pytest.raises(ConfigError, match=r"but 24 GiB are .* use fewer ranks of a node"):
        check_generation_memory(two, prompts)


def test_what_offloads_states_is_named_if_the_host_is_too_small(tiny_task, tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "available_memory", lambda: 1)
    turns = "actor_rollout_ref.rollout.take_turns=true"
    more = [f"{ENGINE}.optimizer_offload=true", turns, "actor_rollout_ref.model.use_shm=true"]
    config = load_config(TrainConfig, [*two_steps(tiny_task, tmp_path), *GPU, *more])
    with pytest.raises(ConfigError) as refused:
        check_memory(config)
    text = str(refused.value)
    assert f"{ENGINE}.optimizer_offload=false, actor_rollout_ref.rollout.take_turns=false" in text
    assert "set use_shm=false" in text and "take_turns=true" not in text
