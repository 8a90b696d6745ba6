"""Which name of Quadriga does the job of a name of verl that is not offered."""

from __future__ import annotations

_DATA = "quadriga.data (data.train_files)"
_ENGINES = "quadriga.engines (build_engine)"
_ESTIMATORS = "verl.trainer.ppo.core_algos.register_adv_est, which adds an estimator of yours"
_LOSSES = "quadriga.algorithms.policy_losses.register_policy_loss, which adds a loss of yours"
_MODES = "quadriga.single_controller.register_dispatch_mode and register_execute_mode"
_PACKING = "quadriga.parallel.packing"
_REWARDS = "quadriga.rewards (reward.path names a function of yours)"
_ROLLOUTS = "quadriga.rollout (register an engine of your own in ROLLOUTS)"
_SETTINGS = "quadriga.config.schema; quadriga train --verl FILE translates settings"
_TIMING = "quadriga.observability.metrics"
_TOKENS = "quadriga.parallel.costs.CostModel"
_TRACKERS = "quadriga.observability.trackers"

_CORE = "verl.trainer.ppo.core_algos"
_ALGORITHMS = {
    **{
        f"{_CORE}.compute_{name}_advantage": _ESTIMATORS
        for name in ("optimal_token_baseline", "multi_turn_optimal_token_baseline")
    },
    **{
        f"{_CORE}.compute_policy_loss_{name}": _LOSSES
        for name in ("bypass_mode", "dppo_kl", "dppo_tv", "dro", "reinforce")
    },
}

_SPLIT_TOKENS = "The engine splits tokens itself: set engine.sequence_parallel_size."
_OWN_MEGATRON = "Quadriga has a Megatron engine of its own: set engine.name=megatron."
_NO_QUANTIZATION = "Quadriga does not quantize weights."
_NO_SKIP = "Quadriga generates in every step."
_NOT_USED = "No engine of Quadriga uses it."
_ONE_RESPONSE = "Quadriga generates one response per prompt."
_PYTORCH_DEVICES = "Quadriga runs on the device types of PyTorch: CUDA, NPU and CPU."
_IMAGES = "Quadriga encodes the images of a prompt itself (data.image_key)."

