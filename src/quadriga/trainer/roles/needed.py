"""Which roles a run needs, and which passes of them, by its settings."""

from __future__ import annotations

import dataclasses

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.policy_losses import get_policy_loss
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import ModelConfig, TrainConfig
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.registry import added_roles

CRITIC = "critic"
REWARD_MODEL = Role.RewardModel.key


def needs_critic(config: TrainConfig) -> bool:
    """Return whether the advantage estimator reads values."""
    return get_advantage(config.algorithm.adv_estimator).needs_values


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


def takes_old_log_probs_from_update(config: TrainConfig) -> bool:
    """Return whether the update computes the old log-probabilities itself.

    If a step is one optimizer step, by the weights that generated the responses, they equal the
    log-probabilities of the update without their gradient. A pass of their own is needed if a stage
    reads them before the update, if the actor is not updated in every step, or if adapters drop
    inputs in an update, because responses were sampled without dropout.
    """
    chosen = config.actor_rollout_ref.actor.old_log_probs_from_update
    if chosen is not None:
        return chosen
    one_step = batch_plan(config).actor.optimizer_steps == 1
    drops = config.actor_rollout_ref.model.lora.dropout > 0
    read_earlier = reads_old_log_probs(config) or selects_tokens(config)
    return one_step and not read_earlier and not drops and not config.critic.warmup_steps


def reads_old_log_probs(config: TrainConfig) -> bool:
    """Return whether the reward, the correction or the estimator reads the log-probabilities."""
    estimator = get_advantage(config.algorithm.adv_estimator)
    in_reward = config.algorithm.use_kl_in_reward
    return in_reward or corrects_mismatch(config) or "old_log_prob_BT" in estimator.needs


def corrects_mismatch(config: TrainConfig) -> bool:
    """Return whether importance weights correct the mismatch of rollout and training."""
    return config.algorithm.rollout_correction.level != "none"


def selects_tokens(config: TrainConfig) -> bool:
    """Return whether the policy loss chooses tokens over the whole batch."""
    loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.name)
    return loss.select is not None
