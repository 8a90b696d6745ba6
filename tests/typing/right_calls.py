"""Calls that mypy must accept. This file is checked by test_role_types.py and never runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

from quadriga.config.schema import TrainConfig
from quadriga.parallel.balancing import Balance
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rewards import RewardManager
from quadriga.single_controller import WorkerGroup
from quadriga.trainer import stages
from quadriga.trainer.fine_tuning import SFTTrainer
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.record import RunRecord, StageResult
from quadriga.trainer.stages import BatchReward, Sampler
from quadriga.workers.roles import ActorGroup, GroupMethod, SFTGroup


def own_reward(data: DataProto) -> DataProto:
    return data


def train(config: TrainConfig, batch: DataProto) -> None:
    trainer = RayPPOTrainer(config, reward_fn=own_reward)
    groups = trainer.init_workers()
    actor = groups.actor

    assert_type(actor, ActorGroup)
    assert_type(actor.world_size, int)
    assert_type(actor.update_actor, GroupMethod[[DataProto], DataProto])
    assert_type(actor.update_actor(batch), DataProto)
    assert_type(actor.compute_log_prob.submit(batch), DataProtoFuture)
    assert_type(actor.sync_weights(), list[int])
    actor.update_actor.options(timeout=60)(batch)
    actor.load_checkpoint("folder", 3)
    groups.rollout.generate_sequences(batch)
    if groups.ref:
        assert_type(groups.ref.compute_ref_log_prob(batch), DataProto)
    if groups.critic:
        assert_type(groups.critic.compute_values.submit(batch), DataProtoFuture)
    assert_type(trainer.fit(), dict[str, float])


def run_stages(
    config: TrainConfig, batch: DataProto, record: RunRecord, prompts: Iterator[DataProto]
) -> None:
    result = stages.shape_scores(batch, config.algorithm)
    assert_type(result, StageResult)
    assert_type(record.log_stage(result), DataProto)
    batch, metrics = stages.balance_over_ranks(batch, Balance(ranks=4))
    assert_type(metrics, dict[str, float])
    groups = RayPPOTrainer(config).init_workers()
    sampler = Sampler(config, groups.rollout, own_reward, prompts)
    assert_type(sampler.draw(step=1).batch, DataProto)


def fine_tune(trainer: SFTTrainer, rows: DataProto) -> None:
    policy = trainer.init_workers().policy
    assert_type(policy, SFTGroup)
    record = policy.update_sft(rows)
    assert_type(record, DataProto)


def a_group_can_have_any_role(group: WorkerGroup) -> ActorGroup:
    """The methods of a group exist only at run time; the annotation says which role it has."""
    return group


def a_reward_manager_is_a_reward(manager: RewardManager) -> BatchReward:
    return manager
