"""Check settings against each other and against the registries, before any process starts.

The checks read no file. Every message does the arithmetic and names the settings to change. Ranges
and choices of single settings are in their types (`config.schema`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.config.commands import (
    EvalConfig,
    GenerateConfig,
    GenerationConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.convert import check_choice, check_values
from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.config.role_ranks import (
    REWARD_MODEL,
    RolePool,
    added_keys,
    data_ranks,
    has_reward_model,
    num_ranks,
    reference_engine,
    role_pools,
    roles_of,
)
from quadriga.config.schema import ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quadriga.engines import ENGINES
from quadriga.errors import ConfigError
from quadriga.rollout import ROLLOUTS
from quadriga.trainer.checks.engines import (
    check_engine_ranks,
    check_head,
    head_of,
    role_engines,
)
from quadriga.trainer.roles.needed import needs_reference, uses_of_run

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
OUTPUTS = (".jsonl", ".parquet")
"""Suffixes of the files that `quadriga generate` writes."""


def check_train_settings(config: TrainConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga train`."""
    check_values(config)
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    check_choice("algorithm.adv_estimator", algorithm.adv_estimator, sorted(ADVANTAGES))
    check_choice(f"{ACTOR}.policy_loss.name", policy.actor.policy_loss.name, sorted(POLICY_LOSSES))
    check_choice(f"{ROLLOUT}.name", policy.rollout.name, sorted(ROLLOUTS))
    with_critic = ADVANTAGES[algorithm.adv_estimator].needs_values
    _check_placement(config, with_critic=with_critic)
    for found in role_engines(config):
        check_choice(f"{found.key}.name", found.engine.name, sorted(ENGINES))
        check_engine_ranks(found.key, found.engine, num_ranks(config, found.role), found.optim)
        check_head(found.key, found.engine, found.head)
        if found.optim is not None:
            check_warmup(found.key.removesuffix("engine") + "optim", found.optim)
    _check_reward_model(config)
    _check_responses(config)
    _check_batches(config)
    _check_old_log_probs(config)
    _check_algorithm(config)
    _check_full_kl(config)
    check_one_part("actor_rollout_ref.model", policy.model)
    check_one_part("critic.model", config.critic.model)
    if (steps := config.trainer.total_training_steps) is not None:
        check_run_length(config, steps, with_critic=with_critic)