NOT_OFFERED: dict[str, str] = {
    **_ALGORITHMS,
    "verl.base_config": _SETTINGS,
    "verl.checkpoint_engine": "quadriga.weight_sync",
    "verl.experimental": "quadriga.trainer",
    "verl.model_merger": "quadriga.workers.ActorRolloutRefWorker.export_hf, which writes a Hugging "
    "Face folder",
    "verl.models": "quadriga.models, which loads models of transformers",
    "verl.single_controller.base.register_center": "verl.single_controller.ray.RayWorkerGroup "
    "(register_center=True)",
    "verl.single_controller.ray.megatron": "verl.single_controller.ray.RayWorkerGroup",
    "verl.third_party": _ROLLOUTS,
    "verl.trainer.config": _SETTINGS,
    "verl.trainer.main_eval.process_item": "quadriga.rewards.RewardManager.score_texts",
    "verl.trainer.main_ppo.TaskRunnerV1": "verl.trainer.main_ppo.TaskRunner",
    "verl.trainer.main_ppo.create_rl_dataset": _DATA,
    "verl.trainer.main_ppo.create_rl_sampler": _DATA,
    "verl.trainer.ppo.checkpoint_callback": "quadriga.checkpoint",
    "verl.trainer.ppo.metric_utils": "quadriga.observability.metrics",
    "verl.trainer.ppo.padding_utils": "quadriga.protocol.pad_dataproto_to_divisor",
    "verl.trainer.ppo.prefix_grouper_utils": _PACKING,
    "verl.trainer.ppo.ray_trainer.compute_reward": _REWARDS,
    "verl.trainer.ppo.ray_trainer.compute_reward_async": _REWARDS,
    "verl.trainer.ppo.reward": _REWARDS,
    "verl.trainer.ppo.rollout_corr_helper": "quadriga.algorithms.importance",
    "verl.trainer.ppo.utils.create_rl_dataset": _DATA,
    "verl.trainer.ppo.utils.create_rl_sampler": _DATA,
    "verl.trainer.ppo.utils.need_reward_model": "quadriga.config.role_ranks.has_reward_model",
    "verl.trainer.ppo.v1": "verl.trainer.ppo.ray_trainer.RayPPOTrainer",
    "verl.trainer.sft_trainer.create_sft_dataset": _DATA,
    "verl.trainer.sft_trainer_ray": "quadriga.trainer.fine_tuning.sft",
    "verl.utils.activation_offload": _ENGINES,
    "verl.utils.as_torch_index": "quadriga.algorithms.groups.make_groups",
    "verl.utils.attention_utils": _PACKING,
    "verl.utils.chat_template": _DATA,
    "verl.utils.checkpoint": "quadriga.checkpoint",
    "verl.utils.config": _SETTINGS,
    "verl.utils.dataset": _DATA,
    "verl.utils.debug": _TIMING,
    "verl.utils.distributed": "quadriga.parallel.distributed",
    "verl.utils.experimental": "quadriga.models.log_probs.linear_log_prob",
    "verl.utils.flops_counter": _TOKENS,
    "verl.utils.fs": "verl.utils.fs.copy_to_local, or pathlib and shutil",
    "verl.utils.fsdp_utils": _ENGINES,
    "verl.utils.group_mean_std": "quadriga.algorithms.groups.make_groups",
    "verl.utils.groupwise": "quadriga.algorithms.groups.make_groups",
    "verl.utils.hdfs_io": "pathlib and shutil, because files are on this machine",
    "verl.utils.import_utils": "quadriga.algorithms.user_files (algorithm.user_files)",
    "verl.utils.kernel": "quadriga.models.log_probs.log_prob",
    "verl.utils.logger": _TRACKERS,
    "verl.utils.logging_utils": "quadriga.observability.quiet",
    "verl.utils.megatron_utils": _ENGINES,
    "verl.utils.memory_utils": "quadriga.trainer.memory; quadriga plan shows the memory of a rank",
    "verl.utils.metric": "quadriga.observability.metrics.MetricSet",
    "verl.utils.model": "quadriga.models, which loads models of transformers",
    "verl.utils.net_utils": "verl.single_controller.ray.base.get_master_addr_port",
    "verl.utils.omega_conf_to_dataclass": _SETTINGS,
    "verl.utils.nvtx_profile": _TIMING,
    "verl.utils.profiler": _TIMING,
    "verl.utils.py_functional.convert_nested_value_to_list_recursive": "verl.utils.py_functional."
    "convert_to_regular_types",
    "verl.utils.py_functional.DynamicEnum": _MODES,
    "verl.utils.py_functional.DynamicEnumMeta": _MODES,
    "verl.utils.py_functional.NestedNamespace": "types.SimpleNamespace",
    "verl.utils.py_functional.timeout_limit": "quadriga.rewards (reward.timeout_s is the deadline "
    "of one sample)",
    "verl.utils.rendezvous": "quadriga.parallel.distributed",
    "verl.utils.reward_score": _REWARDS,
    "verl.utils.rollout_trace": "quadriga.observability.jsonl",
    "verl.utils.sglang": _ROLLOUTS,
    "verl.utils.tokenizer": "verl.utils.hf_tokenizer",
    "verl.utils.torch_dtypes": "quadriga.parallel.device.compute_dtype",
    "verl.utils.torch_functional": "quadriga.engines and quadriga.models, which compute "
    "log-probabilities and gradients",
    "verl.utils.torch_functional.get_unpad_data": _PACKING,
    "verl.utils.tracking": _TRACKERS,
    "verl.utils.transferqueue_utils": "quadriga.protocol; batches are by reference without a queue",
    "verl.utils.transformers_compat": "quadriga.models, which loads models of transformers",
    "verl.utils.trtllm": _ROLLOUTS,
    "verl.utils.vllm": _ROLLOUTS,
    "verl.utils.vllm_utils": _ROLLOUTS,
    "verl.version": "verl.__version__",
    "verl.workers.actor": "quadriga.workers.ActorRolloutRefWorker",
    "verl.workers.config": _SETTINGS,
    "verl.workers.critic": "quadriga.workers.CriticWorker",
    "verl.workers.engine": _ENGINES,
    "verl.workers.engine_workers_tinker": "quadriga.workers.ActorRolloutRefWorker",
    "verl.workers.engine_workers.TrainingWorker": "quadriga.workers.CriticWorker or SFTWorker",
    "verl.workers.fsdp_workers.AsyncActorRolloutRefWorker": "quadriga.workers."
    "ActorRolloutRefWorker",
    "verl.workers.fsdp_workers.RewardModelWorker": "quadriga.workers.RewardModelWorker, which "
    "reward_model.enable=true starts; its settings are those of quadriga's section reward_model",
    "verl.workers.megatron_workers": "verl.workers.fsdp_workers, whose engine is chosen by "
    "engine.name",
    "verl.workers.reward_manager": _REWARDS,
    "verl.workers.rollout": _ROLLOUTS,
    "verl.workers.sharding_manager": "quadriga.weight_sync",
    "verl.workers.utils": "quadriga.workers.objectives",
    "verl.workers.utils.padding": _PACKING,
}
"""Module, or module and name → what to use. A module stands for the modules below it too."""

