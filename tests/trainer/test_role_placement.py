"""Roles on pools of their own compute the numbers of roles that share processes."""

from contextlib import closing

import pytest
from run_cases import metrics_of_run, timeless, two_steps

from quadriga.backends import get_backend
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import WorkerDiedError, WorkerError
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles.registry import ResourcePoolManager, Role
from quadriga.trainer.worker_groups import WeightLink

GAE = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.rollout.weight_bucket_mb=1",
)


ROLLOUT_APART = ("trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]")


@pytest.fixture(scope="module")
def together(tiny_task, tmp_path_factory):
    """The numbers of the run with all roles in one process."""
    return timeless(metrics_of_run([*two_steps(tiny_task, tmp_path_factory.mktemp("all")), *GAE]))


def test_two_pools_of_two_roles_compute_the_same_numbers(run, together) -> None:
    rows = run(*GAE, *ROLLOUT_APART, "placement.critic=[0]", "placement.ref=[1]")
    assert timeless(rows) == together
    assert rows[1]["weight_sync/bytes_store"] == rows[-1]["weight_sync/bytes_store"] > 1e4


@pytest.mark.nightly
def test_all_roles_apart_on_ray_compute_the_same_timeless(run, together) -> None:
    rows = run(*GAE, "trainer.backend=ray", "trainer.num_cpus=4", "trainer.n_gpus_per_node=4",
               "placement.actor=[0]", "placement.rollout=[1]", "placement.ref=[2]",
               "placement.critic=[3]")  # fmt: skip
    assert len(rows) == len(together)
    for row, expected in zip(timeless(rows), together, strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("transport, path", [("auto", "store"), ("collective", "group")])
def test_two_ranks_train_and_one_generates(run, together, transport, path) -> None:
    rows = run(*GAE, f"actor_rollout_ref.rollout.weight_transport={transport}",
               "trainer.backend=ray", "trainer.num_cpus=3",
               "trainer.n_gpus_per_node=3", "placement.actor=[0-1]",
               "placement.rollout=[2]")  # fmt: skip
    # The first step samples with the weights of the folder; two ranks sum in another order.
    assert rows[1]["reward/mean"] == together[1]["reward/mean"]
    assert rows[-1]["actor/loss"] == pytest.approx(together[-1]["actor/loss"], abs=1e-3)
    assert [n for n in rows[-1] if n.startswith("weight_")] == [f"weight_sync/bytes_{path}"]


@pytest.mark.nightly
def test_a_critic_on_another_number_of_ranks_learns_the_same(run, rule) -> None:
    """Its mini-batches of 2 prompts are those of one rank."""
    given = (*GAE, "trainer.total_training_steps=1", rule,
             "critic.ppo_mini_batch_size=2", "critic.optim.lr=1e-2")  # fmt: skip
    expected = run(*given)[-1]
    found = run(*given, "trainer.overwrite=true", "trainer.backend=ray", "trainer.num_cpus=3",
                "trainer.n_gpus_per_node=3", "placement.actor=[0-1]", "placement.critic=[2]",
                )[-1]  # fmt: skip
    assert expected["critic/grad_norm"] > 0.01
    for key in ("critic/grad_norm", "critic/loss", "actor/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4)


def test_a_resumed_run_with_the_rollout_apart_equals_an_undisturbed_one(run, tmp_path) -> None:
    apart = (*ROLLOUT_APART, "trainer.save_freq=1")
    whole = timeless(run(*apart, f"trainer.default_local_dir={tmp_path / 'whole'}"))
    parts = f"trainer.default_local_dir={tmp_path / 'parts'}"
    run(*apart, parts, "trainer.total_training_steps=1")
    resumed = timeless(run(*apart, parts, "trainer.resume_mode=auto"))
    assert resumed[-1] == whole[-1]


def trainer_of(train_overrides, *more: str, **mapping: str) -> RayPPOTrainer:
    config = load_config(TrainConfig, [*train_overrides, *more])
    manager = ResourcePoolManager(
        {name: [1] for name in set(mapping.values())},
        {getattr(Role, role): pool for role, pool in mapping.items()},
        get_backend("local"),
    )
    return RayPPOTrainer(config, resource_pool_manager=manager)


def test_a_reference_on_a_pool_of_its_own_runs_there(train_overrides) -> None:
    trainer = trainer_of(train_overrides, *GAE, ActorRollout="a", RefPolicy="b", Critic="a")
    groups = trainer.init_workers()
    with closing(trainer):
        assert [group.roles for group in groups.groups] == [("actor_rollout", "critic"), ("ref",)]
        assert groups.ref is not groups.actor and groups.rollout is groups.actor


class OtherWeights:
    """A sender that leaves out the first bucket."""

    def __init__(self, sender):
        self.sender = sender

    @property
    def send_weights(self):
        return self

    def stream(self, needs):
        items = iter(self.sender.send_weights.stream(needs))
        next(items)
        yield from items


def test_a_bucket_that_is_lost_stops_the_run(train_overrides) -> None:
    small = "actor_rollout_ref.rollout.weight_bucket_mb=1"
    trainer = trainer_of(train_overrides, small, Actor="a", Rollout="b")
    groups = trainer.init_workers()
    with closing(trainer):
        groups.sync_weights()
        with pytest.raises(WorkerError, match="expected bucket 0 of rank 0"):
            WeightLink(OtherWeights(groups.actor), groups.rollout).sync()


@pytest.mark.nightly
def test_a_rollout_that_dies_ends_the_sync_with_its_name(train_overrides) -> None:
    more = ("trainer.backend=ray", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2",
            "placement.actor=[0]", "placement.rollout=[1]")  # fmt: skip
    trainer = RayPPOTrainer(load_config(TrainConfig, [*train_overrides, *more]))
    groups = trainer.init_workers()
    with closing(trainer):
        groups.sync_weights()
        rollout = groups.rollout._ranks
        rollout.backend.kill(rollout.handles[0])
        with pytest.raises(WorkerDiedError) as caught:
            groups.sync_weights()
        assert caught.value.role == "rollout"
