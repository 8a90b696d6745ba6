"""The memory that vLLM and SGLang reserve, in the plan of a run."""

from __future__ import annotations

import pytest
from run_cases import two_steps

from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.rollout.reserved import CONTEXT_BYTES
from quadriga.trainer.memory.machine import GIB
from quadriga.trainer.memory.phases import PROCESS_BYTES
from quadriga.trainer.memory.plan import memory_plan
from quadriga.trainer.memory.report import check_memory, plan_text

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.take_turns=true"
GPU = ("trainer.device=cuda", "trainer.device_memory_gb=32")
GRAPHS = "activations and CUDA graphs of "


def planned(tiny_task, folder, *more, device="cuda"):
    config = settings(tiny_task, folder, *more)
    return memory_plan(config, device)


def settings(tiny_task, folder, *more) -> TrainConfig:
    return load_config(TrainConfig, [*two_steps(tiny_task, folder), *more])


def engine(name, *options) -> list[str]:
    return [f"{ROLLOUT}.name={name}", *(f"+{ROLLOUT}.options.{option}" for option in options)]


def held_by_trainer(pool) -> int:
    actor = pool.engines["actor"]
    return actor.parameters + actor.optimizer


def test_vllm_holds_its_share_of_the_device_in_every_phase(tiny_task, tmp_path):
    """Half of 32 GiB: the context of the process, the weights, and keys and values in the rest."""
    plan = planned(tiny_task, tmp_path, *GPU, *engine("vllm"))
    (pool,) = plan.pools
    assert pool.generation.weights + pool.generation.kv_cache == 16 * GIB - CONTEXT_BYTES
    assert 0 < pool.generation.weights < GIB and plan.missing == ()
    held = held_by_trainer(pool) + 16 * GIB
    assert pool.phases["generation"] == held
    assert pool.phases["update of the actor"] == held + pool.engines["actor"].update_peak
    assert min(pool.phases.values()) >= held
    # Keys and values are no states, which a larger share would only replace.
    assert pool.states < GIB + PROCESS_BYTES["accelerator"]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_taking_turns_releases_the_reservation_while_the_actor_trains(name, tiny_task, tmp_path):
    (plain,) = planned(tiny_task, tmp_path, *GPU, *engine(name)).pools
    (turns,) = planned(tiny_task, tmp_path, *GPU, *engine(name), TURNS).pools
    update, states = "update of the actor", held_by_trainer(plain)
    context = CONTEXT_BYTES if name == "vllm" else 0  # which the process keeps
    assert plain.phases[update] - turns.phases[update] == 16 * GIB - context
    assert plain.phases["generation"] - turns.phases["generation"] == states
    # Before the first sync nothing was released, and there are no moments.
    moments = plain.engines["actor"].optimizer
    assert plain.phases["weight sync"] - turns.phases["weight sync"] == moments


def test_the_options_of_vllm_are_in_the_plan(tiny_task, tmp_path):
    def reserved(*options, more=(), device="cuda"):
        found = planned(tiny_task, tmp_path, *more, *engine("vllm", *options), device=device)
        return found.pools[0].generation, found.missing

    whole, _ = reserved(more=GPU)
    share, missing = reserved("gpu_memory_utilization=0.25", more=GPU)
    assert share.weights + share.kv_cache == 8 * GIB - CONTEXT_BYTES and missing == ()
    cache, missing = reserved("kv_cache_mb=2048", more=GPU)
    assert cache.kv_cache == 2 * GIB and missing == (f"{GRAPHS}vLLM",)
    half, _ = reserved("tensor_parallel_size=2", more=(*GPU, "trainer.n_gpus_per_node=2"))
    assert half.weights == whole.weights // 2
    on_cpu, missing = reserved(device="cpu")
    assert on_cpu.kv_cache == GIB and missing == ("activations of vLLM",)
    unknown, missing = reserved(more=["trainer.device=cuda"])
    assert unknown.kv_cache == 0
    assert missing == ("keys and values of vLLM, 0.5 of the device less the weights",)


