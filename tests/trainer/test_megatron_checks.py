"""What a run with Megatron-core says before it starts. Needs neither Megatron-core nor a GPU."""

import re

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import EngineConfig, TrainConfig
from quadriga.engines.megatron import families
from quadriga.errors import ConfigError, InputError
from quadriga.models.limits import LongestSequence
from quadriga.trainer.checks.data import check_token_budget
from quadriga.trainer.checks.memory import train_plan
from quadriga.trainer.checks.settings import stage_problems
from quadriga.trainer.preflight import check_train_config

ACTOR, REF = "actor_rollout_ref.actor.engine", "actor_rollout_ref.ref.engine"
MEGATRON = (f"{ACTOR}.name=megatron",)
TENSOR, STAGES = f"{ACTOR}.tensor_parallel_size", f"{ACTOR}.pipeline_parallel_size"
ROLES = {
    ACTOR: (),
    REF: ("algorithm.use_kl_in_reward=true",),
    "critic.engine": ("algorithm.adv_estimator=gae",),
}


@pytest.fixture
def available(monkeypatch) -> None:
    """Let checks find Megatron-core, and let it compute on CPUs."""
    monkeypatch.setattr(families, "_version", lambda: families.VERSION)
    monkeypatch.setattr(families, "on_cpu_for_tests", True)


@pytest.fixture
def refused(train_overrides, available):
    """refused(ranks, "a=b", …) returns the message of the checks."""

    def _refused(ranks: int, *more: str) -> str:
        given = [*train_overrides, "trainer.backend=ray", f"trainer.n_gpus_per_node={ranks}"]
        with pytest.raises(InputError) as caught:
            check_train_config(load_config(TrainConfig, [*given, *more]))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return _refused


@pytest.mark.parametrize("key", ROLES)
def test_a_role_without_the_package_or_a_device_is_named(train_overrides, monkeypatch, key):
    given = [*train_overrides, f"{key}.name=megatron", *ROLES[key], "trainer.device=cpu"]
    config = load_config(TrainConfig, given)
    monkeypatch.setattr(families, "_version", lambda: None)
    with pytest.raises(ConfigError, match=f"{key}.name=megatron needs megatron-core 0.16.1, and"):
        check_train_config(config)
    monkeypatch.setattr(families, "_version", lambda: families.VERSION)
    with pytest.raises(ConfigError, match=f"{key}.name=megatron needs CUDA devices, and the devi"):
        check_train_config(config)


def test_a_run_with_megatron_passes_the_checks(train_overrides, available):
    more = [*MEGATRON, "trainer.backend=ray", "trainer.n_gpus_per_node=2", f"{STAGES}=2"]
    check_train_config(load_config(TrainConfig, [*train_overrides, *more]))


