"""verl's trainers: `RayPPOTrainer`, the runner of a training, and the entry points.

    run_ppo(config, MyRunner)           connects to Ray with the user's `ray_kwargs`
      MyRunner.run(config)              in an actor
        add_actor_rollout_worker …      hooks: which class and which pool each role has
        init_resource_pool_mgr          hook: the pools
        RayPPOTrainer(…).fit()          Quadriga's trainer, with the settings translated

`config` is a configuration of verl (a mapping or an OmegaConf node), or a `TrainConfig`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from quadriga.algorithms.user_files import load_user_file
from quadriga.backends.ray import RayWorkerGroup as QuadrigaRayWorkerGroup
from quadriga.backends.ray.cluster import ensure_ray
from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.compat.verl.controller.groups import RayWorkerGroup, ResourcePoolManager
from quadriga.compat.verl.controller.references import init_parameters, run_in_actor, write_timeline
from quadriga.compat.verl.training.inputs import (
    BatchDicts,
    LoadedRewards,
    RulesAfterModel,
    refused,
    with_inputs,
)
from quadriga.compat.verl.training.run_settings import (
    check_called,
    check_policy_loss,
    check_stages,
    need_critic,
    need_reference_policy,
    pools_of,
    settings_of,
    train_settings,
    worker_classes,
)
from quadriga.compat.verl.training.workers import ActorRolloutRefWorker, CriticWorker
from quadriga.compat.verl_settings import EVAL, GENERATE, SFT, plain_values
from quadriga.config.commands import EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.paths import local_path
from quadriga.config.role_ranks import REWARD_MODEL, has_reward_model, role_pools, role_ranks
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError, DispatchError, nearest_name
from quadriga.rewards.tensors import BatchFunction
from quadriga.single_controller.worker import plain_class
from quadriga.trainer.ppo import RayPPOTrainer as QuadrigaTrainer
from quadriga.trainer.roles.needs import needs_critic, needs_reference
from quadriga.trainer.roles.registry import (
    ResourcePoolManager as QuadrigaPools,
    Role,
    register_again,
    registered_for,
)
from quadriga.trainer.stages import BatchReward, ModelReward
from quadriga.workers.roles import ActorGroup, CriticGroup, RefGroup, RewardModelGroup

PoolManager: TypeAlias = "ResourcePoolManager[Role] | QuadrigaPools"

RUN = "run"
_HOOKS = (
    "add_actor_rollout_worker add_critic_worker add_reward_model_resource_pool "
    "add_teacher_model_resource_pool add_ref_policy_worker init_resource_pool_mgr"
)
HOOKS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_HOOKS.split(), ("config",)),
    "add_ref_policy_worker": ("config", "ref_policy_cls"),
}
"""The hooks that every runner has → the names of their arguments."""
_POLICY = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)


def call_hooks(runner: TaskRunner, config: VerlConfig) -> tuple[type, PoolManager]:
    """Check the hooks of a runner, and call them. Return the class of groups and the pools.

    Raises:
        ConfigError: a hook cannot be called, or returns something else than expected.
    """
    added = _added_hooks(runner)
    for name, arguments in {**HOOKS, **dict.fromkeys(added, ("config",))}.items():
        _check_method(runner, name, arguments)
    chosen = runner.add_actor_rollout_worker(config)
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        expected = "(class of the policy, class of groups)"
        raise ConfigError(f"add_actor_rollout_worker must return {expected}, got {chosen!r}")
    policy_class, group_class = chosen
    values = {"config": config, "ref_policy_cls": policy_class}
    for name in (*HOOKS, *added):
        if name not in ("add_actor_rollout_worker", "init_resource_pool_mgr"):
            getattr(runner, name)(*(values[a] for a in HOOKS.get(name, ("config",))))
    if not any(role in runner.role_worker_mapping for role in _POLICY):
        raise ConfigError(
            f"{type(runner).__name__} has chosen no class for the policy; set "
            "self.role_worker_mapping[Role.ActorRollout] in add_actor_rollout_worker"
        )
    pools = runner.init_resource_pool_mgr(config)
    if not isinstance(pools, ResourcePoolManager | QuadrigaPools):
        text = f"init_resource_pool_mgr must return a ResourcePoolManager, got {pools!r}"
        raise ConfigError(text)
    return group_class, pools


def check_runner(runner_class: object) -> None:
    """Raise `ConfigError` unless it is a class with a plain method `run`, before Ray starts."""
    try:
        cls: type | None = plain_class(runner_class)
    except DispatchError:
        cls = None
    if cls is None or not callable(getattr(cls, RUN, None)):
        text = f"must be a class with a method {RUN}, got {runner_class!r}"
        raise ConfigError(f"run_ppo: task_runner_class {text}", key="task_runner_class")
    check_plain(cls, RUN, getattr(cls, RUN))


def _added_hooks(runner: TaskRunner) -> list[str]:
    """Return the names of the hooks that subclasses of `TaskRunner` add, in their order."""
    names = [name for base in reversed(type(runner).__mro__) for name in vars(base)]
    added = re.compile("add_.*(_worker|_resource_pool)")
    known = dict.fromkeys([*names, *vars(runner)])
    return [name for name in known if added.fullmatch(name) and name not in HOOKS]


def _check_method(runner: TaskRunner, name: str, arguments: tuple[str, ...]) -> None:
    """Check that a method is a plain function with these arguments."""
    cls, method = type(runner), getattr(runner, name)
    if not callable(method):
        raise ConfigError(f"{cls.__name__}.{name} must be a method, got {method!r}")
    check_plain(cls, name, method)
    signature = inspect.signature(method)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(
            f"TaskRunner calls {name}({', '.join(arguments)}), but {cls.__name__} defines "
            f"{name}{signature}; change its parameters"
        ) from None


def check_plain(cls: type, name: str, method: object) -> None:
    """Check that a call of a method runs its body. Raises `ConfigError` that names the method."""
    awaited = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    if awaited or inspect.isgeneratorfunction(method):
        kind = "coroutine" if awaited else "generator"
        raise ConfigError(
            f"{cls.__name__}.{name} is a {kind} function, whose body would not run, because "
            "nothing awaits or iterates it; write it as a plain function"
        )


RUNTIME_ENV = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}}
"""What `run_ppo` asks of Ray's processes, unless `ray_kwargs` says otherwise."""

