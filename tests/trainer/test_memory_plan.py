"""The memory plan of a run: its phases, its table, and the refusal of a run that does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from run_cases import two_steps

from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.memory import plan as plan_module
from quadriga.trainer.memory.machine import (
    DeviceLimit,
    available_memory,
    planned_device,
)
from quadriga.trainer.memory.phases import PROCESS_BYTES
from quadriga.trainer.memory.plan import memory_plan
from quadriga.trainer.memory.remedies import remedies
from quadriga.trainer.memory.report import check_memory, plan_text, shortage
from quadriga.trainer.preflight import check_train_config


def settings(tiny_task, folder, *more) -> TrainConfig:
    return load_config(TrainConfig, [*two_steps(tiny_task, folder), *more])


def only_pool(config, device="cpu"):
    (pool,) = memory_plan(config, device).pools
    return pool


@pytest.mark.parametrize("shared", [True, False])
def test_phases_add_what_the_roles_hold(tiny_task, tmp_path, shared):
    share = f"actor_rollout_ref.rollout.share_weights={str(shared).lower()}"
    config = settings(tiny_task, tmp_path, "algorithm.adv_estimator=gae", share)
    pool = only_pool(config)
    actor, critic, rollout = pool.engines["actor"], pool.engines["critic"], pool.generation
    held = actor.parameters + actor.optimizer + critic.parameters + critic.optimizer
    held += PROCESS_BYTES["cpu"] + (0 if shared else rollout.weights)
    assert pool.phases["generation"] == held + rollout.peak
    assert pool.phases["update of the actor"] == held + actor.update_peak
    assert pool.phases["values"] == held + critic.evaluate_peak
    assert pool.largest[1] == max(pool.phases.values())


def test_offload_and_turns_free_memory_of_accelerators_only(tiny_task, tmp_path):
    offload = [
        "actor_rollout_ref.actor.engine.param_offload=true",
        "actor_rollout_ref.actor.engine.optimizer_offload=true",
    ]
    turns = ["actor_rollout_ref.rollout.take_turns=true"]
    plain, offloaded, alternating = (
        only_pool(settings(tiny_task, tmp_path, *more), "cuda") for more in ([], offload, turns)
    )
    actor = plain.engines["actor"]
    states = actor.parameters + actor.optimizer
    for other in (offloaded, alternating):
        assert plain.phases["generation"] - other.phases["generation"] == states
    update = "update of the actor"
    # Offloaded moments are on the device during the step of the optimizer, after the gradients.
    saved = min(actor.optimizer, actor.backward_peak - actor.step_peak)
    assert plain.phases[update] - offloaded.phases[update] == saved > 0
    assert plain.phases[update] - alternating.phases[update] == plain.generation.weights
    own = "actor_rollout_ref.rollout.share_weights=false"
    on_cpu = only_pool(settings(tiny_task, tmp_path, *offload, own))
    assert on_cpu.phases == only_pool(settings(tiny_task, tmp_path, own)).phases


def test_the_offload_policy_leaves_no_states_on_an_accelerator(tiny_task, tmp_path):
    offload = "actor_rollout_ref.actor.engine.offload_policy=true"
    plain, hosted = (
        only_pool(settings(tiny_task, tmp_path, *more), "cuda") for more in ([], [offload])
    )
    one, other = plain.engines["actor"], hosted.engines["actor"]
    shards = one.optimizer // 2
    buffers = one.parameters - shards
    assert (other.parameters, other.optimizer, other.step_peak) == (buffers, 0, 0)
    assert other.on_host == 4 * shards and one.on_host == 0
    assert plain.phases["generation"] - hosted.phases["generation"] == 3 * shards
    assert hosted.phases["update of the actor"] < plain.phases["update of the actor"] - 2 * shards
    text = plan_text(settings(tiny_task, tmp_path, offload, "trainer.device=cuda"))
    assert "in host memory" in text
    on_cpu = only_pool(settings(tiny_task, tmp_path, offload))
    assert on_cpu.phases == only_pool(settings(tiny_task, tmp_path)).phases


def test_the_plan_reads_the_optimizer(tiny_task, tmp_path):
    plain, muon = (
        only_pool(settings(tiny_task, tmp_path, f"actor_rollout_ref.actor.optim.name={name}"))
        for name in ("adamw", "muon")
    )
    one, other = (pool.engines["actor"].optimizer for pool in (plain, muon))
    assert other < 0.8 * one
    assert plain.phases["generation"] - muon.phases["generation"] == one - other


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # With one optimizer step the update computes the old log-probabilities.
        (["ppo_mini_batch_size=8"], "value"),
        (["ppo_mini_batch_size=8", "old_log_probs_from_update=false"], "unused"),
        (["ppo_mini_batch_size=8", "entropy_coeff=0.01"], "gradient"),
        ([], "unused"),
    ],
    ids=["in the update", "before it", "bonus", "two steps"],
)
def test_the_plan_knows_what_the_update_needs_of_the_entropies(
    more, expected, tiny_task, tmp_path, monkeypatch
):
    rows = []

    def recorded(*args):
        rows.append(args[6])
        return count(*args)

    count = plan_module._training_memory
    monkeypatch.setattr(plan_module, "_training_memory", recorded)
    actor = [f"actor_rollout_ref.actor.{setting}" for setting in more]
    memory_plan(settings(tiny_task, tmp_path, *actor), "cpu")
    assert [update.entropy for update in rows] == [expected]


def test_states_are_sharded_over_the_ranks_of_a_role(tiny_task, tmp_path):
    one = only_pool(settings(tiny_task, tmp_path)).engines["actor"]
    placed = settings(
        tiny_task, tmp_path, "trainer.n_gpus_per_node=4",
        "placement.actor=[0,1]", "placement.rollout=[2,3]",
    )  # fmt: skip
    actor, rollout = memory_plan(placed, "cpu").pools
    assert actor.generation is None and not rollout.engines
    assert actor.engines["actor"].optimizer == pytest.approx(one.optimizer / 2, rel=0.02)
    # On a CPU the two ranks of both pools share the memory of the node.
    limit = limit_of(2 * actor.largest[1] + 2 * rollout.largest[1])
    assert shortage(memory_plan(placed, "cpu"), limit) is None
    less = limit_of(limit.size - 1)
    assert "2 × " in shortage(memory_plan(placed, "cpu"), less)


def test_the_ranks_of_each_node_are_added(tiny_task, tmp_path):
    """Pools on different nodes do not share memory."""
    nodes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", "trainer.backend=ray"]
    apart = ["placement.actor=[0,1]", "placement.rollout=[2,3]"]
    config = settings(tiny_task, tmp_path, *nodes, *apart)
    actor, rollout = memory_plan(config, "cpu").pools
    largest = 2 * max(actor.largest[1], rollout.largest[1])
    assert shortage(memory_plan(config, "cpu"), limit_of(largest)) is None
    assert "ranks × GiB = 2 × " in shortage(memory_plan(config, "cpu"), limit_of(largest - 1))
    uneven = ["placement.actor=[0,1,2]", "placement.rollout=[3]", "data.train_batch_size=12",
              "actor_rollout_ref.actor.ppo_mini_batch_size=12"]  # fmt: skip
    config = settings(tiny_task, tmp_path, *nodes, *uneven)
    actor, rollout = memory_plan(config, "cpu").pools
    largest = max(2 * actor.largest[1], actor.largest[1] + rollout.largest[1])
    assert shortage(memory_plan(config, "cpu"), limit_of(largest)) is None
    assert shortage(memory_plan(config, "cpu"), limit_of(largest - 1)) is not None


def test_buckets_of_weights_are_not_larger_than_the_model(tiny_task, tmp_path):
    ranks = ["trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]"]

    def buckets(*more) -> int:
        actor, _ = memory_plan(settings(tiny_task, tmp_path, *ranks, *more), "cpu").pools
        engine = actor.engines["actor"]
        held = PROCESS_BYTES["cpu"] + engine.parameters + engine.optimizer
        return actor.phases["weight sync"] - held - 8 * engine.largest_weight

    weights = only_pool(settings(tiny_task, tmp_path)).engines["actor"].weights
    assert buckets() == 3 * 4 * weights


def test_ranks_that_train_and_generate_hold_buffers_for_weights(tiny_task, tmp_path):
    def buffers(*more) -> int:
        pool = only_pool(settings(tiny_task, tmp_path, "trainer.backend=ray", *more))
        engine, generation = pool.engines["actor"], pool.generation
        held = PROCESS_BYTES["cpu"] + engine.parameters + engine.optimizer + generation.weights
        return pool.phases["weight sync"] - held - 8 * engine.largest_weight

    weights = only_pool(settings(tiny_task, tmp_path)).engines["actor"].weights
    assert buffers("trainer.n_gpus_per_node=1") == 0
    assert buffers("trainer.n_gpus_per_node=2") == 2 * 4 * weights


def test_ranks_with_whole_weights_share_them_with_the_rollout(tiny_task, tmp_path):
    ranks = ["trainer.backend=ray", "trainer.n_gpus_per_node=2"]
    size = "actor_rollout_ref.actor.engine.fsdp_size"
    for shards, copies in ((1, 0), (-1, 1)):
        pool = only_pool(settings(tiny_task, tmp_path, *ranks, f"{size}={shards}"))
        held = sum(e.parameters + e.optimizer for e in pool.engines.values()) + pool.processes
        rollout = pool.generation
        assert pool.phases["generation"] == held + rollout.peak + copies * rollout.weights


def test_advice_is_for_the_pool_that_lacks_memory(tiny_task, tmp_path):
    ranks = ["trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]",
             "data.max_response_length=200"]  # fmt: skip
    config = settings(tiny_task, tmp_path, *ranks)
    plan = memory_plan(config, "cuda")
    rollout_only = replace(plan, pools=plan.pools[1:])
    # The rollout has no actor in its processes with which it could take turns.
    assert not any("take_turns" in text for text in remedies(config, rollout_only))
    together = settings(tiny_task, tmp_path)
    assert any("take_turns" in text for text in remedies(together, memory_plan(together, "cuda")))


def test_a_rank_without_a_full_row_has_one(tiny_task, tmp_path):
    ranks = ["data.train_batch_size=1", "trainer.n_gpus_per_node=8",
             "actor_rollout_ref.actor.ppo_mini_batch_size=1"]  # fmt: skip
    plan = memory_plan(settings(tiny_task, tmp_path, *ranks), "cpu")
    assert plan.missing == () and plan.pools[0].generation.kv_cache > 0


def limit_of(size):
    return DeviceLimit(size, "of this test")


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tiny_task, tmp_path):
    few = "actor_rollout_ref.rollout.micro_batch_size=1"
    small = settings(tiny_task, tmp_path, "trainer.device_memory_gb=0.51", few)
    with pytest.raises(ConfigError) as refused:
        check_train_config(small)
    text = str(refused.value)
    assert "need" in text and "on a node" in text and "trainer.device_memory_gb" in text
    for form in ("true", "selective"):
        assert f"gradient_checkpointing={form} (activations of the actor: " in text
    assert "max_tokens_per_micro_batch=16384" in text
    assert "offload_policy" not in text
    assert not (tmp_path / "run").exists()
    check_memory(settings(tiny_task, tmp_path, "trainer.device_memory_gb=0.55",
                          "trainer.check_memory=false"))  # fmt: skip
    check_memory(settings(tiny_task, tmp_path, "trainer.device_memory_gb=16"))


def test_a_rank_that_needs_more_than_its_device_has_is_refused(tiny_task, tmp_path):
    """The controller needs no device for the check: the settings say what the ranks have."""
    device = ["trainer.device=cuda", "trainer.backend=ray", "trainer.n_gpus_per_node=2"]
    plan = memory_plan(settings(tiny_task, tmp_path, *device), "cuda")
    phase, needed = plan.pools[0].largest
    enough, less = (f"trainer.device_memory_gb={needed / 2**30 + by}" for by in (1e-6, -1e-6))
    check_memory(settings(tiny_task, tmp_path, *device, enough))
    with pytest.raises(ConfigError) as refused:
        check_train_config(settings(tiny_task, tmp_path, *device, less))
    # One KiB more than there is: as many digits as show the difference.
    sizes = re.search(
        rf"a rank of actor, rollout needs (.*) GiB \({phase}\), but its device has (.*) GiB \(",
        str(refused.value),
    )
    assert sizes and float(sizes[1]) == pytest.approx(needed / 2**30, abs=1e-6), refused.value
    assert float(sizes[1]) > float(sizes[2])
    for remedy in ("offload_policy=true", "take_turns=true", "shard over more ranks"):
        assert remedy in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_the_command_shows_the_table(tiny_task, tmp_path, capsys):
    assert main(["plan", *two_steps(tiny_task, tmp_path)]) == 0
    out = capsys.readouterr().out
    for row in (
        "parameters", "gradients", "optimizer states", "activations", "checkpointing=true",
        "checkpointing=selective",
        "of them logits", "KV cache", "update of the actor", "the run fits",
    ):  # fmt: skip
        assert row in out
    few = "actor_rollout_ref.rollout.micro_batch_size=1"
    pool = only_pool(settings(tiny_task, tmp_path, few))
    less = f"trainer.device_memory_gb={pool.largest[1] / 2**30 - 1e-6}"
    assert main(["plan", *two_steps(tiny_task, tmp_path), less, few]) == 0
    assert "lower actor_rollout_ref.actor.engine.max_tokens_per_micro_batch" in (
        capsys.readouterr().out
    )


def test_a_cluster_elsewhere_has_devices_of_its_own(monkeypatch):
    assert planned_device(load_config(TrainConfig, ["trainer.device=cuda"]).trainer) == "cuda"
    monkeypatch.setattr("quadriga.parallel.device.get_device_name", lambda: "cpu")
    auto = load_config(TrainConfig, []).trainer
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert planned_device(auto) == "cpu"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert planned_device(auto) is None
    assert planned_device(load_config(TrainConfig, ["trainer.backend=local"]).trainer) == "cpu"


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_counts(version, tmp_path):
    folder = tmp_path / ("memory/job" if version == 1 else "job")
    folder.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("4:memory:/job\n1:cpu:/x\n" if version == 1 else "0::/job\n")
    limit, use, stat = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    (folder / limit).write_text("3000000\n")
    (folder / use).write_text("2000000\n")
    assert available_memory(tmp_path, own) == 1_000_000
    (folder / "memory.stat").write_text(f"cache 5\n{stat} 500000\n")
    assert available_memory(tmp_path, own) == 1_500_000
    if version == 2:
        (folder / limit).write_text("max\n")
        assert available_memory(tmp_path, own) > 3_000_000


def test_the_table_names_what_is_not_counted(tiny_task, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("the code of this model reads numbers")

    monkeypatch.setattr("quadriga.engines.memory.passes.pass_memory", fail)
    config = settings(tiny_task, tmp_path, "data.max_response_length=14")
    text = plan_text(config)
    plan_module._training_memory.cache_clear()
    assert "not counted: activations of the actor (RuntimeError: the code of this model" in text


def test_the_command_plans_generation(tiny_task, capsys):
    path, small = f"model.path={tiny_task.model}", "rollout.micro_batch_size=16"
    more = ["n=2", "sampling.temperature=1", "trainer.n_gpus_per_node=4", small]
    assert main(["plan", "generate", path, *more]) == 0
    text = capsys.readouterr().out
    assert "responses of a batch   128 = 64 prompts × 2, 32 on each of 4 ranks" in text
    assert "at once on a rank    16 of up to 512 + 512 tokens" in text
    assert "KV cache" in text and "the run fits" in text
    vllm = ["rollout.name=vllm", "rollout.options.tensor_parallel_size=2"]
    assert main(["plan", "generate", path, *more, *vllm]) == 0
    assert "64 on each of 4 ranks" in capsys.readouterr().out  # two ranks compute the same rows
    assert main(["plan", "train", "trainer.n_gpus_per_node=3"]) == 2
    assert "do not divide over 3 ranks" in capsys.readouterr().err
    assert main(["plan", "generate"]) == 2
    assert "model.path is empty" in capsys.readouterr().err