def test_the_options_of_sglang_are_in_the_plan(tiny_task, tmp_path):
    def reserved(*options, device="cuda"):
        found = planned(tiny_task, tmp_path, *GPU, *engine("sglang", *options), device=device)
        return found.pools[0], found.missing

    half, missing = reserved()
    assert half.generation.weights + half.generation.kv_cache == 16 * GIB
    assert missing == (f"{GRAPHS}SGLang",)
    # Its scheduler is a process of its own that uses the device.
    held = 2 * PROCESS_BYTES["accelerator"] + held_by_trainer(half) + 16 * GIB
    assert half.phases["generation"] == held
    quarter, _ = reserved("server_args={mem_fraction_static: 0.25}")
    assert quarter.generation.weights + quarter.generation.kv_cache == 8 * GIB
    server, missing = reserved("url=http://127.0.0.1:30000")
    assert server.generation.peak == server.generation.weights == 0
    assert missing == ("the SGLang at http://127.0.0.1:30000",)
    two, missing = reserved("tensor_parallel=2")
    assert missing == (f"{GRAPHS}SGLang, and its part on 1 further devices",)
    assert two.generation.weights == half.generation.weights // 2
    on_cpu, missing = reserved(device="cpu")
    config = tiny_task_config(tiny_task)
    size = config.hidden_size // config.num_attention_heads
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4
    assert on_cpu.generation.kv_cache == (1 << 16) * of_token
    assert missing == ("activations of SGLang",)
    assert on_cpu.phases["generation"] > 4 * PROCESS_BYTES["cpu"]


def tiny_task_config(tiny_task):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(tiny_task.model)


def test_a_rollout_with_devices_of_its_own_has_a_plan_of_its_own(tiny_task, tmp_path):
    apart = ["trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]"]
    actor, rollout = planned(tiny_task, tmp_path, *GPU, *engine("vllm"), *apart).pools
    assert actor.largest[1] < 2 * GIB
    assert rollout.phases == {"generation": 16 * GIB}
    _, rollout = planned(tiny_task, tmp_path, *GPU, *engine("sglang"), *apart).pools
    # Its rank only sends requests; the scheduler is the process that uses the device.
    assert rollout.phases == {"generation": PROCESS_BYTES["accelerator"] + 16 * GIB}


def test_a_reservation_that_does_not_fit_is_refused_with_its_setting(tiny_task, tmp_path):
    more = engine("vllm", "gpu_memory_utilization=1.0")
    with pytest.raises(ConfigError) as refused:
        check_memory(settings(tiny_task, tmp_path, *GPU, *more))
    assert f"lower {ROLLOUT}.options.gpu_memory_utilization=1" in str(refused.value)
    assert "take_turns=true" in str(refused.value)
    assert "micro_batch_size=256" not in str(refused.value)
    check_memory(settings(tiny_task, tmp_path, *GPU, *engine("vllm")))


def test_a_plan_that_leaves_something_out_does_not_say_that_the_run_fits(tiny_task, tmp_path):
    assert "the run fits" in plan_text(settings(tiny_task, tmp_path, *GPU, *engine("vllm")))
    config = settings(tiny_task, tmp_path, *GPU, *engine("sglang"))
    text, left = plan_text(config), 32 * GIB - memory_plan(config, "cuda").pools[0].largest[1]
    assert f"not counted: {GRAPHS}SGLang" in text and "the run fits" not in text
    assert f"what is counted fits; {left / GIB:.3g} GiB are left for what is not" in text
    on_cpu = plan_text(settings(tiny_task, tmp_path, *GPU[1:], *engine("vllm")))
    assert "what is counted fits; " in on_cpu and "the run fits" not in on_cpu


@pytest.mark.parametrize(("options", "copies"), [((), 1), (("sleep_level=2",), 0)])
def test_released_weights_are_in_host_memory_unless_they_are_dropped(
    options, copies, tiny_task, tmp_path
):
    config = settings(tiny_task, tmp_path, *GPU, *engine("vllm", *options), TURNS)
    plan = memory_plan(config, "cuda")
    weights = plan.pools[0].generation.weights
    assert plan.pools[0].generation.backup == copies * weights > -1
    without = settings(tiny_task, tmp_path, *GPU, *engine("vllm"))
    assert memory_plan(without, "cuda").pools[0].generation.backup == 0


def test_generation_with_vllm_is_planned(tiny_task, capsys):
    more = [f"model.path={tiny_task.model}", "rollout.name=vllm", "trainer.device=cuda"]
    assert main(["plan", "generate", *more, "trainer.device_memory_gb=32"]) == 0
    text = capsys.readouterr().out
    assert "generation                        16 ← most" in text and "the run fits" in text
    small = ["trainer.device_memory_gb=12", "+rollout.options.gpu_memory_utilization=0.95"]
    assert main(["plan", "generate", *more, *small]) == 0
    assert "the run fits" in capsys.readouterr().out
    large = ["trainer.device_memory_gb=32", "+rollout.options.kv_cache_mb=40000"]
    assert main(["plan", "generate", *more, *large]) == 0
    assert "lower rollout.options.kv_cache_mb=40000" in capsys.readouterr().out
