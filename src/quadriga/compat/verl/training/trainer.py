"""verl's trainers: `RayPPOTrainer`, the runner of a training, and the entry points.

    run_ppo(config, MyRunner)           connects to Ray with the user's `ray_kwargs`
      MyRunner.run(config)              in an actor
        add_actor_rollout_worker …      hooks: which class and which pool each role has
        init_resource_pool_mgr          hook: the pools
        RayPPOTrainer(…).fit()          Quadriga's trainer, with the settings translated

`config` is a configuration of verl (a mapping or an OmegaConf node), or a `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from quadriga.algorithms.user_files import load_user_files
from quadriga.backends.ray import RayWorkerGroup as QuadrigaRayWorkerGroup
from quadriga.backends.ray.cluster import ensure_ray
from quadriga.backends.ray.programs import run_in_actor, write_timeline
from quadriga.compat.verl.config import VerlConfig
from quadriga.compat.verl.controller.groups import RayWorkerGroup
from quadriga.compat.verl.controller.pools import ResourcePoolManager
from quadriga.compat.verl.training.hooks import RUN, PoolManager, call_hooks, check_runner
from quadriga.compat.verl.training.ray_settings import ray_settings
from quadriga.compat.verl.training.reward import reward_of_tensors
from quadriga.compat.verl.training.roles import (
    check_called,
    check_stages,
    pools_of,
    worker_classes,
)
from quadriga.compat.verl.training.settings import (
    check_settings,
    need_critic,
    need_reference_policy,
    settings_of,
    train_settings,
)
from quadriga.compat.verl.training.trainer_names import (
    VerlTrainerNames,
    check_methods_of_subclass,
)
from quadriga.config.commands import EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.schema import TrainConfig
from quadriga.config.verl.table import EVAL, GENERATE, SFT
from quadriga.errors import ConfigError
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.pools import check_settings_of_pools
from quadriga.trainer.roles.registry import register_again, registered_for
from quadriga.workers import ActorRolloutRefWorker, CriticWorker


class RayPPOTrainer(VerlTrainerNames):
    """Quadriga's trainer with the arguments of verl's.

    The tokenizer and the data come from the settings. Raises `ConfigError` for datasets, samplers
    and collate functions, which Quadriga's loaders replace, and for a subclass whose methods
    nothing would call.
    """

    def __init__(
        self,
        config: VerlConfig,
        tokenizer: object = None,
        role_worker_mapping: Mapping[Role, object] | None = None,
        resource_pool_manager: PoolManager | None = None,
        ray_worker_group_cls: type = RayWorkerGroup,
        processor: object = None,
        reward_fn: object = None,
        val_reward_fn: object = None,
        train_dataset: object = None,
        val_dataset: object = None,
        collate_fn: object = None,
        train_sampler: object = None,
        device_name: str | None = None,
    ) -> None:
        check_methods_of_subclass(type(self), RayPPOTrainer.fit)
        refused = {
            "processor": processor,
            "val_reward_fn": None if val_reward_fn is reward_fn else val_reward_fn,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
            "collate_fn": collate_fn,
            "train_sampler": train_sampler,
        }
        for name, value in refused.items():
            if value is not None:
                raise ConfigError(
                    f"RayPPOTrainer: {name} has no counterpart; Quadriga reads data.train_files "
                    "and data.val_files with loaders that can be resumed. Pass None",
                    key=name,
                )
        if ray_worker_group_cls not in (RayWorkerGroup, QuadrigaRayWorkerGroup):
            raise ConfigError(
                f"RayPPOTrainer starts groups of Quadriga, not of {ray_worker_group_cls!r}; start "
                "groups of your own class in a loop of your own",
                key="ray_worker_group_cls",
            )
        ours = train_settings(config)
        # verl's default is "cuda", also where a program runs on CPUs.
        device = ours.trainer.device if device_name in (None, "cuda") else device_name
        _check_tokenizer(tokenizer, ours)
        classes = role_worker_mapping or {}
        check_called(classes, ours, "role_worker_mapping")
        if resource_pool_manager is not None:
            check_called(resource_pool_manager.mapping, ours, "the mapping of roles to pools")
        load_user_files(ours.algorithm.user_files)  # the settings may have names that they add
        pools = pools_of(resource_pool_manager, ours, device)
        if pools is None:
            check_settings(ours)
        else:
            check_settings_of_pools(ours, pools, check_settings)
        super().__init__(
            ours,
            role_worker_mapping=worker_classes(classes),
            resource_pool_manager=pools,
            reward_fn=reward_of_tensors(reward_fn, ours.algorithm.reward_components),
        )


class TaskRunner:
    """Runs one training. A subclass replaces hooks, or adds some.

    Before the trainer is made, `run` calls with the configuration: the hooks of this class, in the
    order in which they stand here, then those that a subclass adds under a name `add_…_worker` or
    `add_…_resource_pool`, and `init_resource_pool_mgr` last.

    Attributes:
        role_worker_mapping: role → worker class, or the result of `ray.remote(class)`.
        mapping: role → name of its pool. An added role that is missing shares the pool of the
            policy.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, object] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: VerlConfig) -> tuple[type, type]:
        """Choose the class of the policy. Return it and the class of groups."""
        role = Role.ActorRolloutRef if need_reference_policy(config) else Role.ActorRollout
        self.role_worker_mapping[role] = ActorRolloutRefWorker
        self.mapping[role] = "global_pool"
        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: VerlConfig) -> None:
        """Choose the class of the critic, if the estimator needs one."""
        if need_critic(config):
            self.role_worker_mapping[Role.Critic] = CriticWorker
            self.mapping[Role.Critic] = "global_pool"

    def add_reward_model_resource_pool(self, config: VerlConfig) -> None:
        """Do nothing: rewards are rules, which need no pool."""

    def add_teacher_model_resource_pool(self, config: VerlConfig) -> None:
        """Do nothing: Quadriga has no distillation loss."""

    def add_ref_policy_worker(self, config: VerlConfig, ref_policy_cls: type) -> None:
        """Do nothing: the reference is in the workers of the policy."""

    def init_resource_pool_mgr(self, config: VerlConfig) -> PoolManager:
        """Return the pools: one, with `n_gpus_per_node` ranks on each node."""
        ours = train_settings(config, tell=False)
        ranks = [ours.trainer.n_gpus_per_node] * ours.trainer.nnodes
        return ResourcePoolManager({"global_pool": ranks}, self.mapping, max_colocate_count=1)

    def run(self, config: VerlConfig) -> dict[str, float]:
        """Train. Return the metrics of the last validation.

        Raises:
            ConfigError: a hook returns or takes something else than `run` expects, a role has no
                stage, or the settings do not fit.
        """
        group_class, pools = call_hooks(self, config)
        trainer = RayPPOTrainer(
            config,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=group_class,
        )
        try:
            check_stages(trainer.config)
            with trainer.stop.listening():
                trainer.init_workers()
                return trainer.fit()
        finally:
            trainer.close()


