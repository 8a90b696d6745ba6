"""The refusal of a run that does not fit its memory names what is too large, and what helps."""

from __future__ import annotations

import pytest
from run_cases import two_steps
from transformers import LlamaConfig

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.engines.memory import passes
from quadriga.errors import ConfigError
from quadriga.trainer.memory.machine import gib, gib_apart
from quadriga.trainer.memory.plan import memory_plan
from quadriga.trainer.memory.remedies import remedies
from quadriga.trainer.memory.report import check_memory, plan_text


def settings(tiny_task, folder, *more) -> TrainConfig:
    return load_config(TrainConfig, [*two_steps(tiny_task, folder), *more])


def test_forms_of_checkpointing_that_save_nothing_are_not_proposed(tiny_task, tmp_path):
    full = "actor_rollout_ref.model.gradient_checkpointing=true"
    with pytest.raises(ConfigError) as refused:
        check_memory(settings(tiny_task, tmp_path, "trainer.device_memory_gb=0.55", full))
    assert "gradient_checkpointing" not in str(refused.value)
    table = plan_text(settings(tiny_task, tmp_path, full))
    assert "checkpointing=false" in table and "checkpointing=true" not in table


def test_states_that_do_not_fit_are_named_first(tiny_task, tmp_path):
    pool = memory_plan(settings(tiny_task, tmp_path), "cpu").pools[0]
    with pytest.raises(ConfigError) as refused:
        check_memory(
            settings(tiny_task, tmp_path, f"trainer.device_memory_gb={pool.states / 2**30 - 1e-6}")
        )
    text = str(refused.value)
    shown, _ = gib_apart(pool.states, int((pool.states / 2**30 - 1e-6) * 2**30))
    assert text.startswith(
        "processes, parameters, gradients and optimizer states alone need "
        f"{shown} GiB on a node: ranks × GiB = 1 × {gib(pool.states)} (actor, rollout, "
        "of which 0.5 the process); but"
    )
    assert "use a smaller model" in text  # the one rank has no others beside it
    for useless in ("max_tokens_per_micro_batch", "gradient_checkpointing", "fewer ranks"):
        assert useless not in text


