"""Check the settings that train a part of a model: adapters, and weights frozen by pattern."""

from __future__ import annotations

from quadriga.config.role_ranks import base_is_in_actor
from quadriga.config.schema import EngineConfig, ModelConfig, TrainConfig
from quadriga.errors import ConfigError

POLICY_MODEL = "actor_rollout_ref.model"


def check_trained_parts(config: TrainConfig) -> None:
    """Check adapters and frozen weights of the actor and the critic against other settings.

    Raises:
        ConfigError: two settings are in conflict, or one would have no effect.
    """
    policy = config.actor_rollout_ref
    check_one_part(POLICY_MODEL, policy.model)
    check_one_part("critic.model", config.critic.model)
    if base_is_in_actor(config) and policy.ref.engine not in (EngineConfig(), policy.actor.engine):
        raise ConfigError(
            f"{POLICY_MODEL}.lora makes the reference the actor's own weights with adapters off, "
            "so the settings actor_rollout_ref.ref.engine are not read; remove them, or give the "
            "reference ranks of its own (placement.ref), where it is a model of its own",
            key="actor_rollout_ref.ref.engine",
        )


def check_one_part(key: str, model: ModelConfig) -> None:
    """Check that adapters and patterns are not both given. `key`: the section of the model."""
    if model.lora.enabled and model.freeze:
        raise ConfigError(
            f"{key}.lora freezes all weights of the model, so {key}.freeze has no effect; remove "
            "one of them",
            key=f"{key}.freeze",
        )


def check_whole_model(key: str, model: ModelConfig) -> None:
    """Check that a model which is not trained has neither adapters nor frozen weights.

    Raises:
        ConfigError: it has. `key`: the section of the model.
    """
    if model.lora.enabled or model.freeze:
        name = "lora" if model.lora.enabled else "freeze"
        raise ConfigError(
            f"{key}.{name} is for a model that is trained, and this one is not; remove it, or "
            f"merge the adapter into a model and give this as {key}.path",
            key=f"{key}.{name}",
        )
