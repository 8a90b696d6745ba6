"""The checks that run before any process starts: settings, names, files and folders.

This is the one place that calls the checks of settings, engines, rollouts, roles and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from quadriga.algorithms.user_files import load_user_file
from quadriga.checkpoint.remote import check_remote_folder
from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.convert import leaves
from quadriga.config.hub import check_repository
from quadriga.config.role_ranks import has_reward_model, num_ranks
from quadriga.config.schema import ModelConfig, RunConfig, TrainConfig
from quadriga.engines import check_engine_folder
from quadriga.errors import ConfigError, ModelError
from quadriga.observability.callbacks import callback_file
from quadriga.observability.run_folder import RunFolder
from quadriga.parallel.device import get_device_name, planned_device
from quadriga.rewards.manager import parts_of
from quadriga.rollout import check_adapters, rollout_of
from quadriga.single_controller import Worker
from quadriga.trainer.checkpoints import AnyRun, read_resumed, seconds_left
from quadriga.trainer.checks import settings
from quadriga.trainer.checks.data import check_images_supported
from quadriga.trainer.checks.early import check_files, require_model_path
from quadriga.trainer.checks.options import check_algorithm_options
from quadriga.trainer.dataflow import StepPlan, check_dataflow, validation_dataflow
from quadriga.trainer.roles.registry import ResourcePoolManager, Role, check_roles_in_settings
from quadriga.trainer.roles.workers import (
    POLICY_ROLES,
    check_roles,
    settings_for_classes,
    settings_of_pools,
)


def check_train_config(
    config: TrainConfig,
    mapping: Mapping[Role, type[Worker]] | None = None,
    manager: ResourcePoolManager | None = None,
    *,
    own_data: bool = False,
    own_reward: bool = False,
) -> tuple[TrainConfig, TrainConfig, StepPlan]:
    """Check a run of `quadriga train`: settings, roles and their order in a step, files, folders,
    memory. What a program gives itself is not read from the settings, and not checked.

    Args:
        mapping: role → worker class of the program. One of the policy may load any model.
        manager: the pools of the program. Ranks are counted in them, whatever `config.placement`
            says.
        own_data: the program gives prompts, and with them a reward function.
        own_reward: the program gives a reward function.

    Returns:
        The settings for these worker classes, the same with the placement of the pools, and the
        plan of a step.

    Raises:
        InputError: names the first setting, role, file or folder that does not fit.
    """
    mapping = mapping or {}
    for path in config.algorithm.user_files:
        load_user_file(path)
    check_roles_in_settings(config)
    config = placed = settings_for_classes(config, mapping)
    if manager is not None:
        placed = settings_of_pools(config, manager)
    check_settings(placed)
    plan = StepPlan.of(config, custom_reward=own_reward or own_data)
    check_dataflow(plan.stages)
    check_dataflow(validation_dataflow(config, custom_reward=own_reward or own_data))
    check_roles(config, mapping, manager)
    if not own_data:
        check_files(config.data.train_files, "data.train_files", needed=True)
        check_files(config.data.val_files, "data.val_files", needed=False)
    if not (own_reward or own_data):
        parts_of(config.reward)  # its files exist, and have the functions
    own_policy = any(role in POLICY_ROLES for role in mapping)
    if not own_policy:
        _check_models(placed)
    check_run_folder(config)
    if not own_policy:
        from quadriga.trainer.checks.memory import RunMemory

        RunMemory(placed).check()
    return config, placed, plan


def _check_models(config: TrainConfig) -> None:
    check_folder("actor_rollout_ref.model", config.actor_rollout_ref.model)
    if config.critic.model.path:  # its tokenizer is not read
        check_folder("critic.model", config.critic.model, tokenizer=False)
    check_images_supported(config)

    policy = config.actor_rollout_ref
    rollout_of(policy.rollout).check_model(policy.model, planned_device(config.trainer))
    if policy.rollout.replay_routes:
        from quadriga.models.loading import model_without_weights
        from quadriga.models.routes import Routers

        Routers(model_without_weights(policy.model)).check()
    _check_reward_model_folder(config)
    check_models_of_engines(settings.role_engines(config))


def check_settings(config: TrainConfig) -> None:
    """Check the settings of a training run against each other and against the registries.

    Raises:
        ConfigError: names the first setting that does not fit.
    """
    settings.check_train_settings(config)
    settings.check_device(config.trainer)
    check_engines(config)
    check_algorithm_options(config)


def check_engines(config: TrainConfig) -> None:
    """Check the training engines of the run, and the engine and the sampling of the rollout.

    Raises:
        ConfigError: names the setting.
    """
    settings.check_role_engines(config)
    policy = config.actor_rollout_ref
    rollout, ranks = policy.rollout, num_ranks(config, "rollout")
    check_adapters(rollout, policy.model.lora)
    engine = rollout_of(rollout)
    engine.check(ranks)
    engine.check_updates(ranks, take_turns=rollout.take_turns)
    for sampling in (rollout.sampling, rollout.val_sampling):
        engine.check_sampling(sampling)


def check_fine_tuning_config(config: SFTConfig | RMConfig) -> None:
    """Check the settings of `quadriga sft` or `quadriga rm`, then files and folders.

    Raises:
        InputError: names the first setting, file or folder that does not fit.
    """
    settings.check_fine_tuning_settings(config)
    settings.check_device(config.trainer)
    settings.check_fine_tuning_engine(config)
    check_files(config.data.train_files, "data.train_files", needed=True)
    check_files(config.data.val_files, "data.val_files", needed=False)
    check_folder("model", config.model)
    check_models_of_engines([settings.fine_tuning_engine(config)])
    if isinstance(config, SFTConfig):
        parts_of(config.reward)  # its files exist, and have the functions
    check_run_folder(config)


def check_sizes(config: AnyRun) -> None:
    """Check a run that has lost nodes with the number of nodes in `config`.

    Raises:
        ConfigError: the settings do not divide by its ranks, or its memory is too small.
    """
    from quadriga.trainer.checks.memory import RunMemory

    if isinstance(config, TrainConfig):
        check_settings(config)
        RunMemory(config).check()
    else:
        settings.check_fine_tuning_settings(config)
        settings.check_fine_tuning_engine(config)


def check_run_folder(config: AnyRun) -> None:
    """Check that the run can be written to its folder, removes no file that it reads, can be
    resumed as the settings say, and is not asked to stop already.

    Raises:
        InputError: it cannot.
    """
    trainer, folder = config.trainer, RunFolder(Path(config.trainer.default_local_dir))
    check_files((str(callback_file(one)) for one in trainer.callbacks), "trainer.callbacks")
    seconds_left(trainer)
    resumed = read_resumed(config)
    existing = folder.existing(trainer, None if resumed is None else resumed.folder)
    folder.check(existing)
    check_remote_folder(trainer, existing)
    if trainer.push_to_hub is not None:
        check_repository(trainer.push_to_hub)
    for key, value in leaves(config) if trainer.backend == "ray" else ():
        if key.endswith("path") and str(value).startswith("memory://"):
            text = "is in the memory of this process, and the ranks have processes of their own"
            raise ConfigError(f"{key}={value} {text}; set trainer.backend=local", key=key)
    for key, value in leaves(config) if existing == "overwrite" else ():
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, str) and path and folder.removes(Path(os.path.expanduser(path))):
                raise ConfigError(
                    f"{key}={path} is in the run folder {folder.path}, whose files "
                    "trainer.overwrite=true removes before they are read; move it, or choose "
                    "another trainer.default_local_dir",
                    key=key,
                )


def check_folder(key: str, model: ModelConfig, *, tokenizer: bool = True) -> None:
    """Check the folder of a model, with its tokenizer unless `tokenizer_path` has another.

    Raises:
        ModelError: names the folder and what it lacks, or the section `key` if it has no path.
    """
    from quadriga.models import check_model_folder

    require_model_path(model.path, f"{key}.path")
    own = tokenizer and model.tokenizer_path is None
    check_model_folder(model.path, tokenizer=own, trust_remote_code=model.trust_remote_code)


def check_models_of_engines(engines: Iterable[settings.RoleEngine]) -> None:
    """Check that adapters, patterns and optimizers fit the models, and that the ranks of each role
    can divide the work of its model.

    Raises:
        InputError: names the setting, the layer, the pattern or the sizes, with the arithmetic.
    """
    from quadriga.engines.loading import check_trained_part

    for found in engines:
        if found.optim is not None:
            check_trained_part(found.model, found.head)
        check_engine_folder(found.model, found.engine, found.key)


def _check_reward_model_folder(config: TrainConfig) -> None:
    """Check that the model of an enabled reward model has a head for one score, and a chat template
    if it encodes conversations again."""
    if not has_reward_model(config):
        return
    from quadriga.data.chat import check_template_arguments
    from quadriga.models.folder import local_folder
    from quadriga.models.loading import check_reward_model, tokenizer_of
    from quadriga.workers.reward_model import same_tokens

    section, model = config.reward_model, config.reward_model.model
    check_folder("reward_model.model", model)
    check_reward_model(local_folder(model.path), trust_remote_code=model.trust_remote_code)
    tokenizer, policy = tokenizer_of(model), tokenizer_of(config.actor_rollout_ref.model)
    key = "reward_model.chat_template_kwargs"
    check_template_arguments(tokenizer, section.chat_template_kwargs, key)
    if not tokenizer.chat_template and not same_tokens(tokenizer, policy):
        raise ModelError(
            f"the tokenizer of the reward model in {model.path} differs from that of the policy, "
            "so conversations are encoded again with its chat template, and it has none; add "
            "chat_template to its tokenizer_config.json, or set reward_model.model.tokenizer_path",
            path=model.path,
        )


def profile_problems(trainer: RunConfig, total_steps: int) -> settings.Problems:
    """Yield a profiled step that the run does not have, and Nsight Systems where nothing of it can
    be recorded."""
    profile = trainer.profile
    if late := [step for step in profile.steps if step > total_steps]:
        text = f"has step {late[0]}, but the run has {total_steps}; leave it out"
        yield "trainer.profile.steps", text
    if profile.steps and profile.tool == "nsys":
        seen = get_device_name()
        if trainer.backend != "ray" or "cuda" not in (seen, trainer.device):
            yield (
                "trainer.profile.tool",
                f"records CUDA on ranks that Ray starts; this run has trainer.backend="
                f"{trainer.backend} and this process sees {seen}; use torch, or with "
                "trainer.backend=ray and GPUs on other nodes set trainer.device=cuda",
            )
