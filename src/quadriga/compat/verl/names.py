"""The table of verl's modules, and what to use for modules and names that are not offered.

A module of verl has the names of the modules that `MODULES` lists for it, the first one that has a
name first. So it also has the names that these modules import, as in verl: programs write
`from verl.trainer.ppo.ray_trainer import AdvantageEstimator`. `NAMES` has names that are spelled in
another way.
"""

PROTOCOL, CONTROLLER = "quadriga.protocol", "quadriga.single_controller"
RAY, WORKERS = "quadriga.backends.ray", "quadriga.workers"
COMPAT = "quadriga.compat.verl"
ALGOS, LOSSES = f"{COMPAT}.core_algos", f"{COMPAT}.policy_losses"
BALANCING, TABLES = f"{COMPAT}.balancing", f"{COMPAT}.tensordicts"
FUNCTIONS, METRICS, TENSORS = f"{COMPAT}.functional", f"{COMPAT}.metrics", f"{COMPAT}.tensors"
CONFIG = f"{COMPAT}.config"
DECORATOR, WORKER = f"{COMPAT}.controller.decorator", f"{COMPAT}.controller.worker"
GROUPS, REFERENCES = f"{COMPAT}.controller.groups", f"{COMPAT}.controller.references"
TRAINER, SETTINGS = f"{COMPAT}.training.trainer", f"{COMPAT}.training.run_settings"
INPUTS, MODELS = f"{COMPAT}.training.inputs", f"{COMPAT}.training.models"
SHARDING, ROLES = f"{COMPAT}.training.sharding_managers", f"{COMPAT}.training.workers"
MEGATRON = f"{COMPAT}.training.megatron_workers"
SFT = "quadriga.trainer.fine_tuning"

_BELOW: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("protocol", (DECORATOR, PROTOCOL, TENSORS, FUNCTIONS)),
    ("single_controller single_controller.base", (GROUPS, WORKER, CONTROLLER)),
    ("single_controller.base.decorator", (DECORATOR, CONTROLLER, FUNCTIONS)),
    ("single_controller.base.megatron single_controller.base.register_center", ()),
    ("single_controller.base.megatron.worker", (WORKER,)),
    ("single_controller.base.register_center.ray", (REFERENCES,)),
    ("single_controller.base.worker", (WORKER, CONTROLLER, FUNCTIONS)),
    ("single_controller.base.worker_group", (GROUPS, DECORATOR, CONTROLLER)),
    ("single_controller.ray", (GROUPS, WORKER, RAY)),
    ("single_controller.ray.base",
     (GROUPS, WORKER, RAY, DECORATOR, CONTROLLER, PROTOCOL, FUNCTIONS)),
    ("trainer trainer.ppo workers workers.sharding_manager", ()),
    ("trainer.config workers.config", (CONFIG,)),
    ("trainer.constants_ppo trainer.main_eval trainer.main_generation "
     "trainer.main_generation_server", (TRAINER,)),
    ("trainer.fsdp_sft_trainer", (TRAINER, SFT)),
    ("trainer.main_ppo trainer.main_ppo_v0", (TRAINER, SETTINGS, FUNCTIONS, INPUTS)),
    ("trainer.ppo.core_algos", (ALGOS, LOSSES)),
    ("trainer.ppo.metric_utils", (METRICS, FUNCTIONS)),
    ("trainer.ppo.ray_trainer",
     (TRAINER, ALGOS, METRICS, BALANCING, GROUPS, WORKER, SETTINGS, RAY, FUNCTIONS, PROTOCOL,
      TENSORS, INPUTS)),
    ("trainer.ppo.reward", (INPUTS, PROTOCOL)),
    ("trainer.ppo.utils", (WORKER, SETTINGS, ALGOS, INPUTS)),
    ("trainer.sft_trainer", (TRAINER, SFT, FUNCTIONS)),
    ("utils", (FUNCTIONS, SETTINGS)),
    ("utils.config", (SETTINGS,)),
    ("utils.dataset utils.dataset.rl_dataset", (INPUTS,)),
    ("utils.device utils.fs utils.py_functional utils.ray_utils utils.tokenizer", (FUNCTIONS,)),
    ("utils.metric", (METRICS,)),
    ("utils.model", (TENSORS,)),
    ("utils.seqlen_balancing", (BALANCING,)),
    ("utils.tensordict_utils", (TABLES,)),
    ("utils.torch_functional", (TENSORS, FUNCTIONS)),
    ("workers.actor workers.actor.dp_actor workers.actor.megatron_actor workers.critic "
     "workers.critic.dp_critic workers.critic.megatron_critic workers.reward_model "
     "workers.reward_model.megatron workers.reward_model.megatron.reward_model workers.rollout "
     "workers.rollout.hf_rollout workers.rollout.vllm_rollout "
     "workers.rollout.vllm_rollout.vllm_rollout", (MODELS,)),
    ("workers.engine_workers workers.fsdp_workers",
     (ROLES, WORKERS, DECORATOR, WORKER, CONTROLLER, FUNCTIONS)),
    ("workers.megatron_workers",
     (MEGATRON, ROLES, WORKERS, DECORATOR, WORKER, CONTROLLER, FUNCTIONS)),
    ("workers.sharding_manager.base workers.sharding_manager.fsdp_ulysses "
     "workers.sharding_manager.fsdp_vllm workers.sharding_manager.megatron_vllm", (SHARDING,)),
)  # fmt: skip
"""Modules below verl → the modules whose names they have."""

MODULES: dict[str, tuple[str, ...]] = {
    "verl": (PROTOCOL, FUNCTIONS),
    **{f"verl.{name}": sources for names, sources in _BELOW for name in names.split()},
}
"""Module of verl → the modules whose names it has."""

