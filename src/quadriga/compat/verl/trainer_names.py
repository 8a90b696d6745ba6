"""The table of verl's trainers, workers and their helpers, and of the names that are not offered.

`NOT_OFFERED` says which of Quadriga's names does the job of a module of verl or of a name in it.
"""

from __future__ import annotations

COMPAT = "quadriga.compat.verl"
_TRAINER = f"{COMPAT}.trainer"
_WORKERS = "quadriga.workers"

_ROLES = {
    "Role": "quadriga.trainer.placement:Role",
    "WorkerType": "quadriga.single_controller:Worker",
    "need_critic": f"{_TRAINER}:need_critic",
    "need_reference_policy": f"{_TRAINER}:need_reference_policy",
}
_POLICY = {"ActorRolloutRefWorker": f"{_WORKERS}:ActorRolloutRefWorker"}
_GENERATION = {
    "main": f"{_TRAINER}:run_generation",
    "main_task": f"{_TRAINER}:run_generation",
    "run_generation": f"{_TRAINER}:run_generation",
}
_SFT = {
    "main": f"{_TRAINER}:run_sft",
    "run_sft": f"{_TRAINER}:run_sft",
    "SFTTrainer": "quadriga.trainer.sft:SFTTrainer",
}

TRAINER_MODULES: dict[str, dict[str, str]] = {
    "verl.trainer.main_ppo": {
        "TaskRunner": f"{_TRAINER}:TaskRunner",
        "main": f"{_TRAINER}:run_ppo",
        "run_ppo": f"{_TRAINER}:run_ppo",
    },
    "verl.trainer.main_ppo_v0": {
        "BaseTaskRunner": f"{_TRAINER}:TaskRunner",
        "TaskRunner": f"{_TRAINER}:TaskRunner",
    },
    "verl.trainer.main_generation": _GENERATION,
    "verl.trainer.main_generation_server": {"main": f"{_TRAINER}:run_generation"},
    "verl.trainer.fsdp_sft_trainer": {
        **_SFT,
        "FSDPSFTTrainer": "quadriga.trainer.sft:SFTTrainer",
    },
    "verl.trainer.sft_trainer": _SFT,
    "verl.trainer.ppo.ray_trainer": {
        **_ROLES,
        "RayPPOTrainer": f"{_TRAINER}:RayPPOTrainer",
        "RayClassWithInitArgs": "quadriga.backends.ray:RayClassWithInitArgs",
        "RayWorkerGroup": f"{COMPAT}.controller.groups:RayWorkerGroup",
        "ResourcePoolManager": f"{COMPAT}.controller.pools:ResourcePoolManager",
        "apply_kl_penalty": f"{COMPAT}.algorithms.stages:apply_kl_penalty",
        "compute_advantage": f"{COMPAT}.algorithms.stages:compute_advantage",
        "compute_response_mask": f"{COMPAT}.algorithms.stages:compute_response_mask",
        "create_colocated_worker_cls": "quadriga.backends.ray:create_colocated_worker_cls",
    },
    "verl.trainer.ppo.utils": _ROLES,
    "verl.workers": {},
    "verl.workers.engine_workers": _POLICY,
    "verl.workers.fsdp_workers": {
        **_POLICY,
        "CriticWorker": f"{_WORKERS}:CriticWorker",
    },
    "verl.utils.fs": {"copy_to_local": f"{COMPAT}.files:copy_to_local"},
    "verl.utils.model": {
        name: f"{COMPAT}.tensors.model:{name}"
        for name in (
            "compute_position_id_with_mask",
            "create_random_mask",
            "get_model_size",
            "print_model_size",
        )
    },
    "verl.utils.torch_functional": {
        name: f"{COMPAT}.tensors.torch_functional:{name}"
        for name in (
            "clip_by_value",
            "entropy_from_logits",
            "get_response_mask",
            "logprobs_from_logits",
            "masked_mean",
            "masked_sum",
            "masked_var",
            "masked_whiten",
            "pad_2d_list_to_length",
            "pad_sequence_to_length",
        )
    },
}

_ENGINES = "quadriga.engines (build_engine)"
_ROLLOUTS = "quadriga.rollout (register an engine of your own in ROLLOUTS)"
_SETTINGS = "quadriga.config.schema; quadriga train --verl FILE translates settings"
_REWARDS = "quadriga.rewards (reward.path names a function of yours)"
_DATA = "quadriga.data (data.train_files)"

NOT_OFFERED: dict[str, str] = {
    "verl.checkpoint_engine": "quadriga.weight_sync",
    "verl.models": "quadriga.models, which loads models of transformers",
    "verl.model_merger": "ActorRolloutRefWorker.export_hf, which writes a Hugging Face folder",
    "verl.experimental": "quadriga.trainer",
    "verl.tools": "no module; Quadriga generates one response per prompt",
    "verl.trainer.config": _SETTINGS,
    "verl.trainer.distillation": "no module; Quadriga has no distillation loss",
    "verl.trainer.main_eval": "quadriga.rewards.RewardManager",
    "verl.trainer.main_ppo.TaskRunnerV1": "verl.trainer.main_ppo.TaskRunner",
    "verl.trainer.ppo.metric_utils": "quadriga.observability.metrics",
    "verl.trainer.ppo.reward": _REWARDS,
    "verl.trainer.ppo.rollout_corr_helper": "quadriga.algorithms.importance",
    "verl.trainer.ppo.v1": "verl.trainer.ppo.ray_trainer.RayPPOTrainer",
    "verl.utils.checkpoint": "quadriga.checkpoint",
    "verl.utils.config": _SETTINGS,
    "verl.utils.dataset": _DATA,
    "verl.utils.debug": "quadriga.observability.timing",
    "verl.utils.fsdp_utils": _ENGINES,
    "verl.utils.megatron_utils": _ENGINES,
    "verl.utils.profiler": "quadriga.observability.timing",
    "verl.utils.reward_score": _REWARDS,
    "verl.utils.tokenizer": "verl.utils.hf_tokenizer",
    "verl.utils.tracking": "quadriga.observability.trackers",
    "verl.utils.ulysses": "no module; sequences are split over data-parallel ranks only",
    "verl.workers.actor": "quadriga.workers.ActorRolloutRefWorker",
    "verl.workers.config": _SETTINGS,
    "verl.workers.critic": "quadriga.workers.CriticWorker",
    "verl.workers.engine": _ENGINES,
    "verl.workers.engine_workers.TrainingWorker": "quadriga.workers.CriticWorker or SFTWorker",
    "verl.workers.fsdp_workers.AsyncActorRolloutRefWorker": "ActorRolloutRefWorker",
    "verl.workers.fsdp_workers.RewardModelWorker": _REWARDS,
    "verl.workers.megatron_workers": "verl.workers.fsdp_workers; Quadriga trains with FSDP2",
    "verl.workers.reward_manager": _REWARDS,
    "verl.workers.rollout": _ROLLOUTS,
    "verl.workers.sharding_manager": "quadriga.weight_sync",
}
"""Module, or module and name → what to use. A module stands for the modules below it too."""


def advice(name: str) -> str:
    """Return which name of Quadriga does the job of a name of verl, "" if none is known."""
    while name:
        if name in NOT_OFFERED:
            return f" Use {NOT_OFFERED[name]}."
        name = name.rpartition(".")[0]
    return ""
