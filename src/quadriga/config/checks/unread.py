"""Settings of data and training engines that another setting leaves without effect are refused.

The parameters of a feature that is off, such as `kl_loss_coef` without `use_kl_loss`, are no error:
a file may hold them for the runs in which the feature is on.
"""

from __future__ import annotations

from quadriga.config.commands import SFTConfig
from quadriga.config.describe import as_written
from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.config.schema import ActorConfig, DataConfig, EngineConfig, OptimConfig, TrainConfig
from quadriga.errors import ConfigError

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref.engine"
_NORMALISED = "seq-mean-token-sum-norm"
_OFFLOADS = ("param_offload", "optimizer_offload")
_OF_FSDP = ("sequence_parallel_size",)
"""Settings of an engine that `name=fsdp` reads only."""
_OF_MEGATRON = (
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "distributed_optimizer",
)
"""Settings of an engine that `name=megatron` reads only."""
_OF_UPDATES = {
    "distributed_optimizer": "it has no optimizer",
    "optimizer_offload": "it has no optimizer",
    "reduce_each_micro_batch": "it has no gradients",
    "reduce_dtype": "it has no gradients",
}
"""Setting of an engine that a frozen model does not read -> the reason."""


def check_unread_data(data: DataConfig) -> None:
    """Check that no setting of the user's classes for data is without effect.

    Raises:
        ConfigError: names the setting.
    """
    default = DataConfig()
    for section in ("dataset", "sampler"):
        chosen = getattr(data, section)
        for name, value in vars(chosen).items():
            if chosen.path is None and value != getattr(getattr(default, section), name):
                key = f"data.{section}.{name}"
                raise ConfigError(
                    f"{key}={as_written(value)} has no effect without data.{section}.path; set the "
                    "path of the Python file",
                    key=key,
                )
    if data.sampler.path is not None and data.train_weights is not None:
        raise ConfigError(
            "data.train_weights has no effect with data.sampler.path, because the sampler chooses "
            "all rows; remove one of them",
            key="data.train_weights",
        )


def check_unread_conversations(config: SFTConfig) -> None:
    """Check that no setting of fine-tuning is without effect on conversations of several turns.

    Raises:
        ConfigError: names the setting.
    """
    data, goal = config.data, config.trainer.stop_at_accuracy
    if data.messages_key is None:
        return
    if data.val_files and not data.val_loss:
        raise ConfigError(
            f"data.val_files has no effect with data.messages_key={data.messages_key} and "
            "data.val_loss=false: conversations are validated by their loss; remove one of them",
            key="data.val_files",
        )
    if goal is not None:
        raise ConfigError(
            f"trainer.stop_at_accuracy={goal} needs prompts with answers that can be scored, but "
            f"data.messages_key={data.messages_key} has conversations; remove one of them",
            key="trainer.stop_at_accuracy",
        )


def check_unread_engine(key: str, engine: EngineConfig) -> None:
    """Check that no setting of an engine is without effect beside the others.

    Raises:
        ConfigError: names the setting.
    """
    default = EngineConfig()
    reader, unread = ("fsdp", _OF_FSDP) if engine.name == "megatron" else ("megatron", _OF_MEGATRON)
    for name in unread:
        value = getattr(engine, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"{key}.{name}={as_written(value)} is read by {key}.name={reader} only, but "
                f"{key}.name={engine.name}; remove it",
                key=f"{key}.{name}",
            )
    for name in _OFFLOADS:
        if engine.offload_policy and getattr(engine, name):
            raise ConfigError(
                f"{key}.{name}=true has no effect, because {key}.offload_policy=true keeps "
                "parameters and optimizer state in host memory all the time; remove one of them",
                key=f"{key}.{name}",
            )