NAMES: dict[str, str] = {
    "verl.protocol._padding_size_key": f"{DECORATOR}:PADDING",
    "verl.single_controller.base.decorator._padding_size_key": f"{DECORATOR}:PADDING",
    "verl.single_controller.ray.base._unwrap_ray_remote": f"{CONTROLLER}.worker:plain_class",
    "verl.trainer.fsdp_sft_trainer.FSDPSFTTrainer": f"{SFT}:SFTTrainer",
    "verl.trainer.fsdp_sft_trainer.main": f"{TRAINER}:run_sft",
    "verl.trainer.main_eval.main": f"{TRAINER}:run_eval",
    "verl.trainer.main_generation.main": f"{TRAINER}:run_generation",
    "verl.trainer.main_generation.main_task": f"{TRAINER}:run_generation",
    "verl.trainer.main_generation_server.main": f"{TRAINER}:run_generation",
    "verl.trainer.main_ppo.main": f"{TRAINER}:run_ppo",
    "verl.trainer.main_ppo_v0.BaseTaskRunner": f"{TRAINER}:TaskRunner",
    "verl.trainer.ppo.core_algos.verl_F": TENSORS,
    "verl.trainer.ppo.metric_utils.verl_F": TENSORS,
    "verl.trainer.ppo.ray_trainer.core_algos": "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.ray_trainer.tu": TABLES,
    "verl.trainer.ppo.ray_trainer.WorkerType": f"{CONTROLLER}:Worker",
    "verl.trainer.ppo.utils.WorkerType": f"{CONTROLLER}:Worker",
    "verl.trainer.sft_trainer.main": f"{TRAINER}:run_sft",
    "verl.utils.seqlen_balancing.tu": TABLES,
    "verl.workers.engine_workers.tu": TABLES,
}
"""Name of verl → "module:name", or a module."""

_DATA = "quadriga.data reads data.train_files and data.val_files"
_ENGINES = "training engines are those of quadriga.engines (build_engine), chosen by engine.name"
_REWARDS = "reward.path names a file with a reward function of yours (quadriga.rewards)"
_ROLLOUTS = "rollout engines are those of quadriga.rollout (build_rollout), chosen by rollout.name"
_SETTINGS = "settings are quadriga.config.schema; quadriga train --verl FILE translates a file"
_TURNS = "Quadriga generates one response per prompt"

NOT_OFFERED: dict[str, str] = {
    "verl.base_config": _SETTINGS,
    "verl.checkpoint_engine": "weights are sent by quadriga.weight_sync",
    "verl.experimental": "use the trainers of quadriga.trainer",
    "verl.interactions": _TURNS,
    "verl.model_merger": "ActorRolloutRefWorker.export_hf of quadriga.workers writes a Hugging "
    "Face folder",
    "verl.models": "quadriga.models loads the models of transformers",
    "verl.third_party": _ROLLOUTS,
    "verl.tools": _TURNS,
    "verl.trainer.config": _SETTINGS,
    **{
        f"verl.trainer.{module}": f"quadriga {command} is its command line; a program calls main"
        for module, command in (
            ("fsdp_sft_trainer", "sft"),
            ("main_eval", "eval"),
            ("main_generation", "generate"),
            ("main_generation_server", "generate"),
            ("sft_trainer", "sft"),
        )
    },
    "verl.trainer.distillation": "Quadriga has no distillation loss",
    "verl.trainer.main_ppo": _DATA,
    "verl.trainer.ppo.core_algos": "add an estimator with register_adv_est, and a loss with "
    "quadriga.algorithms.policy_losses.register_policy_loss",
    "verl.trainer.ppo.ray_trainer": _REWARDS,
    "verl.trainer.ppo.reward": _REWARDS,
    "verl.utils.checkpoint": "checkpoints are written by quadriga.checkpoint",
    "verl.utils.dataset": _DATA,
    "verl.utils.debug": "spans are timed by quadriga.observability.metrics.Timer",
    "verl.utils.fs": "files are on this machine; copy_to_local checks that, pathlib does the rest",
    "verl.utils.fsdp_utils": _ENGINES,
    "verl.utils.hdfs_io": "files are on this machine; use pathlib and shutil",
    "verl.utils.import_utils": "algorithm.user_files names files that add algorithms and roles",
    "verl.utils.megatron_utils": _ENGINES,
    "verl.utils.profiler": "spans are timed by quadriga.observability.metrics.Timer",
    "verl.utils.reward_score": _REWARDS,
    "verl.utils.torch_functional": "quadriga.engines and quadriga.models compute log-probabilities "
    "and gradients",
    "verl.utils.tracking": "trackers are those of quadriga.observability.trackers",
    "verl.utils.ulysses": "the engine splits tokens itself: set engine.sequence_parallel_size",
    "verl.workers.actor": "use quadriga.workers.ActorRolloutRefWorker",
    "verl.workers.config": _SETTINGS,
    "verl.workers.critic": "use quadriga.workers.CriticWorker",
    "verl.workers.engine": _ENGINES,
    "verl.workers.fsdp_workers": "the classes are those of quadriga.workers",
    "verl.workers.reward_manager": _REWARDS,
    "verl.workers.rollout": _ROLLOUTS,
    "verl.workers.sharding_manager": "weights are sent by quadriga.weight_sync",
}
"""Module → what to use for it, for the modules below it and for its names that are missing."""


def advice(name: str) -> str:
    """Return what to use for a name of verl that is not offered; "" if that is not known."""
    while name:
        if name in NOT_OFFERED:
            return f" Instead: {NOT_OFFERED[name]}."
        name = name.rpartition(".")[0]
    return ""