def run_ppo(config: VerlConfig, task_runner_class: object = None) -> object:
    """Connect to Ray, run the training in an actor, and return what its `run` returns.

    `task_runner_class`: a class, or the result of `ray.remote(class)`; None: `TaskRunner`.
    `config.ray_kwargs.ray_init` holds arguments of `ray.init`; its `runtime_env` is merged with
    `RUNTIME_ENV`, and its values win. `config.ray_kwargs.timeline_json_file`: a file for a trace of
    all tasks. A connection to Ray that exists is used unchanged.

    Raises:
        ConfigError: names the setting of Ray, or the method of the class, that is wrong. Nothing
            was started.
    """
    runner = TaskRunner if task_runner_class is None else task_runner_class
    check_runner(runner, TaskRunner)
    of_ray = ray_settings(config)
    session = ensure_ray(**of_ray.arguments)
    try:
        # The actor is another process, which has not run the program's `register_role`.
        first = partial(register_again, registered_for(()))
        result = run_in_actor(runner, RUN, config, first=first)
        if of_ray.timeline is not None:
            write_timeline(of_ray.timeline)
        return result
    finally:
        session.close()


def run_sft(config: VerlConfig) -> object:
    """Fine-tune as `quadriga sft`, with settings of verl or an `SFTConfig`."""
    from quadriga.trainer.fine_tuning.sft import run_sft as run

    return run(settings_of(config, SFTConfig, SFT))


def run_generation(config: VerlConfig) -> object:
    """Generate as `quadriga generate`, with settings of verl or a `GenerateConfig`."""
    from quadriga.trainer.evaluation.generate import run_generation as run

    return run(settings_of(config, GenerateConfig, GENERATE))


def run_eval(config: VerlConfig) -> object:
    """Score responses of files as `quadriga eval`, with settings of verl or an `EvalConfig`."""
    from quadriga.trainer.evaluation.evaluate import run_evaluation as run

    return run(settings_of(config, EvalConfig, EVAL))


def _check_tokenizer(tokenizer: object, config: TrainConfig) -> None:
    model = config.actor_rollout_ref.model
    expected = model.tokenizer_path or model.path
    given = getattr(tokenizer, "name_or_path", expected)
    if given != expected:
        raise ConfigError(
            f"RayPPOTrainer: the tokenizer is loaded from {expected!r}, but one of {given!r} was "
            "passed. Set actor_rollout_ref.model.tokenizer_path to its folder",
            key="tokenizer",
        )