def test_a_limit_below_that_of_the_processes_is_named(tiny_task, tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_memory(settings(tiny_task, tmp_path, "trainer.device_memory_gb=0.1"))
    assert str(refused.value).startswith(
        "the processes alone need 0.5 GiB on a node: ranks × GiB = 1 × 0.5 (actor, rollout, of "
        "which 0.5 the process); but 0.1 GiB are trainer.device_memory_gb; raise "
        "trainer.device_memory_gb; or use machines with more memory; `quadriga plan` shows"
    )


@pytest.mark.parametrize("size", [32, 64])
def test_moments_in_8_bits_are_proposed_where_they_fit(tiny_task, tmp_path, size):
    """A row of a weight has 32 elements, or 64, which 8 bits need."""
    write_llama(tmp_path / "model", size)
    path = f"actor_rollout_ref.model.path={tmp_path / 'model'}"
    config = settings(tiny_task, tmp_path, path)
    assert any("adamw_8bit" in text for text in remedies(config, memory_plan(config, "cpu"))) == (
        size == 64
    )


def test_the_pass_of_a_reward_model_is_made_smaller_by_its_own_settings(tiny_task, tmp_path):
    write_llama(tmp_path / "scores", 512)
    path = f"reward_model.model.path={tmp_path / 'scores'}"
    config = settings(tiny_task, tmp_path, "reward_model.enable=true", path,
                      "data.val_files=[]")  # fmt: skip
    plan = memory_plan(config, "cpu")
    assert plan.pools[0].largest[0] == "scores of the reward model"
    found = remedies(config, plan)
    assert found[0] == "lower reward_model.engine.max_tokens_per_micro_batch=16384"
    assert not any("gradient_checkpointing" in text or "actor.engine" in text for text in found)


def test_micro_batches_of_one_row_are_not_lowered(tiny_task, tmp_path):
    one = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    config = settings(tiny_task, tmp_path, one, "actor_rollout_ref.rollout.micro_batch_size=1")
    found = remedies(config, memory_plan(config, "cpu"))
    assert not any("ppo_micro_batch" in text or "rollout.micro_batch" in text for text in found)


def write_llama(folder, size: int) -> None:
    LlamaConfig(
        vocab_size=96, hidden_size=size, intermediate_size=size, num_hidden_layers=1,
        num_attention_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip


CUDA = ("trainer.device=cuda", "trainer.n_gpus_per_node=4")


@pytest.mark.parametrize("part", ["states", "all"])
def test_the_refusal_and_what_to_change_are_for_the_pool_that_needs_most(tiny_task, tmp_path, part):
    write_llama(tmp_path / "critic", 256)
    more = (*CUDA, "placement.actor=[0,1]", "placement.rollout=[0,1]", "placement.critic=[2,3]",
            "algorithm.adv_estimator=gae", f"critic.model.path={tmp_path / 'critic'}",
            "actor_rollout_ref.rollout.micro_batch_size=1")  # fmt: skip
    actor, critic = memory_plan(settings(tiny_task, tmp_path, *more), "cuda").pools
    size = actor.bytes_of(part) - 8
    assert size > (critic.states if part == "all" else 0) and critic.bytes_of(part) > size
    limit = f"trainer.device_memory_gb={size / 2**30}"
    with pytest.raises(ConfigError, match="a rank of critic needs") as refused:
        check_memory(settings(tiny_task, tmp_path, *more, limit))
    assert "critic.engine.offload_policy=true" in str(refused.value)
    assert "alone" in str(refused.value) or part == "all"
    assert "actor_rollout_ref" not in str(refused.value)


def test_the_pool_that_needs_most_of_a_node_has_most_bytes_there(tiny_task, tmp_path):
    """Three ranks of the actor need more than the one rank of the critic, which is larger."""
    write_llama(tmp_path / "critic", 256)
    more = ("trainer.n_gpus_per_node=4", "placement.actor=[0-2]", "placement.rollout=[0-2]",
            "placement.critic=[3]", "algorithm.adv_estimator=gae", "data.train_batch_size=12",
            f"critic.model.path={tmp_path / 'critic'}", "critic.ppo_mini_batch_size=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=12", "trainer.backend=ray")  # fmt: skip
    plan = memory_plan(settings(tiny_task, tmp_path, *more), "cpu")
    assert plan.pools[1].states > plan.pools[0].states
    assert plan.largest_pool("states") == 0


def test_moments_in_8_bits_are_not_proposed_where_nothing_falls(tiny_task, tmp_path):
    """The first weight sync needs most: there are no moments yet."""
    write_llama(tmp_path / "model", 64)
    more = (*CUDA, f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            "actor_rollout_ref.rollout.take_turns=true")  # fmt: skip
    config = settings(tiny_task, tmp_path, *more)
    found = remedies(config, memory_plan(config, "cuda"), "states")
    assert not any("adamw_8bit" in text for text in found)


def test_what_a_pass_needs_is_counted_once(tiny_task, tmp_path, monkeypatch):
    """The plans with moments in 8 bits and with states in host memory have the same passes."""
    write_llama(tmp_path / "model", 64)
    counted, count = [], passes.pass_memory

    def counting(module, engine, rows, **more):
        counted.append((rows, more["backward"]))
        return count(module, engine, rows, **more)

    monkeypatch.setattr(passes, "pass_memory", counting)
    more = (*CUDA, f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            f"trainer.device_memory_gb={1 + 1e-6}")  # fmt: skip
    with pytest.raises(ConfigError, match=r"offload_policy=true.*adamw_8bit"):
        check_memory(settings(tiny_task, tmp_path, *more))
    assert len(counted) == len(set(counted)) > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_divided_if_there_are_ranks_for_it(tiny_task, tmp_path, ranks):
    more = ("actor_rollout_ref.actor.engine.name=megatron", f"trainer.n_gpus_per_node={ranks}")
    config = settings(tiny_task, tmp_path, *more)
    found = remedies(config, memory_plan(config, "cpu"), "states")
    assert any("tensor_parallel_size" in text for text in found) == (ranks == 2)
