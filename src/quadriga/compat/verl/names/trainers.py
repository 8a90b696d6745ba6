"""The table of verl's trainers, workers and their helpers."""

from __future__ import annotations

COMPAT = "quadriga.compat.verl"
_TRAINER = f"{COMPAT}.training.trainer"
_METRICS = f"{COMPAT}.metrics"
_WORKERS = "quadriga.workers"
_SHARDING = f"{COMPAT}.training.sharding_managers"

_ROLES = {
    "Role": "quadriga.trainer.roles.placement:Role",
    "WorkerType": "quadriga.single_controller:Worker",
    "need_critic": f"{COMPAT}.training.settings:need_critic",
    "need_reference_policy": f"{COMPAT}.training.settings:need_reference_policy",
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
    "SFTTrainer": "quadriga.trainer.fine_tuning.sft:SFTTrainer",
}

TRAINER_MODULES: dict[str, dict[str, str]] = {
    "verl.trainer.config": {
        name: f"{COMPAT}.config_classes:{name}" for name in ("AlgoConfig", "KLControlConfig")
    },
    "verl.trainer.constants_ppo": {
        "get_ppo_ray_runtime_env": f"{COMPAT}.training.ray_settings:get_ppo_ray_runtime_env"
    },
    "verl.trainer.main_ppo": {
        "TaskRunner": f"{_TRAINER}:TaskRunner",
        "main": f"{_TRAINER}:run_ppo",
        "run_ppo": f"{_TRAINER}:run_ppo",
    },
    "verl.trainer.main_ppo_v0": {
        "BaseTaskRunner": f"{_TRAINER}:TaskRunner",
        "TaskRunner": f"{_TRAINER}:TaskRunner",
    },
    "verl.trainer.main_eval": {"main": f"{_TRAINER}:run_eval"},
    "verl.trainer.main_generation": _GENERATION,
    "verl.trainer.main_generation_server": {"main": f"{_TRAINER}:run_generation"},
    "verl.trainer.fsdp_sft_trainer": {
        **_SFT,
        "FSDPSFTTrainer": "quadriga.trainer.fine_tuning.sft:SFTTrainer",
    },
    "verl.trainer.sft_trainer": _SFT,
    "verl.trainer.ppo.metric_utils": {
        name: f"{_METRICS}:{name}"
        for name in (
            "compute_data_metrics",
            "compute_throughout_metrics",
            "compute_timing_metrics",
        )
    },
    "verl.trainer.ppo.ray_trainer": {
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
    "verl.workers.config": {
        name: f"{COMPAT}.config_classes:{name}"
        for name in ("ActorConfig", "FSDPActorConfig", "PolicyLossConfig")
    },
    "verl.workers.engine_workers": _POLICY,
    "verl.workers.fsdp_workers": {
        **_POLICY,
        "CriticWorker": f"{_WORKERS}:CriticWorker",
    },
    "verl.workers.sharding_manager": {},
    "verl.workers.sharding_manager.base": {
        "BaseShardingManager": f"{_SHARDING}:BaseShardingManager"
    },
    "verl.workers.sharding_manager.fsdp_vllm": {
        "FSDPVLLMShardingManager": f"{_SHARDING}:FSDPVLLMShardingManager"
    },
    "verl.workers.sharding_manager.fsdp_ulysses": {
        "FSDPUlyssesShardingManager": f"{_SHARDING}:FSDPUlyssesShardingManager"
    },
    "verl.workers.sharding_manager.megatron_vllm": {
        "MegatronVLLMShardingManager": f"{_SHARDING}:MegatronVLLMShardingManager"
    },
    "verl.utils.config": {"validate_config": f"{COMPAT}.training.settings:validate_config"},
    "verl.utils.fs": {"copy_to_local": f"{COMPAT}.files:copy_to_local"},
    "verl.utils.metric": {"reduce_metrics": f"{_METRICS}:reduce_metrics"},
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
