"""The pools of a program take the place of the section `placement` wherever ranks are counted."""

import pytest
import ray

from quadriga.config.loading import load_config
from quadriga.config.role_ranks import num_ranks, role_pools
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles.registry import ResourcePoolManager, Role
from quadriga.trainer.roles.workers import rank_runtime, settings_of_pools

ONE = {Role.ActorRollout: "a"}
GAE = ("algorithm.adv_estimator=gae", "trainer.backend=ray")


def trainer_of(overrides, spec, mapping, *more):
    config = load_config(TrainConfig, [*overrides, *more])
    return RayPPOTrainer(config, resource_pool_manager=ResourcePoolManager(spec, mapping))


@pytest.mark.parametrize(
    ("spec", "mapping", "more", "message"),
    [
        ({"a": [3]}, ONE, (), r"16 sequences do not divide over 3 ranks \(placement"),
        ({"a": [1], "b": [3]}, {**ONE, Role.Critic: "b"}, (),
         r"16 sequences do not divide over 3 ranks \(placement.critic"),
        ({"a": [2]}, ONE, ("trainer.backend=local",), "runs no collectives, but actor has 2 ranks"),
        ({"a": []}, ONE, (), "pool 'a' has no ranks"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_pools_are_refused(
    train_overrides, spec, mapping, more, message
) -> None:
    mapping = {Role.Critic: "a", **mapping}
    with pytest.raises(ConfigError, match=message):
        trainer_of([*train_overrides, *GAE], spec, mapping, *more)


def test_settings_need_not_fit_ranks_that_the_pools_do_not_have(train_overrides) -> None:
    trainer = trainer_of(
        train_overrides, {"a": [2]}, ONE, "trainer.n_gpus_per_node=3", "trainer.backend=ray"
    )
    assert trainer.config.trainer.n_gpus_per_node == 3
    trainer.close()


def test_the_settings_of_pools_have_their_nodes(train_overrides) -> None:
    """Two nodes; the policy has two ranks on each of them, the critic one."""
    config = load_config(TrainConfig, [*train_overrides, *GAE])
    manager = ResourcePoolManager({"a": [2, 2], "b": [1, 1]}, {**ONE, Role.Critic: "b"})
    placed = settings_of_pools(config, manager)
    assert (placed.trainer.nnodes, placed.trainer.n_gpus_per_node) == (2, 3)
    policy, critic = role_pools(placed, ["actor", "rollout", "critic"])
    assert (policy.ranks, policy.ranks_per_node) == ((0, 1, 3, 4), (2, 2))
    assert (critic.ranks, critic.ranks_per_node) == ((2, 5), (1, 1))


def test_pools_that_differ_between_nodes_have_their_ranks(train_overrides) -> None:
    config = load_config(TrainConfig, [*train_overrides, *GAE])
    manager = ResourcePoolManager({"a": [2, 1], "b": [1]}, {**ONE, Role.Critic: "b"})
    placed = settings_of_pools(config, manager)
    assert [num_ranks(placed, role) for role in ("actor", "rollout", "critic")] == [3, 3, 1]


def test_ranks_have_the_threads_that_their_pools_leave(train_overrides, monkeypatch) -> None:
    from quadriga.trainer import ppo

    seen, before = [], ray.is_initialized()
    monkeypatch.setattr(ppo, "start_groups", lambda config, **others: seen.append(config))
    more = ("trainer.backend=ray", "trainer.num_cpus=8", "trainer.threads_per_worker=null")
    trainer = trainer_of(train_overrides, {"a": [4]}, ONE, *more)
    trainer.init_workers()
    assert rank_runtime(seen[0], 1).threads == 2
    assert rank_runtime(trainer.config, 1).threads == 8  # of the one rank in the settings
    if not before:
        ray.shutdown()  # later files need more CPUs
