"""The section `placement`: which ranks each role uses."""

import pytest

from quadriga.config.loading import load_config
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import RolePool, role_pools, role_ranks
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.checks.settings import check_train_settings

KL = "actor_rollout_ref.actor.use_kl_loss=true"
TURNS = "actor_rollout_ref.rollout.take_turns=true"


def config(*overrides: str, ranks: int = 4, nodes: int = 1) -> TrainConfig:
    return load_config(
        TrainConfig,
        ["algorithm.adv_estimator=gae", "data.train_batch_size=12", "trainer.total_epochs=1",
         f"trainer.n_gpus_per_node={ranks}", f"trainer.nnodes={nodes}", *overrides],
    )  # fmt: skip


def test_without_settings_all_roles_share_all_ranks():
    assert role_pools(config(nodes=2)) == (
        RolePool(("actor", "rollout", "ref", "critic"), tuple(range(8)), (4, 4)),
    )


def test_roles_with_equal_ranks_share_a_pool_and_the_reference_follows_the_actor():
    placed = config("placement.actor=[0-3]", "placement.critic=[4,5]", "placement.rollout=[6-7]",
                    nodes=2)  # fmt: skip
    pools = role_pools(placed)
    assert [(pool.name, pool.ranks, pool.ranks_per_node) for pool in pools] == [
        ("actor_ref", (0, 1, 2, 3), (4,)),
        ("rollout", (6, 7), (2,)),
        ("critic", (4, 5), (2,)),
    ]


def test_a_pool_may_use_parts_of_several_nodes():
    placed = config("placement.actor=[0-2,5]", "placement.critic=[3-4,6-7]", nodes=2)
    assert [pool.ranks_per_node for pool in role_pools(placed)] == [(3, 1), (1, 3)]


@pytest.mark.parametrize("written", ["[0-1]", "[0,1]", "0-1", "['1','0']", "[1,0]"])
def test_ranks_can_be_written_as_numbers_and_ranges(written):
    assert role_ranks(config(f"placement.actor={written}"))["actor"] == (0, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.actor=[0-4]"], "placement.actor names rank 4, but the run has ranks 0 to 3"),
        (["placement.actor=[0,0-3]"], "placement.actor names rank 0 twice"),
        (["placement.actor=[]"], "placement.actor must name at least one rank"),
        (["placement.actor=[3-1]"], "has the entry '3-1', whose end is before its start"),
        (["placement.actor=[first]"], "has the entry 'first'; expected a rank such as 3 or a"),
        (["placement.actor=[-1]"], "has the entry -1; expected a rank"),
        (["placement.critic=[0-1]"], "placement.critic and placement.actor both name rank 0"),
        (["placement.actor=[0-2]"], "no role uses rank 3 of the 4 ranks"),
        (["placement.ref=[2-3]", "placement.actor=[0-1]"], "no role uses rank 2 of the 4 ranks"),
        (
            ["placement.actor=1.5"],
            "placement.actor must be a list of integers or texts or null, got 1.5",
        ),
    ],
)
def test_wrong_ranks_are_named(overrides, message):
    with pytest.raises(ConfigError) as caught:
        check_train_settings(config(*overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "overrides", "message"),
    [
        (4, ["algorithm.adv_estimator=grpo", "placement.actor=[0-1]", "placement.critic=[2-3]",
             "actor_rollout_ref.rollout.n=4"], "no role uses rank 2 .*; roles of this run: actor"),
        (4, [KL, "actor_rollout_ref.actor.kl_loss_type=full", "placement.actor=[0-1]",
             "placement.ref=[2-3]"], "needs the logits of policy and reference in one"),
        (4, [TURNS, "placement.actor=[0-1]", "placement.rollout=[2-3]"],
         "take_turns=true is for actor and rollout in one"),
        (6, ["placement.actor=[0]", "placement.critic=[1-5]"],
         r"do not divide over 5 ranks \(placement.critic\)"),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_fit_the_run_is_refused(ranks, overrides, message):
    check_train_settings(config(TURNS))
    with pytest.raises(ConfigError, match=message):
        check_train_settings(config(*overrides, ranks=ranks))


def test_the_plan_counts_the_ranks_of_each_role():
    plan = batch_plan(config("placement.actor=[0]", "placement.critic=[1-3]"))
    assert (plan.actor.mini_batch_per_rank, plan.critic.mini_batch_per_rank) == (12, 4)
