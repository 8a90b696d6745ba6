"""Runs in which two ranks compute the same rows: the numbers of one rank, the plan, refusals."""

import pytest
from run_cases import timeless

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.checks.memory import train_plan

ACTOR, REF = "actor_rollout_ref.actor.engine", "actor_rollout_ref.ref.engine"
ROLES = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "critic.optim.lr=1e-3",
    # Without it, Adam would turn the rounding of a gradient that is about 0 into a step.
    "actor_rollout_ref.actor.optim.eps=1e-3",
    "critic.optim.eps=1e-3",
)
TWO_RANKS = ("trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2")


@pytest.mark.nightly
def test_roles_divided_in_three_ways_train_as_one_rank(run, rule, tmp_path):
    roles = (*ROLES, rule)
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


@pytest.mark.parametrize("name", ["sequence", "context", "tensor"])
def test_ranks_that_share_rows_need_less_memory_for_activations(train_overrides, name):
    def actor(ranks: int, size: int):
        more = [f"trainer.n_gpus_per_node={ranks}", f"{ACTOR}.{name}_parallel_size={size}"]
        config = load_config(TrainConfig, [*train_overrides, "trainer.backend=ray", *more])
        return train_plan(config, "cuda").pools[0].engines["actor"]

    alone, together = actor(2, 1), actor(4, 2)  # the same rows for each data-parallel rank
    assert alone.missing == together.missing == ""
    before, after = (memory.adds["backward"] for memory in (alone, together))
    assert after["activations"] < 0.75 * before["activations"]
    assert together.held["parameters"] < 0.6 * alone.held["parameters"]
    if name == "tensor":
        assert after["gathered parameters"] < before["gathered parameters"]