def check_unread_optim(key: str, optim: OptimConfig) -> None:
    """Check that no setting of an optimizer is without effect beside the others.

    Raises:
        ConfigError: names the setting.
    """
    constant = optim.lr_scheduler == "constant"
    if optim.min_lr_ratio and constant:
        raise ConfigError(
            f"{key}.min_lr_ratio={optim.min_lr_ratio:g} is the end of a falling learning rate, but "
            f"{key}.lr_scheduler=constant; set lr_scheduler to linear or cosine, or remove "
            f"{key}.min_lr_ratio",
            key=f"{key}.min_lr_ratio",
        )
    if optim.momentum is not None and optim.name != "muon":
        raise ConfigError(
            f"{key}.momentum={optim.momentum} is read by {key}.name=muon only, but {key}.name="
            f"{optim.name}; set {key}.name=muon, or remove {key}.momentum",
            key=f"{key}.momentum",
        )
    _check_warmup(key, optim, optim.total_steps, f"{key}.total_steps={optim.total_steps}")
    if optim.total_steps is not None and constant:
        raise ConfigError(
            f"{key}.total_steps={optim.total_steps} is the length of a falling learning rate, but "
            f"{key}.lr_scheduler=constant; set lr_scheduler to linear or cosine, or remove "
            f"{key}.total_steps",
            key=f"{key}.total_steps",
        )


def check_unread_update(config: TrainConfig) -> None:
    """Check that no setting of actor and reference is without effect in the updates of a run.

    Raises:
        ConfigError: names the setting.
    """
    actor = config.actor_rollout_ref.actor
    check_frozen_engine(
        _REF,
        config.actor_rollout_ref.ref.engine,
        "the reference policy",
        f"set {_ACTOR}.engine.{{name}} if the actor was meant",
    )
    if actor.loss_scale_length is not None and actor.loss_agg_mode != _NORMALISED:
        raise ConfigError(
            f"{_ACTOR}.loss_scale_length={actor.loss_scale_length} is read by {_ACTOR}."
            f"loss_agg_mode={_NORMALISED} only, but it is {actor.loss_agg_mode}; change it, or "
            "remove loss_scale_length",
            key=f"{_ACTOR}.loss_scale_length",
        )
    _check_shuffle(config, actor)


def check_frozen_engine(key: str, engine: EngineConfig, model: str, remedy: str = "") -> None:
    """Check that no setting of an engine is for updates, if its model is not trained.

    Args:
        model: in words, "the reward model".
        remedy: besides removing the setting, whose name is put in place of `{name}`.

    Raises:
        ConfigError: names the setting.
    """
    default = EngineConfig()
    for name, reason in _OF_UPDATES.items():
        value = getattr(engine, name)
        if value != getattr(default, name):
            other = f", or {remedy.format(name=name)}" if remedy else ""
            raise ConfigError(
                f"{key}.{name}={as_written(value)} has no effect: {model} is not trained, so "
                f"{reason}; remove it{other}",
                key=f"{key}.{name}",
            )


def _check_shuffle(config: TrainConfig, actor: ActorConfig) -> None:
    mini, _ = mini_batch_prompts(config)
    prompts = config.data.train_batch_size
    if actor.shuffle and mini >= prompts:
        raise ConfigError(
            f"{_ACTOR}.shuffle=true has no effect: {prompts} prompts in mini-batches of {mini} "
            f"are one mini-batch, whose gradient does not depend on the order; set {_ACTOR}."
            "ppo_mini_batch_size to a smaller number, or remove shuffle",
            key=f"{_ACTOR}.shuffle",
        )


def check_run_length(config: TrainConfig, total_steps: int, *, with_critic: bool) -> None:
    """Check the settings that count steps against the steps of the run.

    Args:
        total_steps: training steps of the run.
        with_critic: whether the run has a critic.

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
    policy, critic = config.actor_rollout_ref.actor.optim, config.critic.optim
    check_warmup_of_run(f"{_ACTOR}.optim", policy, actor_steps)
    if with_critic:
        check_warmup_of_run("critic.optim", critic, critic_steps)


def check_warmup_of_run(key: str, optim: OptimConfig, steps: int) -> None:
    """Check that the warm-up of the learning rate ends within the optimizer steps of the run.

    Raises:
        ConfigError: it does not.
    """
    if optim.total_steps is None:  # otherwise `check_unread_optim` has compared the two
        _check_warmup(key, optim, steps, f"the {steps} optimizer steps of the run")


def _check_warmup(key: str, optim: OptimConfig, steps: int | None, source: str) -> None:
    if steps is not None and optim.lr_warmup_steps > steps:
        raise ConfigError(
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} is more than {source}: the warm-up "
            "would not end; reduce it",
            key=f"{key}.lr_warmup_steps",
        )
