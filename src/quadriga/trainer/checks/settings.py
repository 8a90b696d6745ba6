"""Check settings against each other, the registries and the ranks, before any process starts.

The checks read no file. Ranges and choices of single settings are in their types (`config.schema`).

A check yields (key of a setting, what is wrong with its value and how to mend it). `refuse` raises
the first problem, with key and value before the text: "rollout.n=1 is too few, because …".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.algorithms.registry import table_parameters
from quadriga.config import role_ranks, schema
from quadriga.config.commands import (
    EvalConfig,
    GenerateConfig,
    GenerationConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.convert import as_written, check_choice, check_values
from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.engines import ENGINES, check_engine, kind_of
from quadriga.errors import ConfigError
from quadriga.observability.run_folder import STREAM
from quadriga.observability.trackers import check_trackers
from quadriga.rollout import ROLLOUTS, rollout_of
from quadriga.trainer.roles.needs import (
    critic_model,
    estimator_inputs,
    needs_critic,
    needs_reference,
    uses_of_run,
)

if TYPE_CHECKING:
    from quadriga.engines.base import HeadKind

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
STALENESS = "trainer.max_staleness"
OUTPUTS = (".jsonl", ".parquet")
"""Suffixes of the files that `quadriga generate` writes."""

Problems = Iterator[tuple[str, str]]
Config = schema.TrainConfig | SFTConfig | RMConfig | GenerationConfig

_DEGREES = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "expert_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip


def refuse(config: Config, problems: Problems) -> None:
    """Raise `ConfigError` for the first problem with a setting of `config`, if there is one."""
    for key, problem in problems:
        value = reduce(getattr, key.split("."), config)
        text = ":" if is_dataclass(value) else f"={as_written(value)}"
        raise ConfigError(f"{key}{text} {problem}", key=key)


@dataclass(frozen=True)
class RoleEngine:
    """The training engine of a role.

    Attributes:
        key, model_key: of the settings of the engine and of the model.
        optim: None if the model is frozen.
    """

    role: str
    key: str
    engine: schema.EngineConfig
    model: schema.ModelConfig
    optim: schema.OptimConfig | None = None
    model_key: str = "actor_rollout_ref.model"
    head: HeadKind = "lm"

    @property
    def optim_key(self) -> str:
        """The key of the optimizer's settings, which stand beside those of the engine."""
        return self.key.removesuffix("engine") + "optim"


def role_engines(config: schema.TrainConfig) -> Iterator[RoleEngine]:
    """Yield the training engines that the run uses."""
    policy, actor, critic = config.actor_rollout_ref, config.actor_rollout_ref.actor, config.critic
    yield RoleEngine("actor", f"{ACTOR}.engine", actor.engine, policy.model, actor.optim)
    if needs_reference(config):
        yield RoleEngine("ref", *role_ranks.reference_engine(config), policy.model.frozen())
    if needs_critic(config):
        own = critic.model.path or critic.model.lora.enabled or critic.model.freeze
        named = "critic.model" if own else "actor_rollout_ref.model"
        model, optim = critic_model(config), critic.optim
        yield RoleEngine("critic", "critic.engine", critic.engine, model, optim, named, "value")
    if role_ranks.has_reward_model(config):
        key, rm = role_ranks.REWARD_MODEL, config.reward_model
        yield RoleEngine(key, f"{key}.engine", rm.engine, rm.model, None, f"{key}.model", "score")


def fine_tuning_engine(config: SFTConfig | RMConfig) -> RoleEngine:
    """Return the training engine of `quadriga sft` or `quadriga rm`."""
    head: HeadKind = "score" if isinstance(config, RMConfig) else "lm"
    return RoleEngine("actor", "engine", config.engine, config.model, config.optim, "model", head)


def check_role_engines(config: schema.TrainConfig) -> None:
    """Check that the training engines are installed, follow their settings, and agree where they
    share processes.

    Raises:
        ConfigError: names the setting.
    """
    engines = {found.role: found for found in role_engines(config)}
    for found in engines.values():
        _check_engine(found, config.trainer)
    for pool in role_ranks.role_pools(config, uses_of_run(config)):
        shared = [found for role, found in engines.items() if role in pool.roles]
        refuse(config, _unequal_degrees(shared))
    plan, actor, critic = batch_plan(config), config.actor_rollout_ref.actor, config.critic
    micro_batches = actor.ppo_micro_batch_size_per_gpu, critic.ppo_micro_batch_size_per_gpu
    for update, micro_batch in zip((plan.actor, plan.critic), micro_batches, strict=True):
        if update.role in engines:
            found, rows = engines[update.role], update.mini_batch_per_rank
            refuse(config, stage_problems(found.key, found.engine, rows, micro_batch))