@pytest.mark.parametrize(
    ("ranks", "more", "said"),
    [
        (4, [f"{TENSOR}=3"], "tensor_parallel_size = 3 ranks compute the same rows, which does"),
        (2, [f"{ACTOR}.pipeline_paralel_size=2"], "did you mean"),
        (2, [f"{ACTOR}.name=megatrn"], "megatrn"),
        (4, [f"{TENSOR}=4"], f"{TENSOR}=4 does not divide the 2 attention heads"),
        (4, [f"{TENSOR}=2", f"{ACTOR}.expert_parallel_size=4"],
         "expert_parallel_size=4 does not divide the ranks with equal parts of a layer: 4 ranks / "
         "(2 that split an expert × 1 pipeline stages) = 2"),
        (2, [f"{ACTOR}.context_parallel_size=2", f"{ACTOR}.attention=flex"],
         f"{ACTOR}.attention=flex needs whole rows, and {ACTOR}.context_parallel_size=2 divides"),
        (2, [f"{TENSOR}=2", f"{ACTOR}.context_parallel_size=2"],
         "tensor_parallel_size × context_parallel_size = 2 × 2 = 4 ranks compute the same rows, "
         "which does not divide the 2 ranks of the role"),
        (2, [f"{ACTOR}.context_parallel_size=2", "actor_rollout_ref.actor.use_kl_loss=true",
             f"{REF}.name=megatron"],
         f"{REF}.context_parallel_size=1 differs from {ACTOR}.context_parallel_size=2, but Mega"),
        (2, ["algorithm.adv_estimator=gae", "critic.engine.name=megatron",
             "critic.model.lora.rank=4"], "critic.model.lora is not built for critic.engine"),
        (2, ["actor_rollout_ref.actor.use_kl_loss=true", f"{REF}.name=megatron",
             "actor_rollout_ref.actor.kl_loss_type=full"],
         f"kl_loss_type=full is not built for {ACTOR}.name=megatron"),
        (2, [f"{TENSOR}=2", "actor_rollout_ref.actor.use_kl_loss=true", f"{REF}.name=megatron"],
         f"{REF}.tensor_parallel_size=1 differs from {TENSOR}=2, but Megatron engines of one "
         "process have the same ranks; set both equal, or give the ref ranks of its own"),
        (2, [f"{STAGES}=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"],
         f"{STAGES}=2 needs at least 2 micro-batches, but a mini-batch makes 1 on each "
         "data-parallel rank (8 rows in micro-batches of 8): each stage would wait for (2 - 1) / "
         "(1 + 2 - 1) = 50% of a step"),
        (2, [f"{STAGES}=2", f"{ACTOR}.use_dynamic_bsz=false"], "a mini-batch makes 1 on each"),
    ],
)  # fmt: skip
def test_what_the_engine_cannot_do_is_one_line(refused, tiny_task, ranks, more, said):
    assert said in refused(ranks, *MEGATRON, *more)


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_fine_tuning_names_the_setting(refused_command, tiny_task, tmp_path, available, command):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n' * 8)
    shared = [
        f"model.path={tiny_task.model}",
        f"data.train_files={[str(pairs)] if command == 'rm' else tiny_task.data('sft')}",
        "data.train_batch_size=4", "trainer.n_gpus_per_node=2", "engine.name=megatron",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    for more, said in (
        (["engine.tensor_parallel_size=2", "engine.fsdp_size=1"], "engine.fsdp_size=1 is read by"),
        (["engine.pipeline_parallel_size=2", "data.micro_batch_size_per_gpu=8"],
         "pipeline_parallel_size=2 needs at least 2 micro-batches"),
    ):  # fmt: skip
        assert said in refused_command(command, *shared, *more)


def test_the_memory_of_a_run_is_planned(train_overrides, available):
    more = ["trainer.backend=ray", "trainer.n_gpus_per_node=4", f"{TENSOR}=2", *MEGATRON]
    plan = train_plan(load_config(TrainConfig, [*train_overrides, *more]), "cpu")
    (pool,) = plan.pools
    actor = pool.engines["actor"]
    held = actor.held
    assert held["parameters"] == held["gradients"]
    # Two data-parallel ranks.
    assert held["optimizer states"] == pytest.approx(held["parameters"], rel=0.1)
    assert actor.peak("backward") > 0 and not plan.missing
    assert "  actor: bias_dropout_fusion off: on a CPU" in pool.table()


def of_four_stages(rows: int, micro_batch: int | None, chunks: int = 1) -> list[str]:
    """Return the problems of a pipeline of four stages."""
    engine = EngineConfig(
        name="megatron", pipeline_parallel_size=4, virtual_pipeline_parallel_size=chunks
    )
    return [problem for _, problem in stage_problems("engine", engine, rows, micro_batch)]


@pytest.mark.parametrize("micro_batch", [1, None])
def test_enough_micro_batches_for_the_stages(micro_batch):
    assert not of_four_stages(4, micro_batch)
    text = of_four_stages(3, micro_batch)[0]
    assert re.search(r"makes 3 .* \(4 - 1\) / \(3 \+ 4 - 1\) = 50%", text)


def test_an_interleaved_schedule_has_whole_rounds_and_a_smaller_bubble():
    assert not of_four_stages(8, 1, chunks=2)
    assert not of_four_stages(6, None, chunks=2)  # cut by tokens: filled up to whole rounds
    text = of_four_stages(3, 1, chunks=2)[0]
    assert re.search(r"makes 3 .* \(4 - 1\) / \(6 \+ 4 - 1\) = 33%", text)
    text = of_four_stages(6, 1, chunks=2)[0]
    assert re.search(r"in rounds of .*=4, .* makes 6 .* 6 % 4 = 2", text)


def test_tensor_ranks_do_not_enlarge_the_token_budget():
    """Every rank computes all tokens of its rows, so the budget is that of one rank."""
    engine = EngineConfig(name="megatron", tensor_parallel_size=2, max_tokens_per_micro_batch=8)
    longest = LongestSequence(9, "3 + 6 is 9 tokens", "lower max_response_length")
    with pytest.raises(ConfigError, match=r"=8 is below the longest.*set it to at least 9, or"):
        check_token_budget("engine", engine, longest)


def test_the_default_of_a_degree_equals_its_value(train_overrides, available):
    more = [*train_overrides, *MEGATRON, "trainer.backend=ray", "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.actor.use_kl_loss=true", f"{REF}.name=megatron",
            f"{TENSOR}=2", f"{REF}.tensor_parallel_size=2",
            f"{ACTOR}.expert_tensor_parallel_size=2"]  # fmt: skip
    check_train_config(load_config(TrainConfig, more))
