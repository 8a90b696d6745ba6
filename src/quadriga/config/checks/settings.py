"""Check settings against each other and against the registries, before any process starts.

The checks read no file. Every message does the arithmetic and names the settings to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from quadriga.config.checks.batches import check_batches, nearest_multiples, ranks_in_words
from quadriga.config.checks.engine import check_engine_ranks
from quadriga.config.checks.generation import check_eval_settings as check_eval_settings
from quadriga.config.checks.generation import check_generate_settings as check_generate_settings
from quadriga.config.checks.generation import (
    check_samples_differ,
    check_sampling,
    check_sft_validation,
)
from quadriga.config.checks.replicas import check_replicas
from quadriga.config.checks.reward import check_reward_model_settings
from quadriga.config.checks.trained_part import check_one_part, check_trained_parts
from quadriga.config.checks.unread import (
    check_run_length,
    check_unread_conversations,
    check_unread_data,
    check_unread_optim,
    check_unread_update,
    check_warmup_of_run,
)
from quadriga.config.commands import ArithmeticDataConfig, SFTConfig
from quadriga.config.convert import check_choice, check_values
from quadriga.config.describe import as_written
from quadriga.config.role_ranks import (
    REWARD_MODEL,
    added_keys,
    num_ranks,
    reference_engine,
    role_pools,
    roles_of,
)
from quadriga.config.schema import CriticConfig, ModelConfig, TrainConfig
from quadriga.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
COLLECTIVE_ROLES = ("actor", "ref", "critic", REWARD_MODEL)
"""The built-in roles whose ranks compute together."""


@dataclass(frozen=True)
class KnownNames:
    """The names in the registries of higher layers. A name with an empty set is not checked.

    The caller passes them in, because this layer must not import the registries.
    """

    estimators: frozenset[str] = frozenset()
    estimators_with_values: frozenset[str] = frozenset()
    estimators_with_groups: frozenset[str] = frozenset()
    policy_losses: frozenset[str] = frozenset()
    rollouts: frozenset[str] = frozenset()
    engines: frozenset[str] = frozenset()


def check_train_settings(config: TrainConfig, known: KnownNames | None = None) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga train`."""
    known = known or KnownNames()
    check_values(config)
    for key, value, allowed in _named(config, known):
        if allowed:
            check_choice(key, value, sorted(allowed))
    _check_placement(config, known)
    policy, critic = config.actor_rollout_ref, config.critic
    for key, role, engine, optim in (
        (ACTOR, "actor", policy.actor.engine, policy.actor.optim),
        ("actor_rollout_ref.ref", "ref", policy.ref.engine, None),
        ("critic", "critic", critic.engine, critic.optim),
    ):
        check_engine_ranks(f"{key}.engine", engine, num_ranks(config, role), optim)
    check_reward_model_settings(config, num_ranks(config, REWARD_MODEL))
    _check_sampling(config, known)
    check_batches(config, known.estimators_with_values)
    _check_balance(config)
    check_trained_parts(config)
    _check_algorithm(config, known)
    if config.algorithm.adv_estimator in known.estimators_with_values:
        _check_critic(config.critic, config.actor_rollout_ref.model)
    check_unread_optim(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim)
    check_unread_optim("critic.optim", config.critic.optim)
    check_unread_data(config.data)
    check_unread_update(config)
    if (steps := config.trainer.total_training_steps) is not None:
        with_critic = config.algorithm.adv_estimator in known.estimators_with_values
        check_run_length(config, steps, with_critic=with_critic)