def check_fine_tuning_settings(config: SFTConfig | RMConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `sft` or `rm`."""
    check_values(config)
    trainer, rows = config.trainer, config.data.train_batch_size
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    check_choice("engine.name", config.engine.name, sorted(ENGINES))
    check_engine_ranks("engine", config.engine, ranks, config.optim)
    check_head("engine", config.engine, head_of(config))
    parts = ranks // config.engine.model_parallel_size
    if rows % parts:
        raise ConfigError(
            f"data.train_batch_size={rows} rows do not divide over {ranks_in_words(config)}; "
            f"set it to {nearest_multiples(rows, parts)}",
            key="data.train_batch_size",
        )
    _check_local_ranks(config, ["actor"])
    check_one_part("model", config.model)
    if isinstance(config, SFTConfig):
        _check_sft_validation(config)
    check_warmup("optim", config.optim, trainer.total_training_steps)


def check_generate_settings(config: GenerateConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga generate`."""
    _check_generation(config)
    if config.output is not None and Path(config.output).suffix not in OUTPUTS:
        raise ConfigError(
            f"output must end in one of {', '.join(OUTPUTS)}, got {config.output!r}", key="output"
        )


def check_eval_settings(config: EvalConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga eval`."""
    _check_generation(config)
    if bool(config.data_files) == bool(config.response_files):
        raise ConfigError(
            "set either data_files=[…], to generate responses with model.path, or "
            "response_files=[…], to score responses that files hold, and not both",
            key="data_files",
        )
    if not config.response_files and max(config.pass_at, default=0) > config.n:
        raise ConfigError(
            f"pass_at has k={max(config.pass_at)}, but n={config.n} responses to a prompt hold no "
            f"{max(config.pass_at)}; set n to at least {max(config.pass_at)}",
            key="pass_at",
        )
    if config.reward.on_failure == "mask":
        raise ConfigError(
            "reward.on_failure=mask leaves failed samples out of an update, and an evaluation has "
            "none; set it to zero or fail",
            key="reward.on_failure",
        )


def _check_generation(config: GenerationConfig) -> None:
    check_values(config)
    _check_sampling("sampling", config.sampling, config.max_response_length)
    _check_samples_differ("n", config.n, "sampling", config.sampling)
    _check_whole_model("model", config.model)


def _check_placement(config: TrainConfig, *, with_critic: bool) -> None:
    """Check the ranks of the roles; a role that the run does not have must not be placed."""
    unused = {}
    if not needs_reference(config):
        unused["ref"] = f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are false"
    if not with_critic:
        estimator = config.algorithm.adv_estimator
        unused["critic"] = f"algorithm.adv_estimator={estimator} uses no critic"
    if REWARD_MODEL not in added_keys(config) and not config.reward_model.enable:
        unused[REWARD_MODEL] = "reward_model.enable is false"
    for role, reason in unused.items():
        if getattr(config.placement, role) is not None:
            raise ConfigError(
                f"placement.{role} is set, but the run has no such role: {reason}; remove it",
                key=f"placement.{role}",
            )
    collective = {"actor", "ref", "critic", REWARD_MODEL} - {*unused, *added_keys(config)}
    _check_local_ranks(config, [role for role in roles_of(config) if role in collective])
    _check_shared_ranks(
        config, role_pools(config, [role for role in roles_of(config) if role not in unused])
    )


def _check_shared_ranks(config: TrainConfig, pools: Sequence[RolePool]) -> None:
    """Check the settings that need two roles in one process, or one role by itself."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout

    def share(*roles: str) -> bool:
        return any(set(roles) <= set(pool.roles) for pool in pools)

    if policy.actor.reads_full_kl and not share("actor", "ref"):
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full needs the logits of policy and reference in one process; "
            "remove placement.ref, or set kl_loss_type=k3",
            key="placement.ref",
        )
    if rollout.take_turns and not share("actor", "rollout"):
        raise ConfigError(
            f"{ROLLOUT}.take_turns=true is for actor and rollout in one process, but placement "
            "gives them different ranks; remove placement.rollout, or set take_turns=false",
            key=f"{ROLLOUT}.take_turns",
        )
    beside = [role for pool in pools if "rollout" in pool.roles for role in pool.roles[:2]]
    if rollout.replicas.enable and beside != ["rollout"]:
        other = next(role for role in beside if role != "rollout")
        raise ConfigError(
            f"{ROLLOUT}.replicas.enable=true needs ranks on which only the rollout runs, but they "
            f"are also those of {other}; set placement.rollout and placement.{other} to different "
            "ranks, or enable=false",
            key=f"{ROLLOUT}.replicas.enable",
        )
    if rollout.weight_transport == "collective":
        refused = {
            "trainer.backend=local": config.trainer.backend == "local",
            f"{ROLLOUT}.replicas.enable=true": rollout.replicas.enable,
        }
        if reason := next((setting for setting, is_set in refused.items() if is_set), None):
            raise ConfigError(
                f"{ROLLOUT}.weight_transport=collective needs one process group of all ranks, each "
                f"in a process of its own that lives as long as the run, but {reason}; set "
                "weight_transport=auto",
                key=f"{ROLLOUT}.weight_transport",
            )


def _check_local_ranks(config: TrainConfig | SFTConfig | RMConfig, roles: Iterable[str]) -> None:
    """Check that no role of the local backend computes on several ranks, which need collectives."""
    trainer = config.trainer
    for role in roles if trainer.backend == "local" else ():
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


def _check_reward_model(config: TrainConfig) -> None:
    if not has_reward_model(config):
        return
    settings = config.reward_model
    if not settings.model.path:
        raise ConfigError(
            "reward_model.enable=true needs a model: set reward_model.model.path to the folder of "
            "a sequence classifier with one label, such as `quadriga rm` writes it",
            key="reward_model.model.path",
        )
    _check_whole_model("reward_model.model", settings.model)
    if config.algorithm.reward_components and not settings.rule_weight:
        raise ConfigError(
            "algorithm.reward_components are numbers of the rules, and reward_model.rule_weight=0 "
            "does not call them in training; remove one of them",
            key="reward_model.rule_weight",
        )


def _check_responses(config: TrainConfig) -> None:
    """Check sampling, and that a prompt has as many different responses as are compared."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_response_length
    key = f"{ROLLOUT}.val_sampling"
    _check_sampling(f"{ROLLOUT}.sampling", rollout.sampling, longest)
    _check_sampling(key, rollout.val_sampling, longest)
    _check_samples_differ(f"{ROLLOUT}.val_n", rollout.val_n, key, rollout.val_sampling)
    if rollout.sampling.temperature == 0:
        raise ConfigError(
            f"{ROLLOUT}.sampling.temperature=0 is greedy: all n={rollout.n} responses to a prompt "
            "would be equal, and training needs different ones; set it above 0",
            key=f"{ROLLOUT}.sampling.temperature",
        )
    estimator = config.algorithm.adv_estimator
    if rollout.n == 1 and ADVANTAGES[estimator].needs_groups:
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


def _check_sampling(key: str, sampling: SamplingConfig, max_response_length: int) -> None:
    """Check one section of sampling settings. `key`: its name."""
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise ConfigError(
            f"{key}.top_k must be -1 (all tokens) or at least 1, got {sampling.top_k}",
            key=f"{key}.top_k",
        )
    if not all(sampling.stop):
        raise ConfigError(
            f"{key}.stop must be texts that are not empty, got {list(sampling.stop)}",
            key=f"{key}.stop",
        )
    over = sampling.min_new_tokens - max_response_length
    if over > 0:
        raise ConfigError(
            f"{key}.min_new_tokens={sampling.min_new_tokens} is more than the longest response, "
            f"max_response_length={max_response_length}; lower it by {over}, or allow longer "
            "responses",
            key=f"{key}.min_new_tokens",
        )


def _check_samples_differ(n_key: str, n: int, key: str, sampling: SamplingConfig) -> None:
    if sampling.temperature == 0 and n > 1:
        raise ConfigError(
            f"{n_key}={n} greedy responses ({key}.temperature=0) would all be equal; set "
            f"{key}.temperature above 0, or {n_key}=1",
            key=n_key,
        )


def _check_batches(config: TrainConfig) -> None:
    """Check that batches divide over mini-batches and data-parallel ranks."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    roles = uses_of_run(config)
    for role in roles:
        _check_divides(config, role, "data.train_batch_size", prompts * n, f"{prompts} × {n}")
    sizes = zip(("actor", "critic"), (ACTOR, "critic"), mini_batch_prompts(config), strict=True)
    for role, section, mini in sizes:
        key = f"{section}.ppo_mini_batch_size"
        if role not in roles:
            continue
        if prompts % mini:
            raise ConfigError(
                f"{key}={mini} does not divide data.train_batch_size={prompts} "
                f"({prompts} = {prompts // mini} × {mini} + {prompts % mini}); both count prompts "
                f"over all ranks, choose a divisor of {prompts}",
                key=key,
            )
        _check_divides(config, role, key, mini * n, f"{mini} × {n}")


def _check_divides(config: TrainConfig, role: str, key: str, rows: int, product: str) -> None:
    if rows % data_ranks(config, role):
        raise ConfigError(
            f"{key} × rollout.n = {product} = {rows} sequences do not divide over "
            f"{ranks_in_words(config, role)}; the product must be a multiple of the ranks",
            key=key,
        )


def _check_old_log_probs(config: TrainConfig) -> None:
    """Check that the update computes what generated, if it takes the old log-probabilities."""
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    mini, _ = mini_batch_prompts(config)
    steps = prompts // mini * actor.ppo_epochs
    dropout = config.actor_rollout_ref.model.lora.dropout
    reason = ""
    if steps > 1:
        reason = (
            f"{prompts} / {mini} mini-batches × {actor.ppo_epochs} epochs = {steps} optimizer "
            "steps: from the second one on, the weights are not those that generated"
        )
    elif dropout:
        reason = f"actor_rollout_ref.model.lora.dropout={dropout:g} drops inputs in an update"
    if actor.old_log_probs_from_update and reason:
        raise ConfigError(
            f"{ACTOR}.old_log_probs_from_update=true needs one optimizer step per step and no "
            f"dropout, but {reason}; set it to null or false",
            key=f"{ACTOR}.old_log_probs_from_update",
        )


def _check_algorithm(config: TrainConfig) -> None:
    overlong, longest = config.algorithm.overlong, config.data.max_response_length
    if overlong.enable and overlong.buffer_length > longest:
        raise ConfigError(
            f"algorithm.overlong.buffer_length={overlong.buffer_length} is longer than "
            f"data.max_response_length={longest}: the penalty would begin at length "
            f"{longest} - {overlong.buffer_length} = {longest - overlong.buffer_length}; "
            "set buffer_length to at most max_response_length",
            key="algorithm.overlong.buffer_length",
        )
    correction = config.algorithm.rollout_correction
    if correction.lower is not None and correction.lower >= correction.upper:
        raise ConfigError(
            f"algorithm.rollout_correction.lower={correction.lower:g} must be below "
            f"upper={correction.upper:g}, because weights are bounded to [lower, upper]",
            key="algorithm.rollout_correction.lower",
        )


def _check_full_kl(config: TrainConfig) -> None:
    """Check the KL over the vocabulary: one worker computes the same tokens with both models."""
    actor = config.actor_rollout_ref.actor
    key, ref = reference_engine(config)
    pairs = {
        "name": (actor.engine.name, ref.name),
        "model_parallel_size": (actor.engine.model_parallel_size, ref.model_parallel_size),
    }
    for name, (one, other) in pairs.items() if actor.reads_full_kl else ():
        if one != other:
            raise ConfigError(
                f"{ACTOR}.kl_loss_type=full computes the same tokens with policy and reference in "
                f"one worker, which needs equal engines, but {ACTOR}.engine.{name}={one} and "
                f"{key}.{name}={other}; set both equal",
                key=f"{key}.{name}",
            )
    if actor.reads_full_kl and actor.engine.name == "megatron":
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full needs the logits of a token on one rank, and is not built "
            f"for {ACTOR}.engine.name=megatron; set kl_loss_type=k3, or engine.name=fsdp",
            key=f"{ACTOR}.kl_loss_type",
        )


def _check_sft_validation(config: SFTConfig) -> None:
    trainer, data = config.trainer, config.data
    _check_sampling("trainer.val_sampling", trainer.val_sampling, trainer.max_response_length)
    goal = f"trainer.stop_at_accuracy={trainer.stop_at_accuracy}"
    if trainer.stop_at_accuracy is not None and not data.val_files:
        raise ConfigError(
            f"{goal} needs validation prompts; set data.val_files", key="trainer.stop_at_accuracy"
        )
    if trainer.stop_at_accuracy is not None and data.messages_key is not None:
        raise ConfigError(
            f"{goal} needs prompts with answers that can be scored, but data.messages_key="
            f"{data.messages_key} has conversations; remove one of them",
            key="trainer.stop_at_accuracy",
        )


def check_one_part(key: str, model: ModelConfig) -> None:
    """Check that adapters and patterns are not both given. `key`: the section of the model."""
    if model.lora.enabled and model.freeze:
        raise ConfigError(
            f"{key}.lora freezes all weights of the model, so {key}.freeze has no effect; remove "
            "one of them",
            key=f"{key}.freeze",
        )


def _check_whole_model(key: str, model: ModelConfig) -> None:
    """Check that a model which is not trained has neither adapters nor frozen weights."""
    if model.lora.enabled or model.freeze:
        name = "lora" if model.lora.enabled else "freeze"
        raise ConfigError(
            f"{key}.{name} is for a model that is trained, and this one is not; remove it, or "
            f"merge the adapter into a model and give this as {key}.path",
            key=f"{key}.{name}",
        )


def check_run_length(config: TrainConfig, total_steps: int, *, with_critic: bool) -> None:
    """Check the settings that count steps against the training steps of the run.

    Raises:
        ConfigError: the actor is never updated, or a warm-up does not end.
    """
    warmup = config.critic.warmup_steps
    if with_critic and warmup >= total_steps:
        raise ConfigError(
            f"critic.warmup_steps={warmup} leaves no step in which the actor is updated: the run "
            f"has {total_steps} steps; set it to at most {total_steps - 1}, or make the run longer",
            key="critic.warmup_steps",
        )
    actor_steps, critic_steps = batch_plan(config).optimizer_steps(total_steps)
    check_warmup(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, actor_steps)
    if with_critic:
        check_warmup("critic.optim", config.critic.optim, critic_steps)


def check_warmup(key: str, optim: OptimConfig, steps: int | None = None) -> None:
    """Check that the warm-up of the learning rate ends within the optimizer steps of the run.

    `steps`: optimizer steps; None: not known yet.

    Raises:
        ConfigError: it does not.
    """
    source = f"the {steps} optimizer steps of the run"
    if optim.total_steps is not None:
        steps, source = optim.total_steps, f"{key}.total_steps={optim.total_steps}"
    if steps is not None and optim.lr_warmup_steps > steps:
        raise ConfigError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} is more than {source}: the warm-up "
            "would not end; reduce it",
            key=f"{key}.lr_warmup_steps",
        )


def ranks_in_words(config: TrainConfig | SFTConfig | RMConfig, role: str = "actor") -> str:
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
    whole, together = f"{ranks} ranks ({source})", ranks // parts
    if together == 1:
        return whole
    return f"{parts} data-parallel ranks = {whole} / {together} that compute the same rows"


def nearest_multiples(number: int, divisor: int) -> str:
    """Return the multiples of `divisor` next to `number`: 7 and 2 → "6 or 8", 1 and 2 → "2"."""
    below = number // divisor * divisor
    return " or ".join(str(m) for m in (below, below + divisor) if m > 0)