def check_fine_tuning_engine(config: SFTConfig | RMConfig) -> None:
    """Check the training engine of `quadriga sft` or `quadriga rm`.

    Raises:
        ConfigError: names the setting.
    """
    data, (_, parts) = config.data, _ranks_of(config)
    _check_engine(fine_tuning_engine(config), config.trainer)
    rows = (2 if isinstance(config, RMConfig) else 1) * data.train_batch_size // parts
    refuse(config, stage_problems("engine", config.engine, rows, data.micro_batch_size_per_gpu))


def _check_engine(found: RoleEngine, trainer: schema.RunConfig) -> None:
    from quadriga.parallel.device import planned_device  # imports torch

    check_engine(
        found.key, found.engine, found.model, device_type=planned_device(trainer),
        model_key=found.model_key,
    )  # fmt: skip


def engine_problems(found: RoleEngine, ranks: int) -> Problems:
    """Yield what does not fit in the settings of an engine whose role has `ranks` ranks."""
    key, engine = found.key, found.engine
    same_rows, tensor = engine.model_parallel_size, engine.tensor_parallel_size
    if ranks % same_rows:
        yield (
            key,
            f"{engine.model_parallel_text()} ranks compute the same rows, which does not divide "
            f"the {ranks} ranks of the role ({_division(ranks, same_rows)})",
        )
    split = 1 if engine.expert_tensor_parallel_size == 1 else tensor
    same = ranks // (split * engine.pipeline_parallel_size)
    if same % engine.expert_parallel_size:
        yield (
            f"{key}.expert_parallel_size",
            f"does not divide the ranks with equal parts of a layer: {ranks} ranks / ({split} that "
            f"split an expert × {engine.pipeline_parallel_size} pipeline stages) = {same}",
        )
    if engine.attention == "flex" and engine.context_parallel_size > 1:
        context = f"{key}.context_parallel_size={engine.context_parallel_size}"
        yield f"{key}.attention", f"needs whole rows, and {context} divides them; set it to auto"
    size, left = engine.fsdp_size, ranks // tensor
    if size != -1 and (size < 1 or left % size):
        of = f"the {ranks} ranks" if tensor == 1 else f"{ranks} ranks / {tensor} = {left}"
        rest = f" ({_division(left, size)})" if size > 0 else ""
        yield f"{key}.fsdp_size", f"must be -1 (all ranks) or divide {of}{rest}"
    if engine.fused_head and found.head != "lm":
        what = "token" if found.head == "value" else "sequence"
        yield (
            f"{key}.fused_head",
            "is for log-probabilities, and this model computes one number "
            f"a {what}; set it to null",
        )


def _division(number: int, divisor: int) -> str:
    """Return the division of two numbers: "7 = 3 × 2 + 1"."""
    return f"{number} = {number // divisor} × {divisor} + {number % divisor}"


def warmup_problems(key: str, optim: schema.OptimConfig, steps: int | None = None) -> Problems:
    """Yield a warm-up of the learning rate that does not end within the optimizer steps of the run.

    `steps`: optimizer steps; None: not known yet.
    """
    if optim.lr_warmup_steps and optim.lr_warmup_ratio:
        yield (
            f"{key}.lr_warmup_ratio",
            f"and {key}.lr_warmup_steps are both set; remove one of them",
        )
    source = f"the {steps} optimizer steps of the run"
    if optim.total_steps is not None:
        steps, source = optim.total_steps, f"{key}.total_steps={optim.total_steps}"
    if steps is not None and optim.lr_warmup_steps > steps:
        yield f"{key}.lr_warmup_steps", f"is more than {source}: the warm-up would not end"


def check_device(trainer: schema.RunConfig) -> None:
    """Check that this process can see the device on which the local backend computes.

    Raises:
        ConfigError: it cannot. On Ray the ranks may be on nodes with other devices.
    """
    from quadriga.parallel.device import get_device_name  # imports torch

    seen = get_device_name()
    if trainer.backend == "local" and trainer.device not in ("auto", "cpu", seen):
        raise ConfigError(
            f"trainer.device={trainer.device} needs such a device in this process, which sees "
            f"{seen}; set trainer.device={seen} or auto",
            key="trainer.device",
        )