def check_sft_settings(config: SFTConfig, known: KnownNames | None = None) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga sft`."""
    check_values(config)
    trainer, rows = config.trainer, config.data.train_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    check_engine_ranks("engine", config.engine, ranks, config.optim)
    parts = ranks // config.engine.model_parallel_size
    if rows % parts:
        raise ConfigError(
            f"data.train_batch_size={rows} rows do not divide over {ranks_in_words(config)}; "
            f"set it to {nearest_multiples(rows, parts)}",
            key="data.train_batch_size",
        )
    _check_local_ranks(config, ["actor"])
    check_one_part("model", config.model)
    if known and known.engines:
        check_choice("engine.name", config.engine.name, sorted(known.engines))
    check_unread_conversations(config)
    check_sft_validation(config)
    check_unread_optim("optim", config.optim)
    if trainer.total_training_steps is not None:
        check_warmup_of_run("optim", config.optim, trainer.total_training_steps)


def check_data_settings(config: ArithmeticDataConfig) -> None:
    """Raise `ConfigError` for the first setting of `quadriga data make` that is out of range.

    `data.arithmetic` checks whether the task has as many different problems as requested.
    """
    check_values(config)


def _named(config: TrainConfig, known: KnownNames) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield (key, value, names in the registry) for each setting that names a registry entry."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    yield "algorithm.adv_estimator", algorithm.adv_estimator, known.estimators
    yield f"{ACTOR}.policy_loss.name", actor.policy_loss.name, known.policy_losses
    yield f"{ROLLOUT}.name", config.actor_rollout_ref.rollout.name, known.rollouts
    yield f"{ACTOR}.engine.name", actor.engine.name, known.engines
    ref_engine = config.actor_rollout_ref.ref.engine.name
    yield "actor_rollout_ref.ref.engine.name", ref_engine, known.engines
    yield "critic.engine.name", config.critic.engine.name, known.engines


def _check_placement(config: TrainConfig, known: KnownNames) -> None:
    """Check the ranks of the roles; a role that the run does not have must not be placed."""
    estimator, actor = config.algorithm.adv_estimator, config.actor_rollout_ref.actor
    unused = {}
    if not (config.algorithm.use_kl_in_reward or actor.use_kl_loss):
        unused["ref"] = f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are false"
    if known.estimators and estimator not in known.estimators_with_values:
        unused["critic"] = f"algorithm.adv_estimator={estimator} uses no critic"
    if REWARD_MODEL not in added_keys(config) and not config.reward_model.enable:
        unused[REWARD_MODEL] = "reward_model.enable is false"
    for role, reason in unused.items():
        if getattr(config.placement, role) is not None:
            raise ConfigError(
                f"placement.{role} is set, but the run has no such role: {reason}; remove "
                f"placement.{role}",
                key=f"placement.{role}",
            )
    built_in = [role for role in COLLECTIVE_ROLES if role not in added_keys(config)]
    _check_local_ranks(config, [role for role in built_in if role not in unused])
    pools = role_pools(config, [role for role in roles_of(config) if role not in unused])
    if actor.reads_full_kl and not any({"actor", "ref"} <= set(pool.roles) for pool in pools):
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full needs the logits of policy and reference in one process; "
            "remove placement.ref, or set kl_loss_type=k3",
            key="placement.ref",
        )
    together = any({"actor", "rollout"} <= set(pool.roles) for pool in pools)
    if config.actor_rollout_ref.rollout.take_turns and not together:
        raise ConfigError(
            f"{ROLLOUT}.take_turns=true is for actor and rollout in one process, but placement "
            "gives them different ranks; remove placement.rollout, or set take_turns=false",
            key=f"{ROLLOUT}.take_turns",
        )
    check_replicas(config.actor_rollout_ref.rollout, pools)
    transport = config.actor_rollout_ref.rollout.weight_transport
    if transport == "collective" and config.trainer.backend == "local":
        raise ConfigError(
            f"{ROLLOUT}.weight_transport=collective needs ranks in processes of their own, but "
            "those of trainer.backend=local are in one process; set weight_transport=auto, or "
            "trainer.backend=ray",
            key=f"{ROLLOUT}.weight_transport",
        )


def _check_local_ranks(config: TrainConfig | SFTConfig, roles: Iterable[str]) -> None:
    """Check that no role of the local backend computes together on several ranks.

    Its ranks are objects of one process, which cannot join a process group with itself.
    """
    trainer = config.trainer
    if trainer.backend != "local":
        return
    for role in roles:
        ranks = trainer.nnodes * trainer.n_gpus_per_node
        if isinstance(config, TrainConfig):
            ranks = num_ranks(config, role)
        if ranks > 1:
            raise ConfigError(
                f"{role} has {ranks_in_words(config, role)}, but the ranks of "
                "trainer.backend=local are in one process and run no collectives; set "
                "trainer.backend=ray, or give the role one rank",
                key="trainer.backend",
            )


def _check_sampling(config: TrainConfig, known: KnownNames) -> None:
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_response_length
    check_sampling(f"{ROLLOUT}.sampling", rollout.sampling, longest)
    check_sampling(f"{ROLLOUT}.val_sampling", rollout.val_sampling, longest)
    check_samples_differ(
        f"{ROLLOUT}.val_n", rollout.val_n, f"{ROLLOUT}.val_sampling", rollout.val_sampling
    )
    if rollout.sampling.temperature == 0:
        raise ConfigError(
            f"{ROLLOUT}.sampling.temperature=0 is greedy: all n={rollout.n} responses to a prompt "
            "would be equal, and training needs different ones; set it above 0",
            key=f"{ROLLOUT}.sampling.temperature",
        )
    estimator = config.algorithm.adv_estimator
    if rollout.n == 1 and estimator in known.estimators_with_groups:
        raise ConfigError(
            f"algorithm.adv_estimator={estimator} compares the responses to one prompt, but "
            f"{ROLLOUT}.n=1 generates only one; set n to 2 or more",
            key=f"{ROLLOUT}.n",
        )
    if rollout.n == 1 and config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"algorithm.filter_groups.enable: with {ROLLOUT}.n=1 every prompt group has one "
            "response and would be filtered out; set n to 2 or more",
            key="algorithm.filter_groups.enable",
        )


def _check_balance(config: TrainConfig) -> None:
    trainer = config.trainer
    if not trainer.balance_batch and not trainer.balance_groups:
        raise ConfigError(
            "trainer.balance_groups=false balances single sequences, but "
            "trainer.balance_batch=false balances nothing; remove one of the two settings",
            key="trainer.balance_groups",
        )


def _check_algorithm(config: TrainConfig, known: KnownNames) -> None:
    algorithm = config.algorithm
    overlong, longest = algorithm.overlong, config.data.max_response_length
    if overlong.enable and overlong.buffer_length > longest:
        raise ConfigError(
            f"algorithm.overlong.buffer_length={overlong.buffer_length} is longer than "
            f"data.max_response_length={longest}: the penalty would begin at length "
            f"{longest} - {overlong.buffer_length} = {longest - overlong.buffer_length}; "
            "set buffer_length to at most max_response_length",
            key="algorithm.overlong.buffer_length",
        )
    correction = algorithm.rollout_correction
    if correction.lower is not None and correction.lower >= correction.upper:
        raise ConfigError(
            f"algorithm.rollout_correction.lower={correction.lower:g} must be below "
            f"upper={correction.upper:g}, because weights are bounded to [lower, upper]",
            key="algorithm.rollout_correction.lower",
        )
    _check_full_kl(config)
    without_critic = known.estimators - known.estimators_with_values
    if config.critic.warmup_steps and algorithm.adv_estimator in without_critic:
        raise ConfigError(
            f"critic.warmup_steps={config.critic.warmup_steps}, but "
            f"algorithm.adv_estimator={algorithm.adv_estimator} uses no critic; set "
            "critic.warmup_steps=0",
            key="critic.warmup_steps",
        )


def _check_full_kl(config: TrainConfig) -> None:
    """Check the KL over the vocabulary, which needs the logits of both models in one process."""
    policy = config.actor_rollout_ref
    together = policy.actor.engine, reference_engine(config)[1]
    engines = together[0].name, together[1].name
    sizes = [engine.model_parallel_size for engine in together]
    if policy.actor.reads_full_kl and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full computes the same tokens with policy and reference, but "
            f"{ACTOR}.engine.{together[0].model_parallel_text()} and "
            f"actor_rollout_ref.ref.engine.{together[1].model_parallel_text()}; set both equal",
            key="actor_rollout_ref.ref.engine",
        )
    if policy.actor.reads_full_kl and engines[0] != engines[1]:
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full computes policy and reference in one worker, which needs "
            f"engines of one kind, but {ACTOR}.engine.name={engines[0]} and "
            f"actor_rollout_ref.ref.engine.name={engines[1]}; set both to the same engine",
            key="actor_rollout_ref.ref.engine.name",
        )


def _check_critic(critic: CriticConfig, policy: ModelConfig) -> None:
    """Check that no setting of the critic is ignored. `policy`: the model of the actor."""
    model, plain = critic.model, ModelConfig()
    for name, value in vars(model).items():
        if name in ("lora", "freeze"):  # what is trained is always a setting of the critic
            continue
        # Without a path, the critic has the model of the actor and all settings of that model.
        if not model.path and value not in (getattr(plain, name), getattr(policy, name)):
            raise ConfigError(
                f"critic.model.{name}={as_written(value)} is not read, because critic.model.path "
                "is empty: the critic is then built from the model of the actor, with "
                f"actor_rollout_ref.model.{name}={as_written(getattr(policy, name))}; set "
                "critic.model.path, or change the setting of the actor",
                key=f"critic.model.{name}",
            )
    if critic.engine.fused_head:
        raise ConfigError(
            "critic.engine.fused_head=true is for log-probabilities, and a critic computes values; "
            "set it to null",
            key="critic.engine.fused_head",
        )
