"""Calls that mypy must report: each with the code of its error. Checked by test_role_types.py."""

from __future__ import annotations

from quadriga.config.schema import TrainConfig
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer import stages
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.record import StageResult
from quadriga.trainer.stages import BatchReward
from quadriga.workers.roles import CriticGroup, joined, per_rank


def wrong_arguments(trainer: RayPPOTrainer, batch: DataProto) -> None:
    actor = trainer.init_workers().actor
    actor.update_actor("a folder")  # error: arg-type
    actor.update_actor()  # error: call-arg
    actor.update_actor(batch, batch)  # error: call-arg
    actor.compute_log_prob.submit([batch])  # error: arg-type
    actor.update_actor.options(timeout="60")  # error: arg-type
    actor.load_checkpoint("folder", "3")  # error: arg-type
    actor.save_checkpoint(path=3)  # error: call-arg


def misspelt_methods(trainer: RayPPOTrainer, batch: DataProto) -> None:
    groups = trainer.init_workers()
    groups.actor.update_actr(batch)  # error: attr-defined
    groups.actor.compute_values(batch)  # error: attr-defined
    groups.actor.update_actor.summit(batch)  # error: attr-defined
    groups.rollout.generate_sequence(batch)  # error: attr-defined


def results_of_another_type(trainer: RayPPOTrainer, batch: DataProto) -> None:
    actor = trainer.init_workers().actor
    text: str = actor.update_actor(batch)  # error: assignment
    waiting: DataProto = actor.compute_log_prob.submit(batch)  # error: assignment
    version: int = actor.sync_weights()  # error: assignment
    actor.update_actor(batch).get()  # error: attr-defined
    print(actor.compute_log_prob.submit(batch).batch)  # error: attr-defined
    print(text, waiting, version)


def roles_that_may_not_exist(trainer: RayPPOTrainer, batch: DataProto) -> None:
    groups = trainer.init_workers()
    groups.ref.compute_ref_log_prob(batch)  # error: union-attr
    groups.critic.update_critic(batch)  # error: union-attr


def stages_and_rewards(config: TrainConfig, batch: DataProto) -> None:
    shaped: DataProto = stages.shape_scores(batch, config.algorithm)  # error: assignment
    stages.shape_scores(batch, config)  # error: arg-type
    stages.generate(batch, batch, "train")  # error: arg-type
    print(stages.shape_scores(batch, config.algorithm).reward)  # error: attr-defined
    print(shaped)


def own_reward(text: str) -> float:
    return float(len(text))


def own_stage(batch: DataProto) -> StageResult:
    return batch, {}  # error: return-value


def rewards(config: TrainConfig) -> BatchReward:
    RayPPOTrainer(config, reward_fn=own_reward)  # error: arg-type
    return own_reward  # error: return-value


class OwnCritic(Worker):
    """A worker whose methods have other signatures than the role of the critic asks for."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto, scale: float) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None: ...


class OwnCriticMethods:
    world_size = 1
    init_model = per_rank(OwnCritic.init_model)
    compute_values = joined(OwnCritic.compute_values)
    update_critic = joined(OwnCritic.update_critic)
    save_checkpoint = per_rank(OwnCritic.save_checkpoint)
    load_checkpoint = per_rank(OwnCritic.load_checkpoint)


critic: CriticGroup = OwnCriticMethods()  # error: assignment