_TIMELINE = "timeline_json_file"


def ray_settings(config: VerlConfig) -> tuple[dict[str, Any], str | None]:
    """Return (arguments of `ray.init`, the file for a trace of all tasks or None).

    They are in the section `ray_kwargs`; older configurations have a section `ray_init` instead.

    Raises:
        ConfigError: names the key, and the value that Ray does not take.
    """
    key = f"ray_kwargs.{_TIMELINE}"
    given = _section(setting(config, "ray_kwargs"), "ray_kwargs")
    older = _section(setting(config, "ray_init"), "ray_init")
    trace = given.get(_TIMELINE) or older.pop(_TIMELINE, None)
    if not isinstance(trace, str | None):
        raise ConfigError(f"{key} must be a file name, got {trace!r}", key=key)
    if trace is not None:
        trace = local_path(trace, key)
    return ray_init_arguments(given.get("ray_init", older), get_ppo_ray_runtime_env(config)), trace


def ray_init_arguments(
    given: VerlConfig, defaults: Mapping[str, Mapping[str, str]] = RUNTIME_ENV
) -> dict[str, Any]:
    """Return the arguments of `ray.init`: the user's, and `defaults` where they are silent.

    Raises:
        ConfigError: `ray.init` has no such argument.
    """
    where = "ray_kwargs.ray_init"
    arguments = _section(given, where)
    known = init_parameters()
    for name in arguments:
        # Names with an underscore are not in the signature; Ray checks them.
        if name not in known and not name.startswith("_"):
            near = nearest_name(name, known)
            hint = f". Did you mean {near}?" if near else ""
            raise ConfigError(f"ray.init has no argument {name!r}{hint}", key=f"{where}.{name}")
    environment = _section(arguments.get("runtime_env"), f"{where}.runtime_env")
    variables = _section(environment.get("env_vars"), f"{where}.runtime_env.env_vars")
    kept = {key: value for key, value in environment.items() if value is not None}
    return {
        **{key: value for key, value in arguments.items() if value is not None},
        "runtime_env": {**kept, "env_vars": {**defaults["env_vars"], **variables}},
    }


