"""Check that batches divide over mini-batches and data-parallel ranks."""

from __future__ import annotations

from collections.abc import Container

from quadriga.config.commands import SFTConfig
from quadriga.config.plan import mini_batch_prompts
from quadriga.config.role_ranks import data_ranks, num_ranks, roles_of
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"


def check_batches(config: TrainConfig, estimators_with_values: Container[str]) -> None:
    """Check the batches of the roles. The critic is used by some advantage estimators only."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    with_critic = config.algorithm.adv_estimator in estimators_with_values
    for role in roles_of(config):
        if (role != "critic" or with_critic) and prompts * n % data_ranks(config, role):
            raise ConfigError(
                f"data.train_batch_size × rollout.n = {prompts} × {n} = {prompts * n} sequences do "
                f"not divide over {ranks_in_words(config, role)}; the product must be a multiple "
                "of the ranks",
                key="data.train_batch_size",
            )
    actor_mini, critic_mini = mini_batch_prompts(config)
    _check_mini_batch(config, "actor", f"{_ACTOR}.ppo_mini_batch_size", actor_mini)
    _check_old_log_probs(config, actor_mini)
    if with_critic:
        _check_mini_batch(config, "critic", "critic.ppo_mini_batch_size", critic_mini)


def _check_mini_batch(config: TrainConfig, role: str, key: str, mini: int) -> None:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if prompts % mini:
        raise ConfigError(
            f"{key}={mini} does not divide data.train_batch_size={prompts} "
            f"({prompts} = {prompts // mini} × {mini} + {prompts % mini}); both count prompts over "
            f"all ranks, choose a divisor of {prompts}",
            key=key,
        )
    if mini * n % data_ranks(config, role):
        raise ConfigError(
            f"{key} × rollout.n = {mini} × {n} = {mini * n} sequences do not divide over "
            f"{ranks_in_words(config, role)}; the product must be a multiple of the ranks",
            key=key,
        )


def _check_old_log_probs(config: TrainConfig, mini: int) -> None:
    """Check that the update computes what generated, if it takes the old log-probabilities."""
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    steps = prompts // mini * actor.ppo_epochs
    if actor.old_log_probs_from_update and steps > 1:
        raise ConfigError(
            f"{_ACTOR}.old_log_probs_from_update=true needs one optimizer step per step, but "
            f"{prompts} / {mini} mini-batches × {actor.ppo_epochs} epochs = {steps}: from the "
            "second one on, the weights are not those that generated; set it to null or false",
            key=f"{_ACTOR}.old_log_probs_from_update",
        )
    dropout = config.actor_rollout_ref.model.lora.dropout
    if actor.old_log_probs_from_update and dropout:
        raise ConfigError(
            f"{_ACTOR}.old_log_probs_from_update=true needs log-probabilities without dropout, but "
            f"actor_rollout_ref.model.lora.dropout={dropout:g}: adapters drop inputs in an update; "
            "set it to null or false, or the dropout to 0",
            key=f"{_ACTOR}.old_log_probs_from_update",
        )


def ranks_in_words(config: TrainConfig | SFTConfig, role: str = "actor") -> str:
    """Return the number of ranks of a role and its source: "4 ranks (trainer.nnodes=2 × …)"."""
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    source = f"trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if isinstance(config, TrainConfig):
        ranks, parts = num_ranks(config, role), data_ranks(config, role)
        placed = (n for n in (role, "actor") if getattr(config.placement, n) is not None)
        source = next((f"placement.{name}" for name in placed), source)
    else:
        parts = ranks // config.engine.model_parallel_size
    whole = f"{ranks} ranks ({source})"
    together = ranks // parts
    if together == 1:
        return whole
    return f"{parts} data-parallel ranks = {whole} / {together} that compute the same rows"


def nearest_multiples(number: int, divisor: int) -> str:
    """Return the multiples of `divisor` next to `number`: 7 and 2 → "6 or 8", 1 and 2 → "2"."""
    below = number // divisor * divisor
    return " or ".join(str(m) for m in (below, below + divisor) if m > 0)