def stage_problems(
    key: str, engine: schema.EngineConfig, rows: int, micro_batch: int | None
) -> Problems:
    """Yield a pipeline whose stages do not all have a micro-batch of a mini-batch.

    With m micro-batches, p stages and v chunks of the layers of a stage, a stage waits for (p − 1)
    / (v · m + p − 1) of a step (the bubble of arXiv 2104.04473, §2.2).

    Args:
        rows: of a mini-batch, on each data-parallel rank.
        micro_batch: rows of a micro-batch. None: as the engine cuts them.
    """
    stages, chunks = engine.pipeline_parallel_size, engine.virtual_pipeline_parallel_size
    if stages == 1:
        return
    if micro_batch is not None:
        count, how = math.ceil(rows / micro_batch), f"{rows} rows in micro-batches of {micro_batch}"
    else:  # cut by tokens, the rows make at least `stages` micro-batches if there are enough rows
        count, how = (rows, "rows") if engine.use_dynamic_bsz else (1, "use_dynamic_bsz=false")
    makes = f"but a mini-batch makes {count} on each data-parallel rank ({how})"
    if count < stages:
        idle = (stages - 1) / (chunks * count + stages - 1)
        yield (
            f"{key}.pipeline_parallel_size",
            f"needs at least {stages} micro-batches, {makes}: each stage would wait for "
            f"({stages} - 1) / ({chunks * count} + {stages} - 1) = {idle:.0%} of a step; use "
            "smaller micro-batches, larger mini-batches or fewer stages",
        )
    if chunks > 1 and micro_batch is not None and count % stages:
        yield (
            f"{key}.virtual_pipeline_parallel_size",
            f"needs micro-batches in rounds of {key}.pipeline_parallel_size={stages}, {makes}, and "
            f"{count} % {stages} = {count % stages}; set another size of micro-batches, or 1",
        )


def _unequal_degrees(engines: Sequence[RoleEngine]) -> Problems:
    """Yield degrees in which Megatron engines of one process differ: Megatron-core keeps the groups
    of its ranks in one state of the process."""

    def size(engine: schema.EngineConfig, name: str) -> int:
        value: int | None = getattr(engine, name)
        return engine.tensor_parallel_size if value is None else value

    in_stages = [found for found in engines if kind_of(found.engine).in_stages]
    for other in in_stages[1:]:
        for name in _DEGREES:
            first = size(in_stages[0].engine, name)
            if first != size(other.engine, name):
                yield (
                    f"{other.key}.{name}",
                    f"differs from {in_stages[0].key}.{name}={first}, but Megatron engines of one "
                    "process have the same ranks; set both equal, or give the "
                    f"{other.role} ranks of its own (placement.{other.role})",
                )


# Commands.


def check_against_each_other(config: Config) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of a command. Those of a run
    whose files may add names and roles are not looked at."""
    if isinstance(config, EvalConfig):
        check_eval_settings(config)
    elif isinstance(config, GenerateConfig):
        check_generate_settings(config)
    elif isinstance(config, SFTConfig | RMConfig):
        check_fine_tuning_settings(config)
    elif isinstance(config, schema.TrainConfig) and not config.algorithm.user_files:
        check_train_settings(config)


def check_train_settings(config: schema.TrainConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga train`."""
    check_values(config)
    policy, algorithm = config.actor_rollout_ref, config.algorithm
    check_choice(
        "algorithm.adv_estimator",
        algorithm.adv_estimator,
        sorted(table_parameters("advantages", "ADVANTAGES")),
    )
    losses = table_parameters("policy_losses", "POLICY_LOSSES")
    check_choice(f"{ACTOR}.policy_loss.name", policy.actor.policy_loss.name, sorted(losses))
    check_choice(f"{ROLLOUT}.name", policy.rollout.name, sorted(ROLLOUTS))
    refuse(config, _placement(config))
    for found in role_engines(config):
        check_choice(f"{found.key}.name", found.engine.name, sorted(ENGINES))
        refuse(config, engine_problems(found, role_ranks.num_ranks(config, found.role)))
        if found.optim is not None:
            refuse(config, warmup_problems(found.optim_key, found.optim))
    checks = (_reward_model, _responses, _batches, _old_log_probs, _algorithm, _skipped_rows)
    for check in (*checks, _full_kl, _routes, _replay, _streams, _weights_in_flight, _snapshots):
        refuse(config, check(config))
    most = config.data.max_response_length
    refuse(config, _agent(config, policy.rollout, config.reward, most, "data."))
    refuse(config, _spread(config.reward, config.trainer.backend))
    if (steps := config.trainer.total_training_steps) is not None:
        refuse(config, run_length_problems(config, steps))
    check_trackers(config.trainer.loggers)


