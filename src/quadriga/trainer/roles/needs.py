"""Which roles a run needs, told from its settings in a moment: nothing here imports torch."""

import dataclasses
from collections.abc import Collection

from quadriga.algorithms.registry import look_up, table_parameters
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import ModelConfig, TrainConfig
from quadriga.trainer.roles.registry import Role, added_roles

CRITIC = "critic"
REWARD_MODEL = Role.RewardModel.key


def estimator_inputs(config: TrainConfig) -> Collection[str]:
    """Return what the advantage estimator reads. Raises `UnknownNameError` if there is none."""
    table = table_parameters("advantages", "ADVANTAGES")
    return look_up(table, config.algorithm.adv_estimator, "advantage estimator")


def needs_critic(config: TrainConfig) -> bool:
    """Return whether the advantage estimator reads values."""
    return "values_BT" in estimator_inputs(config)


def reads_ref_log_prob(config: TrainConfig) -> bool:
    """Return whether a stage reads the reference's log-probabilities of the sampled tokens."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and not actor.reads_full_kl)


def needs_reference(config: TrainConfig) -> bool:
    """Return whether the workers of the policy must hold the reference policy too."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def uses_of_run(config: TrainConfig) -> tuple[str, ...]:
    """Return what the run uses: actor and rollout, reference and critic if they are read, the
    reward model if it is enabled, and the added roles."""
    return (
        "actor",
        "rollout",
        *(["ref"] if needs_reference(config) else []),
        *([CRITIC] if needs_critic(config) else []),
        *([REWARD_MODEL] if has_reward_model(config) else []),
        *(added.key for added in added_roles(config)),
    )


def critic_model(config: TrainConfig) -> ModelConfig:
    """Return the model of the critic: that of the actor, unless it has a path of its own.

    What is trained of it is a setting of the critic in both cases.
    """
    own, policy = config.critic.model, config.actor_rollout_ref.model
    return own if own.path else dataclasses.replace(policy, lora=own.lora, freeze=own.freeze)