def get_ppo_ray_runtime_env(config: VerlConfig = None) -> dict[str, dict[str, str]]:
    """Return what `run_ppo` asks of Ray's processes, without the variables that are set here.

    Megatron needs one more variable on Ampere and Hopper, for its overlap of communication.
    """
    wanted = dict(RUNTIME_ENV["env_vars"])
    sections = (setting(config, "critic"), setting(setting(config, "actor_rollout_ref"), "actor"))
    megatron = any(setting(section, "strategy") == "megatron" for section in sections)
    if megatron and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (8, 9):
        wanted["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return {"env_vars": {name: v for name, v in wanted.items() if name not in os.environ}}


def _section(value: object, key: str) -> dict[str, object]:
    """Return the settings of a section; {} for None. Raises `ConfigError` for another value."""
    if value is None:
        return {}
    is_section = isinstance(value, Mapping) or hasattr(value, "__dict__")
    if isinstance(value, Sequence) or not is_section:  # a list of OmegaConf is a sequence
        shown = mask_secrets(repr(value))
        raise ConfigError(f"{key} must be a section of settings, got {shown}", key=key)
    return plain_values(value)


_ROLE = "register a role with a stage beside it (docs/concepts/roles.md)"
_CALLS = f"override the method of the worker class, which role_worker_mapping gives, or {_ROLE}"
_VALIDATION = "override make_validator, or give the stage of a role in_validation=True"
_SAMPLES = "override open_record, which keeps samples and metrics"
_PROFILING = "set trainer.profile.steps"

_INSTEAD = {
    f"set trainer.balance_batch, or {_ROLE}": "_balance_batch",
    _CALLS: "_compute_old_log_prob _compute_ref_log_prob _compute_values _update_actor "
            "_update_critic",
    f"pass reward_fn, or {_ROLE}": "_compute_reward_colocate",
    "set data.train_files and data.val_files": "_create_dataloader",
    _SAMPLES: "_dump_generations _log_rollout_data _maybe_log_val_generations",
    _ROLE: "_get_gen_batch",
    "override resume": "_load_checkpoint",
    _VALIDATION: "_merge_validation_results _val_metrics_update _validate",
    "override save": "_save_checkpoint",
    _PROFILING: "_start_profiling _stop_profiling",
}  # fmt: skip
REPLACED = {name: use for use, names in _INSTEAD.items() for name in names.split()}
"""Method of verl's trainer that Quadriga's `fit` does not call → what to write instead."""


class VerlTrainerNames(QuadrigaTrainer):
    """Quadriga's trainer with verl's names of its parts, for a `fit` of one's own.

    The groups are started when they are first read.
    """

    @property
    def actor_rollout_wg(self) -> ActorGroup:
        """The worker group of the policy."""
        return self.init_workers().actor

    @property
    def critic_wg(self) -> CriticGroup | None:
        """The worker group of the critic; None if the estimator reads no values."""
        return self.init_workers().critic

    @property
    def ref_policy_wg(self) -> RefGroup | None:
        """The worker group of the reference; None if no stage reads its log-probabilities."""
        return self.init_workers().ref

    @property
    def rm_wg(self) -> RewardModelGroup | None:
        """The worker group of the reward model; None if it is not enabled."""
        return self.init_workers().reward_model

    use_rm = property(lambda self: has_reward_model(self.config))
    use_critic = property(lambda self: needs_critic(self.config))
    use_reference_policy = property(lambda self: needs_reference(self.config))
    ref_in_actor = property(attrgetter("config.actor_rollout_ref.model.lora.enabled"))
    tokenizer = property(attrgetter("ingredients.tokenizer"))
    kl_ctrl_in_reward = property(attrgetter("kl_controller"))
    total_training_steps = property(attrgetter("total_steps"))

    @property
    def hybrid_engine(self) -> bool:
        """Whether actor and rollout share their processes."""
        ranks = role_ranks(self.placed)
        return ranks["actor"] == ranks["rollout"]

    @property
    def train_dataloader(self) -> BatchDicts:
        """The loader of the prompts; its batches are dicts for `DataProto.from_single_dict`."""
        return BatchDicts(self.ingredients.train_loader)

    @property
    def val_dataloader(self) -> BatchDicts | None:
        """The loader of the prompts of the validation; None without such data."""
        loader = self.ingredients.val_loader
        return None if loader is None else BatchDicts(loader)

    @property
    def global_steps(self) -> int:
        """The number of the step, from 1; 0 before the first one."""
        return self.step

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.step = step


def check_methods_of_subclass(cls: type[QuadrigaTrainer], fit: object) -> None:
    """Check that the methods of a subclass are called, and that their bodies run.

    A subclass with a `fit` of its own may call methods of verl's trainer, and may await its own.
    `fit`: the one that calls none of them.

    Raises:
        ConfigError: names the method, and what to write instead.
    """
    check_plain(cls, "fit", cls.fit)
    if cls.fit is not fit:
        return
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        replaced = getattr(VerlTrainerNames, name, None)
        if inspect.isfunction(replaced) and not inspect.isgeneratorfunction(replaced):
            check_plain(cls, name, method)
    for name, use in REPLACED.items():
        if hasattr(cls, name):
            raise ConfigError(
                f"{cls.__name__} defines {name}, which Quadriga's fit does not call; {use}, or "
                "override fit too"
            )


class RayPPOTrainer(VerlTrainerNames):
    """Quadriga's trainer with the arguments of verl's.

    The tokenizer comes from the settings, and so do the data, or from the files of datasets of
    `create_rl_dataset`. Raises `ConfigError` for other datasets, samplers and collate functions,
    and for a subclass whose methods nothing would call.
    """

    def __init__(
        self,
        config: VerlConfig,
        tokenizer: object = None,
        role_worker_mapping: Mapping[Role, object] | None = None,
        resource_pool_manager: PoolManager | None = None,
        ray_worker_group_cls: type = RayWorkerGroup,
        processor: object = None,
        reward_fn: BatchFunction | None = None,
        val_reward_fn: BatchFunction | None = None,
        train_dataset: object = None,
        val_dataset: object = None,
        collate_fn: object = None,
        train_sampler: object = None,
        device_name: str | None = None,
    ) -> None:
        check_methods_of_subclass(type(self), RayPPOTrainer.fit)
        if processor is not None:
            raise refused("processor", "None: images are encoded with that of the model folder")
        if ray_worker_group_cls not in (RayWorkerGroup, QuadrigaRayWorkerGroup):
            text = f"RayPPOTrainer starts groups of Quadriga, not of {ray_worker_group_cls!r}; "
            text += "start groups of your own class in a loop of your own"
            raise ConfigError(text, key="ray_worker_group_cls")
        inputs = (train_dataset, val_dataset, collate_fn, train_sampler)
        ours = with_inputs(train_settings(config), *inputs)
        # verl's default is "cuda", also where a program runs on CPUs.
        device = ours.trainer.device if device_name in (None, "cuda") else device_name
        _check_tokenizer(tokenizer, ours)
        classes = role_worker_mapping or {}
        check_called(classes, ours, "role_worker_mapping")
        if resource_pool_manager is not None:
            check_called(resource_pool_manager.mapping, ours, "the mapping of roles to pools")
        for file in ours.algorithm.user_files:  # the settings may have names that they add
            load_user_file(file)
        check_policy_loss(ours)
        pools = pools_of(resource_pool_manager, ours, device)
        super().__init__(
            ours, role_worker_mapping=worker_classes(classes), resource_pool_manager=pools,
            reward_fn=_rules_of(reward_fn), val_reward_fn=_rules_of(val_reward_fn),
        )  # fmt: skip
        self._own_reward = reward_fn is not None and not isinstance(reward_fn, LoadedRewards)

    def training_reward(self) -> BatchReward:
        """Return the reward of a step: with a reward model, `reward_fn` receives its scores."""
        made = super().training_reward()
        own = self._own_reward and not self.config.reward_model.rule_weight
        return RulesAfterModel(made) if own and isinstance(made, ModelReward) else made


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
        """Choose the pool of the reward model if it is enabled: its own, or that of the policy."""
        ours = train_settings(config, tell=False)
        if has_reward_model(ours):
            own = ours.placement.reward_model is not None
            self.mapping[Role.RewardModel] = "reward_pool" if own else "global_pool"

    def add_teacher_model_resource_pool(self, config: VerlConfig) -> None:
        """Do nothing: Quadriga has no distillation loss."""

    def add_ref_policy_worker(self, config: VerlConfig, ref_policy_cls: type) -> None:
        """Do nothing: the reference is in the workers of the policy."""

    def init_resource_pool_mgr(self, config: VerlConfig) -> PoolManager:
        """Return the pools: one, with `n_gpus_per_node` ranks on each node, and one of the reward
        model if it has ranks of its own."""
        ours = train_settings(config, tell=False)
        spec = {"global_pool": [ours.trainer.n_gpus_per_node] * ours.trainer.nnodes}
        if self.mapping.get(Role.RewardModel) == "reward_pool":
            own = {pool.roles == (REWARD_MODEL,): pool for pool in role_pools(ours)}
            names = {"global_pool": own[False], "reward_pool": own[True]}
            spec = {name: list(pool.ranks_per_node) for name, pool in names.items()}
        return ResourcePoolManager(spec, self.mapping, max_colocate_count=1)

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
    check_runner(runner)
    arguments, timeline = ray_settings(config)
    session = ensure_ray(**arguments)
    try:
        # The actor is another process, which has not run the program's `register_role`.
        first = partial(register_again, registered_for(()))
        result = run_in_actor(runner, RUN, config, first=first)
        if timeline is not None:
            write_timeline(timeline)
        return result
    finally:
        session.close()


def run_sft(config: VerlConfig) -> object:
    """Fine-tune as `quadriga sft`, with settings of verl or an `SFTConfig`."""
    from quadriga.trainer.fine_tuning import run_sft as run

    return run(settings_of(config, SFTConfig, SFT))


def run_generation(config: VerlConfig) -> object:
    """Generate as `quadriga generate`, with settings of verl or a `GenerateConfig`."""
    from quadriga.trainer.evaluation import run_generation as run

    return run(settings_of(config, GenerateConfig, GENERATE))


def run_eval(config: VerlConfig) -> object:
    """Score responses of files as `quadriga eval`, with settings of verl or an `EvalConfig`."""
    from quadriga.trainer.evaluation import run_evaluation as run

    return run(settings_of(config, EvalConfig, EVAL))


def _rules_of(reward_fn: BatchFunction | None) -> BatchFunction | None:
    """Return the manager of `load_reward_manager`; another function unchanged."""
    return reward_fn.manager if isinstance(reward_fn, LoadedRewards) else reward_fn


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
