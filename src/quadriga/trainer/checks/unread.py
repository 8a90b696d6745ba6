"""Settings that other settings leave without effect: one line of the log, and no error.

A file of settings may hold them for the runs in which they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from quadriga.config.commands import EvalConfig, GenerationConfig, RMConfig, SFTConfig
from quadriga.config.convert import leaves
from quadriga.config.describe import as_written
from quadriga.config.plan import mini_batch_prompts
from quadriga.config.role_ranks import base_is_in_actor
from quadriga.config.schema import OptimConfig, ReplicasConfig, TrainConfig
from quadriga.trainer.checks.engines import RoleEngine, role_engines
from quadriga.trainer.memory.machine import planned_device
from quadriga.trainer.roles.needed import needs_critic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_log = logging.getLogger(__name__)
_ACTOR = "actor_rollout_ref.actor"
_OFFLOADS = ("param_offload", "optimizer_offload", "offload_policy")
_OF_UPDATES = (
    "distributed_optimizer",
    "optimizer_offload",
    "reduce_each_micro_batch",
    "reduce_dtype",
)
"""Settings of an engine that a frozen model does not read."""


def warn_of_unread(config: TrainConfig | SFTConfig | RMConfig | GenerationConfig) -> None:
    """Log the settings that have no effect in this run, each with the reason."""
    if found := list(unread_settings(config)):
        _log.warning("settings without effect: %s", "; ".join(found))


def unread_settings(config: TrainConfig | SFTConfig | RMConfig | GenerationConfig) -> Iterator[str]:
    """Yield "key=value (reason)" for each setting that is given and has no effect."""
    if isinstance(config, GenerationConfig):
        yield from _of_replicas("rollout.replicas", config.rollout.replicas)
        if isinstance(config, EvalConfig) and config.response_files:
            names = [f.name for f in fields(GenerationConfig)]
            read = ("prompt_key", "image_key", "overwrite", "seed")
            names = [name for name in names if name not in read]
            yield from _changed("", config, names, "response_files holds the responses already")
        return
    if isinstance(config, TrainConfig):
        engines = list(role_engines(config))
        yield from _of_training(config)
        yield from _of_critic(config)
    else:
        engines = [RoleEngine("", "engine", config.engine, config.model, config.optim)]
        if isinstance(config, SFTConfig) and not (
            config.data.val_files and config.data.messages_key is None
        ):
            generated = ("val_sampling", "val_size", "max_response_length")
            reason = "validation generates no responses"
            yield from _changed("trainer", config.trainer, generated, reason)
    on_cpu = planned_device(config.trainer) == "cpu"
    for key, found in {found.key: found for found in engines}.items():
        engine = found.engine
        if found.optim is None:
            yield from _changed(key, engine, _OF_UPDATES, "this model is not trained")
        else:
            yield from _of_optimizer(key.removesuffix("engine") + "optim", found.optim)
        if on_cpu:
            yield from _changed(key, engine, _OFFLOADS, "the ranks compute on the CPU")
        elif engine.offload_policy:
            yield from _changed(key, engine, _OFFLOADS[:2], f"{key}.offload_policy=true")


def _of_training(config: TrainConfig) -> Iterator[str]:
    policy, data, rollout = config.actor_rollout_ref, config.data, config.actor_rollout_ref.rollout
    actor, key = policy.actor, "actor_rollout_ref.rollout"
    for name in ("dataset", "sampler"):
        section = getattr(data, name)
        if section.path is None:
            reason = f"data.{name}.path is null"
            yield from _changed(f"data.{name}", section, ("name", "options"), reason)
    if data.sampler.path is not None:
        yield from _changed("data", data, ("train_weights",), "data.sampler.path chooses the rows")
    if actor.loss_agg_mode != "seq-mean-token-sum-norm":
        reason = f"{_ACTOR}.loss_agg_mode={actor.loss_agg_mode}"
        yield from _changed(_ACTOR, actor, ("loss_scale_length",), reason)
    if mini_batch_prompts(config)[0] >= data.train_batch_size:
        yield from _changed(_ACTOR, actor, ("shuffle",), "a step is one mini-batch")
    if not config.trainer.balance_batch:
        reason = "trainer.balance_batch=false"
        yield from _changed("trainer", config.trainer, ("balance_groups",), reason)
    yield from _of_replicas(f"{key}.replicas", rollout.replicas)
    if planned_device(config.trainer) == "cpu":
        yield from _changed(key, rollout, ("take_turns",), "the ranks compute on the CPU")
    if base_is_in_actor(config) and policy.ref.engine != policy.actor.engine:
        names = [f.name for f in fields(policy.ref.engine)]
        reason = "the reference is the actor with adapters off"
        yield from _changed("actor_rollout_ref.ref.engine", policy.ref.engine, names, reason)


def _of_critic(config: TrainConfig) -> Iterator[str]:
    critic, policy = config.critic, config.actor_rollout_ref.model
    if not needs_critic(config):
        reason = f"algorithm.adv_estimator={config.algorithm.adv_estimator} uses no critic"
        yield from _changed("critic", critic, ("warmup_steps",), reason)
    elif not critic.model.path:
        names = [
            field.name
            for field in fields(critic.model)
            if field.name not in ("lora", "freeze")
            and getattr(critic.model, field.name) != getattr(policy, field.name)
        ]
        reason = "critic.model.path is empty, so the critic has the model of the actor"
        yield from _changed("critic.model", critic.model, names, reason)


def _of_optimizer(key: str, optim: OptimConfig) -> Iterator[str]:
    if optim.lr_scheduler == "constant":
        reason = f"{key}.lr_scheduler=constant"
        yield from _changed(key, optim, ("min_lr_ratio", "total_steps"), reason)
    if optim.name != "muon":
        yield from _changed(key, optim, ("momentum",), f"{key}.name={optim.name}")


def _of_replicas(key: str, replicas: ReplicasConfig) -> Iterator[str]:
    if not replicas.enable:
        names = [field.name for field in fields(replicas)]
        yield from _changed(key, replicas, names, f"{key}.enable=false")


def _changed(
    key: str, section: DataclassInstance, names: Sequence[str], reason: str
) -> Iterator[str]:
    """Yield those of the settings that differ from their defaults."""
    default = dict(leaves(type(section)()))
    prefix = f"{key}." if key else ""
    for name, value in leaves(section):
        if name.partition(".")[0] in names and value != default[name]:
            yield f"{prefix}{name}={as_written(value)} ({reason})"