def check_fine_tuning_settings(config: SFTConfig | RMConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `sft` or `rm`."""
    check_values(config)
    check_choice("engine.name", config.engine.name, sorted(ENGINES))
    refuse(config, _fine_tuning(config))
    check_trackers(config.trainer.loggers)


def check_generate_settings(config: GenerateConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga generate`."""
    check_values(config)
    refuse(config, _generation(config))
    if config.output is not None and Path(config.output).suffix not in OUTPUTS:
        refuse(config, iter([("output", f"must end in one of {', '.join(OUTPUTS)}")]))


def check_eval_settings(config: EvalConfig) -> None:
    """Raise `ConfigError` for the first invalid or conflicting setting of `quadriga eval`."""
    check_values(config)
    refuse(config, _generation(config))
    refuse(config, _evaluation(config))


def _generation(config: GenerationConfig) -> Problems:
    rollout, backend, ranks = config.rollout, config.trainer.backend, config.trainer.ranks
    enabled = rollout.replicas.enable
    yield from _elastic("rollout.replicas", rollout, enabled, backend, ranks)
    yield from _sampling("sampling", config.sampling, config.max_response_length)
    yield from _equal_samples("n", config.n, "sampling", config.sampling)
    yield from _not_trained("model", config.model)
    reward = config.reward if isinstance(config, EvalConfig) else schema.RewardConfig()
    yield from _agent(config, rollout, reward, config.max_response_length)
    if config.agent.on_error == "mask":
        yield "agent.on_error", "leaves samples out of an update; set it to zero or fail"


def _evaluation(config: EvalConfig) -> Problems:
    if bool(config.data_files) == bool(config.response_files):
        yield (
            "data_files",
            f"and response_files={list(config.response_files)}: set either data_files=[…], to "
            "generate responses with model.path, or response_files=[…], to score those of files",
        )
    if not config.response_files and max(config.pass_at, default=0) > config.n:
        yield "pass_at", f"has more than n={config.n} responses; set n to {max(config.pass_at)}"
    if config.agent.path is not None and config.response_files:
        yield "agent.path", "plays new episodes, and response_files are not played; remove one"
    yield from _spread(config.reward, "local")
    if config.reward.on_failure == "mask":
        yield "reward.on_failure", "leaves samples out of an update; set it to zero or fail"


def _placement(config: schema.TrainConfig) -> Problems:
    """Yield ranks that do not fit: of the local backend, and of roles that must share processes."""
    roles = uses_of_run(config)
    for role in roles:
        if role != "rollout" and role not in role_ranks.added_keys(config):
            yield from _local_ranks(config, role)
    yield from _shared_ranks(config, role_ranks.role_pools(config, roles))


def _shared_ranks(config: schema.TrainConfig, pools: Sequence[role_ranks.RolePool]) -> Problems:
    """Yield settings that need two roles in one process, or one role by itself."""
    policy, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout

    def share(*roles: str) -> bool:
        return any(set(roles) <= set(pool.roles) for pool in pools)

    if policy.actor.reads_full_kl and not share("actor", "ref"):
        yield (
            "placement.ref",
            f"does not fit {ACTOR}.kl_loss_type=full, which needs the logits of policy and "
            "reference in one process; remove it, or set kl_loss_type=k3",
        )
    if rollout.take_turns and not share("actor", "rollout"):
        yield (
            f"{ROLLOUT}.take_turns",
            "is for actor and rollout in one process, but placement gives them different ranks; "
            "remove placement.rollout, or set it to false",
        )
    beside = [role for pool in pools if "rollout" in pool.roles for role in pool.roles[:2]]
    if role_ranks.has_replicas(config) and beside != ["rollout"]:
        other = next(role for role in beside if role != "rollout")
        yield (
            f"{ROLLOUT}.replicas.enable" if rollout.replicas.enable else STALENESS,
            "needs ranks on which only the rollout runs, but they are also those of "
            f"{other}; set placement.rollout and placement.{other} to different ranks",
        )
    else:
        ranks, enabled = role_ranks.num_ranks(config, "rollout"), role_ranks.has_replicas(config)
        key, backend = f"{ROLLOUT}.replicas", config.trainer.backend
        yield from _elastic(key, rollout, enabled, backend, ranks or 0)
    refused = {
        "trainer.backend=local": config.trainer.backend == "local",
        f"{ROLLOUT}.replicas.enable=true": rollout.replicas.enable,
        f"{STALENESS}={config.trainer.max_staleness}": role_ranks.has_replicas(config),
    }
    for setting, is_set in refused.items():
        if rollout.weight_transport == "collective" and is_set:
            yield (
                f"{ROLLOUT}.weight_transport",
                "needs one process group of all ranks, each in a process of its own that lives as "
                f"long as the run, but {setting}; set it to auto",
            )


def _elastic(
    key: str, rollout: schema.RolloutEngineConfig, enabled: bool, backend: str, ranks: int
) -> Problems:
    """Yield the key and the text of what keeps replicas from joining and leaving.

    `ranks`: of the rollout at the start.
    """
    given, count = rollout.replicas, ranks // rollout_of(rollout).ranks_of_copy
    if not given.elastic:
        if given.min_count > 1 or given.max_count is not None:
            yield f"{key}.elastic", "is false, so min_count and max_count have no effect; set it"
    elif not enabled:
        yield f"{key}.elastic", f"is for replicas; set {key}.enable=true"
    elif backend == "local":
        yield f"{key}.elastic", "needs nodes that join and leave; set trainer.backend=ray"
    elif not given.min_count <= count <= (given.max_count or 2 * count):
        most = given.max_count or 2 * count
        yield (
            f"{key}.elastic",
            f"{count} replicas at the start are not in {given.min_count} … {most}",
        )


def _local_ranks(config: schema.TrainConfig | SFTConfig | RMConfig, role: str) -> Problems:
    """Yield a role of the local backend on several ranks, which would need collectives."""
    if config.trainer.backend == "local" and _ranks_of(config, role)[0] > 1:
        yield (
            "trainer.backend",
            f"runs no collectives, but {role} has {_ranks_in_words(config, role)}; set it to ray, "
            "or give the role one rank",
        )


def _reward_model(config: schema.TrainConfig) -> Problems:
    if not role_ranks.has_reward_model(config):
        return
    if config.agent.path is not None:
        yield "reward_model.enable", "scores one turn; set it to false"
    if not config.reward_model.model.path:
        yield (
            "reward_model.model.path",
            "is empty: give the folder of a sequence classifier with one label, such as "
            "`quadriga rm` writes it, or set reward_model.enable=false",
        )
    if config.algorithm.reward_components and not config.reward_model.rule_weight:
        yield (
            "reward_model.rule_weight",
            "calls no rules, whose numbers algorithm.reward_components names; remove one of them",
        )
    yield from _not_trained("reward_model.model", config.reward_model.model)


def _not_trained(key: str, model: schema.ModelConfig) -> Problems:
    """Yield adapters or frozen weights of a model that is not trained."""
    for name, is_set in (("lora", model.lora.enabled), ("freeze", model.freeze)):
        if is_set:
            yield (
                f"{key}.{name}",
                "is for a model that is trained, and this one is not; remove it, or merge the "
                f"adapter into a model and give this as {key}.path",
            )


def _responses(config: schema.TrainConfig) -> Problems:
    """Yield what is wrong in sampling, and where equal or too few responses are compared."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_response_length
    key = f"{ROLLOUT}.val_sampling"
    yield from _sampling(f"{ROLLOUT}.sampling", rollout.sampling, longest)
    yield from _sampling(key, rollout.val_sampling, longest)
    yield from _equal_samples(f"{ROLLOUT}.val_n", rollout.val_n, key, rollout.val_sampling)
    if rollout.sampling.temperature == 0:
        equal = f"is greedy: all n={rollout.n} responses to a prompt would be equal"
        yield f"{ROLLOUT}.sampling.temperature", f"{equal}; set it above 0"
    estimator = config.algorithm.adv_estimator
    if rollout.n == 1 and "groups" in estimator_inputs(config):
        compares = f"algorithm.adv_estimator={estimator} compares the responses to one prompt"
        yield f"{ROLLOUT}.n", f"is too few, because {compares}; set it to 2 or more"
    if rollout.n == 1 and config.algorithm.filter_groups.enable:
        yield (
            f"{ROLLOUT}.n",
            "does not fit algorithm.filter_groups.enable=true: every prompt group has one response "
            "and would be filtered out; set it to 2 or more",
        )


def _sampling(key: str, sampling: schema.SamplingConfig, longest: int) -> Problems:
    """Yield what is wrong in one section of sampling settings, `key`."""
    if sampling.top_k != -1 and sampling.top_k < 1:
        yield f"{key}.top_k", "must be -1 (all tokens) or at least 1"
    if not all(sampling.stop):
        yield f"{key}.stop", "has an empty text; remove it"
    if (over := sampling.min_new_tokens - longest) > 0:
        limit = f"max_response_length={longest}"
        yield f"{key}.min_new_tokens", f"is more than {limit}; lower it by {over}"


def _equal_samples(n_key: str, n: int, key: str, sampling: schema.SamplingConfig) -> Problems:
    if sampling.temperature == 0 and n > 1:
        greedy = f"greedy responses ({key}.temperature=0) would all be equal"
        yield n_key, f"{greedy}; set {key}.temperature above 0, or {n_key}=1"


def _batches(config: schema.TrainConfig) -> Problems:
    """Yield batches that do not divide over mini-batches and data-parallel ranks."""
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    roles, (mini, critic_mini) = uses_of_run(config), mini_batch_prompts(config)
    sizes = [("data.train_batch_size", prompts, role) for role in roles]
    sizes.append((f"{ACTOR}.ppo_mini_batch_size", mini, "actor"))
    if needs_critic(config):
        sizes.append(("critic.ppo_mini_batch_size", critic_mini, "critic"))
    for key, size, role in sizes:
        if prompts % size:
            yield (
                key,
                f"does not divide data.train_batch_size={prompts} ({prompts} = {prompts // size} × "
                f"{size} + {prompts % size}); both count prompts over all ranks",
            )
        if size * n % role_ranks.data_ranks(config, role):
            yield (
                key,
                f"× rollout.n = {size} × {n} = {size * n} sequences do not divide over "
                f"{_ranks_in_words(config, role)}",
            )


def _old_log_probs(config: schema.TrainConfig) -> Problems:
    """Yield an update that takes the old log-probabilities, but does not compute what generated."""
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    mini, _ = mini_batch_prompts(config)
    steps = prompts // mini * actor.ppo_epochs
    dropout = config.actor_rollout_ref.model.lora.dropout
    reason = f"actor_rollout_ref.model.lora.dropout={dropout:g} drops inputs" if dropout else ""
    if steps > 1:
        reason = f"{prompts} / {mini} mini-batches × {actor.ppo_epochs} epochs = {steps} steps"
    if actor.old_log_probs_from_update and reason:
        yield (
            f"{ACTOR}.old_log_probs_from_update",
            f"needs one optimizer step per step and no dropout, but {reason}; set it to null or "
            "false",
        )


def _algorithm(config: schema.TrainConfig) -> Problems:
    algorithm, longest = config.algorithm, config.data.max_response_length
    if "reward_components_BK" in estimator_inputs(config) and not algorithm.reward_components:
        yield (
            "algorithm.reward_components",
            f"is read by algorithm.adv_estimator={algorithm.adv_estimator}: name the numbers that "
            "the dict of the reward function has",
        )
    overlong, correction = algorithm.overlong, algorithm.rollout_correction
    if overlong.enable and overlong.buffer_length > longest:
        limit = f"data.max_response_length={longest}"
        yield "algorithm.overlong.buffer_length", f"is longer than {limit}; lower it"
    if correction.lower is not None and correction.lower >= correction.upper:
        yield "algorithm.rollout_correction.lower", f"must be below upper={correction.upper:g}"
    name = config.actor_rollout_ref.actor.policy_loss.name
    if (correction.level or "none") != "none" and name == "decoupled_ppo":
        problem = f"has the weights that {ACTOR}.policy_loss.name={name} has, too; set it to none"
        yield "algorithm.rollout_correction.level", problem


def _skipped_rows(config: schema.TrainConfig) -> Problems:
    """Yield rows without an advantage that cannot be left out, although the settings insist."""
    actor = config.actor_rollout_ref.actor
    if not actor.skip_zero_advantages:
        return
    from quadriga.workers.updates import reads_zero_advantages  # imports torch

    if reason := reads_zero_advantages(actor):
        yield (
            f"{ACTOR}.skip_zero_advantages",
            "cannot be kept, because rows whose advantages are all 0 have a gradient with "
            f"{ACTOR}.{reason}; set it to null or false",
        )


def _full_kl(config: schema.TrainConfig) -> Problems:
    """Yield engines that cannot compute the KL over the vocabulary: one worker computes the same
    tokens with both models."""
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.kl_loss_type"
    if not actor.reads_full_kl:
        return
    ref_key, ref = role_ranks.reference_engine(config)
    for name in ("name", "model_parallel_size"):
        one, other = getattr(actor.engine, name), getattr(ref, name)
        if one != other:
            yield (
                key,
                "computes policy and reference in one worker, which needs equal engines, but "
                f"{ACTOR}.engine.{name}={one} and {ref_key}.{name}={other}; set both equal",
            )
    if not kind_of(actor.engine).computes_full_kl:
        name = f"{ACTOR}.engine.name={actor.engine.name}"
        yield key, f"is not built for {name}; set it to k3, or name=fsdp"


def _routes(config: schema.TrainConfig) -> Problems:
    """Yield a rollout engine that does not say which experts compute a token."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.replay_routes and not rollout_of(rollout).reports_routes:
        yield (
            f"{ROLLOUT}.replay_routes",
            f"is not built for {ROLLOUT}.name={rollout.name}, which does not say which experts "
            "compute a token; set it to false, or name=hf, vllm or sglang",
        )


def _replay(config: schema.TrainConfig) -> Problems:
    """Yield what the order of another run does not fit."""
    trainer = config.trainer
    if trainer.replay_order is not None:
        if not trainer.max_staleness:
            yield "trainer.replay_order", f"needs the {STALENESS} of that run, which is above 0"
        if config.agent.path is not None:
            yield "trainer.replay_order", "cannot repeat when environments answer; set it to null"
        if trainer.resume_mode != "disable":
            yield "trainer.replay_order", "repeats a whole run; set trainer.resume_mode=disable"
        if not (Path(trainer.replay_order) / STREAM).is_file():
            yield "trainer.replay_order", f"is no run folder with a {STREAM}"


def _streams(config: schema.TrainConfig) -> Problems:
    """Yield what cannot be done with responses of older weights."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if (rollout.oversample or 1) > (most := trainer.max_staleness + 1):
        problem = f"is above {STALENESS} + 1 = {most}, so some prompts would become too old"
        yield f"{ROLLOUT}.oversample", f"{problem}; lower it, or raise max_staleness"
    if trainer.max_staleness and not rollout_of(rollout).continues:
        name = f"{ROLLOUT}.name={rollout.name}"
        yield STALENESS, f"needs an engine that can continue a response, and {name} cannot"
    if not trainer.max_staleness and rollout.update != "pause":
        yield f"{ROLLOUT}.update", f"needs {STALENESS} above 0; set it, or update=pause"
    if not rollout.reset_caches:
        problem = ""
        if not trainer.max_staleness or not role_ranks.has_replicas(config):
            problem = f"needs {STALENESS} above 0 and placement.rollout, ranks of its own"
        elif not rollout_of(rollout).in_flight:
            problem = f"is not built for {ROLLOUT}.name={rollout.name}"
        elif trainer.replay_order is not None:
            problem = "cannot be repeated (trainer.replay_order): tokens depend on what is kept"
        if problem:
            yield f"{ROLLOUT}.reset_caches", f"{problem}; set it to true"


def _agent(
    config: schema.TrainConfig | GenerationConfig,
    rollout: schema.RolloutEngineConfig,
    reward: schema.RewardConfig,
    most: int,
    prefix: str = "",
) -> Problems:
    """Yield what cannot be done with episodes of several turns, or has no effect with them.

    Args:
        most: tokens of an episode, the setting `prefix`max_response_length.
    """
    if (agent := config.agent).path is None:
        if agent != schema.AgentConfig():
            yield "agent.path", "is not set, so other settings agent.* have no effect; set it"
        return
    if not rollout_of(rollout).continues:
        name = f"rollout.name={rollout.name}"
        yield "agent.path", f"needs an engine that can continue a response, and {name} cannot"
    if reward.path is not None or reward.parts:
        yield "reward", "is not called, because the environment scores; remove it, or agent.path"
    if agent.spread and config.trainer.backend != "ray":
        yield "agent.spread", "needs the nodes of trainer.backend=ray; set it to false"
    if (agent.max_turn_tokens or 0) > most:
        yield "agent.max_turn_tokens", f"is above {prefix}max_response_length={most}; lower it"


def _weights_in_flight(config: schema.TrainConfig) -> Problems:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.update"
    if rollout.update != "in_flight":
        return
    if not role_ranks.has_replicas(config):
        yield key, "needs placement.rollout, ranks of its own; set that, or update=pause"
    elif rollout.replicas.elastic:
        yield key, "keeps replicas.elastic from adding replicas; set it to pause"
    elif not rollout_of(rollout).in_flight:
        yield key, f"is not built for {ROLLOUT}.name={rollout.name}; set it to pause"


def _fine_tuning(config: SFTConfig | RMConfig) -> Problems:
    rows, (ranks, parts) = config.data.train_batch_size, _ranks_of(config)
    yield from engine_problems(fine_tuning_engine(config), ranks)
    if rows % parts:
        below = rows // parts * parts  # 7 rows on 2 ranks: 6 or 8
        near = " or ".join(str(multiple) for multiple in (below, below + parts) if multiple)
        words = _ranks_in_words(config)
        yield "data.train_batch_size", f"rows do not divide over {words}; set it to {near}"
    yield from _local_ranks(config, "actor")
    if isinstance(config, SFTConfig):
        yield from _spread(config.reward, config.trainer.backend)
        sampling, longest = config.trainer.val_sampling, config.trainer.max_response_length
        yield from _sampling("trainer.val_sampling", sampling, longest)
    yield from warmup_problems("optim", config.optim, config.trainer.total_training_steps)


def _spread(reward: schema.RewardConfig, backend: str) -> Problems:
    """Yield that processes of reward functions have no Ray nodes to be spread over."""
    if reward.spread and (backend != "ray" or not reward.num_processes):
        needs = "a training with trainer.backend=ray and reward.num_processes above 0"
        yield "reward.spread", f"needs {needs}; set it to false"


def _snapshots(config: schema.TrainConfig) -> Problems:
    if config.trainer.snapshot_freq and config.trainer.max_staleness:
        yield "trainer.snapshot_freq", f"keeps no prompts on their way; set it or {STALENESS} to 0"


def run_length_problems(config: schema.TrainConfig, total_steps: int) -> Problems:
    """Yield settings that do not fit the training steps of the run: the actor is never updated, or
    a warm-up does not end."""
    warmup, with_critic = config.critic.warmup_steps, needs_critic(config)
    if with_critic and warmup >= total_steps:
        yield (
            "critic.warmup_steps",
            f"leaves no step in which the actor is updated: the run has {total_steps} steps; set "
            f"it to at most {total_steps - 1}, or make the run longer",
        )
    actor_steps, critic_steps = batch_plan(config).optimizer_steps(total_steps)
    yield from warmup_problems(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, actor_steps)
    if with_critic:
        yield from warmup_problems("critic.optim", config.critic.optim, critic_steps)


def _ranks_of(
    config: schema.TrainConfig | SFTConfig | RMConfig, role: str = "actor"
) -> tuple[int, int]:
    """Return the number of ranks of a role, and that of its data-parallel ranks."""
    if isinstance(config, schema.TrainConfig):
        return role_ranks.num_ranks(config, role), role_ranks.data_ranks(config, role)
    ranks = config.trainer.ranks
    return ranks, ranks // config.engine.model_parallel_size


def _ranks_in_words(config: schema.TrainConfig | SFTConfig | RMConfig, role: str = "actor") -> str:
    """Return the number of ranks of a role and its source: "4 ranks (trainer.nnodes=2 × …)"."""
    trainer, (ranks, parts) = config.trainer, _ranks_of(config, role)
    source = f"trainer.nnodes={trainer.nnodes} × trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if isinstance(config, schema.TrainConfig):
        placed = (n for n in (role, "actor") if getattr(config.placement, n) is not None)
        source = next((f"placement.{name}" for name in placed), source)
    whole, same = f"{ranks} ranks ({source})", ranks // parts
    if same == 1:
        return whole
    return f"{parts} data-parallel ranks = {whole} / {same} that compute the same rows"
