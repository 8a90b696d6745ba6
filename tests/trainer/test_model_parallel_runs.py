"""Runs in which two ranks compute the same rows: the numbers of one rank, the plan, refusals."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest
from run_cases import timeless

from quadriga.config.loading import load_config
from quadriga.config.plan import batch_plan
from quadriga.config.schema import EngineConfig, ModelConfig, TrainConfig
from quadriga.engines.memory.fsdp import fsdp_memory
from quadriga.engines.memory.passes import Rows
from quadriga.errors import ConfigError
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.trainer.memory.plan import memory_plan
from quadriga.trainer.preflight import check_settings, check_train_config

ACTOR, REF = "actor_rollout_ref.actor.engine", "actor_rollout_ref.ref.engine"
ROLES = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "critic.optim.lr=1e-3",
    # Without it, Adam would turn the rounding of a gradient that is about 0 into a step.
    "actor_rollout_ref.actor.optim.eps=1e-3",
    "critic.optim.eps=1e-3",
)
RULE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 3
"""
SIX = ("data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=6")
TWO_RANKS = ("trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2")


@pytest.mark.nightly
def test_roles_divided_in_three_ways_train_as_one_rank(run, tmp_path):
    (tmp_path / "rule.py").write_text(RULE)
    roles = (*ROLES, f"reward.path={tmp_path / 'rule.py'}", "reward.num_processes=0")
    one = run(*roles)
    two = run(
        *roles, *TWO_RANKS,
        f"{ACTOR}.tensor_parallel_size=2",
        f"{REF}.context_parallel_size=2",
        "critic.engine.sequence_parallel_size=2",
        f"trainer.default_local_dir={tmp_path / 'two'}",
    )  # fmt: skip
    compared = ("actor/", "critic/", "reward/", "response_length/")
    steps = 0
    for expected, found in zip(timeless(one), timeless(two), strict=True):
        chosen = {k: v for k, v in expected.items() if k.startswith(compared)}
        steps += len(chosen) > 5  # validations have other metrics
        for name, value in chosen.items():
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert steps == 2 and one[-1]["actor/grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.tensor_parallel_size=3"],
            r"tensor_parallel_size = 3 ranks .* divide the 4 ranks .* \(4 = 1 × 3 \+ 1\)",
        ),
        (
            [
                "trainer.n_gpus_per_node=4", f"{ACTOR}.tensor_parallel_size=2",
                f"{ACTOR}.fsdp_size=4",
            ],
            r"fsdp_size=4 must be .* divide 4 ranks / 2 = 2",
        ),
        (
            [
                "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_parallel_size=2",
                "actor_rollout_ref.actor.optim.name=muon",
            ],
            r"optim.name=muon needs whole rows .*tensor_parallel_size=2",
        ),
        (
            ["trainer.n_gpus_per_node=12", f"{ACTOR}.context_parallel_size=4"],
            r"16 sequences do not divide over 3 data-parallel ranks = 12 ranks \(.*\) / 4",
        ),
        (
            [
                "trainer.n_gpus_per_node=2", f"{ACTOR}.sequence_parallel_size=2",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_type=full",
            ],
            r"model_parallel_size=2 and .*ref.engine.model_parallel_size=1; set both equal",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(train_overrides, settings, words):
    config = load_config(TrainConfig, [*train_overrides, "trainer.backend=ray", *settings])
    with pytest.raises(ConfigError, match=words):
        check_settings(config)


def test_a_model_that_does_not_divide_is_refused_before_the_start(train_overrides):
    more = ["trainer.backend=ray", "trainer.num_cpus=3", "trainer.n_gpus_per_node=3"]
    sizes = [*SIX, "critic.engine.sequence_parallel_size=3", *ROLES]
    config = load_config(TrainConfig, [*train_overrides, *more, *sizes])
    with pytest.raises(ConfigError, match=r"critic\.engine\.sequence_parallel_size=3 does not"):
        check_train_config(config)


def test_the_plan_counts_data_parallel_ranks(train_overrides):
    more = ["trainer.n_gpus_per_node=4", f"{ACTOR}.sequence_parallel_size=2", *TWO_RANKS[:1]]
    plan = batch_plan(load_config(TrainConfig, [*train_overrides, *more]))
    assert plan.sequences_per_rank == plan.sequences // 2
    assert "(4 ranks / 2 that compute the same rows)" in plan.text()


@pytest.mark.parametrize("name", ["sequence", "context", "tensor"])
def test_ranks_that_share_rows_need_less_memory_for_activations(train_overrides, name):
    def actor(ranks: int, size: int):
        more = [f"trainer.n_gpus_per_node={ranks}", f"{ACTOR}.{name}_parallel_size={size}"]
        config = load_config(TrainConfig, [*train_overrides, "trainer.backend=ray", *more])
        return memory_plan(config, "cuda").pools[0].engines["actor"]

    alone, together = actor(2, 1), actor(4, 2)  # the same rows for each data-parallel rank
    assert alone.uncounted == together.uncounted == ""
    assert together.update.activations < 0.75 * alone.update.activations
    assert together.parameters < 0.6 * alone.parameters
    if name == "tensor":
        assert together.gathered < alone.gathered


def test_the_plan_shows_what_a_layer_sends():
    """The formulas of docs/concepts/model_parallel.md, for each way to divide a micro-batch."""
    shape = TinyModel(num_layers=3, num_heads=4, num_kv_heads=2)
    size, tokens, number = shape.hidden_size // 4, 2 * (6 + 10), 4
    expected = {
        "sequence": number * tokens // 2 * (2 * 4 + 2 * 2) * size // 2,
        "context": number * tokens // 2 * 2 * 2 * size,
        "tensor": 4 * number * tokens * shape.hidden_size // 2,
    }
    with TemporaryDirectory() as folder:
        write_tiny_model(folder, ["one two"], shape)
        for name, bytes_of_layer in expected.items():
            memory = fsdp_memory(
                ModelConfig(path=folder),
                EngineConfig(dtype="float32", **{f"{name}_parallel_size": 2}),
                head="lm", ranks=2, device_type="cpu", update=None,
                evaluate=Rows(2, 6, 10, entropy="value"),
            )  # fmt: skip
            outputs = 2 * 10 * 2 * number  # log-probability and entropy of each response token
            found = memory.evaluate.exchanged
            assert 3 * bytes_of_layer < found <= 3 * bytes_of_layer + 2 * outputs, name