NO_COUNTERPART: dict[str, str] = {
    "verl.interactions": _ONE_RESPONSE,
    "verl.plugin": _PYTORCH_DEVICES,
    "verl.single_controller.ray.base.FusedWorkerCLSName": "Method names are not built from "
    "strings.",
    "verl.tools": _ONE_RESPONSE,
    "verl.trainer.distillation": "Quadriga has no distillation loss.",
    "verl.trainer.main_generation_server": "Quadriga has no server; main generates from a file.",
    f"{_CORE}.compute_pf_ppo_reweight_data": "Quadriga does not select samples by their reward "
    "before the update (PF-PPO).",
    "verl.trainer.ppo.ray_trainer.compute_spec_decode_metrics": "No engine decodes speculatively.",
    "verl.trainer.ppo.utils.need_teacher_policy": "Quadriga has no distillation loss.",
    **dict.fromkeys(
        (
            "verl.utils.build_multimodal_processor_inputs",
            "verl.utils.get_processor_token_id",
            "verl.utils.normalize_token_ids",
            "verl.utils.tensordict_utils.maybe_fix_3d_position_ids",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(
        (
            "verl.utils.device.AscendHardwareVersion",
            "verl.utils.device.check_ipc_version_support",
            "verl.utils.device.get_npu_versions",
        ),
        _NOT_USED,
    ),
    "verl.utils.dynamic_cp_scheduler": _SPLIT_TOKENS,
    **dict.fromkeys(
        ("verl.utils.fp8_utils", "verl.utils.modelopt", "verl.utils.qat"), _NO_QUANTIZATION
    ),
    "verl.utils.megatron": _OWN_MEGATRON,
    "verl.utils.megatron_peft_utils": "The Megatron engine of Quadriga has no adapters; the FSDP "
    "engine has.",
    "verl.utils.veomni": "Quadriga trains with FSDP2 and with Megatron-core.",
    **dict.fromkeys(("verl.utils.npu_flash_attn_utils", "verl.utils.npu_utils"), _PYTORCH_DEVICES),
    "verl.utils.rollout_skip": _NO_SKIP,
    "verl.utils.skip": _NO_SKIP,
    "verl.utils.ulysses": _SPLIT_TOKENS,
}
"""Module, or module and name → why there is no name to use."""


def advice(name: str) -> str:
    """Return which name of Quadriga does the job of a name of verl, or why none does; "" if it is
    not known."""
    while name:
        if name in NOT_OFFERED:
            return f" Use {NOT_OFFERED[name]}."
        if name in NO_COUNTERPART:
            return f" {NO_COUNTERPART[name]}"
        name = name.rpartition(".")[0]
    return ""
