"""The public names that verl 0.9.1 defines in the modules that Quadriga replaces, and our choice.

The list was read from verl's source. It leaves out constants such as loggers and folders.
"""

from __future__ import annotations

from quadriga.compat.verl.names import MODULES

PUBLIC = {
    "verl": ("DataProto"),
    "verl.protocol": (
        "BatchData DataProto DataProtoConfig DataProtoFuture DataProtoItem "
        "all_gather_data_proto collate_fn deserialize_single_tensor deserialize_tensordict "
        "fold_batch_dim pad_dataproto_to_divisor serialize_single_tensor serialize_tensordict "
        "unfold_batch_dim union_numpy_dict union_tensor_dict unpad_dataproto"
    ),
    "verl.single_controller.base.decorator": (
        "DISPATCH_MODE_FN_REGISTRY Dispatch Execute MAGIC_ATTR collect_all_to_all "
        "collect_dp_compute collect_dp_compute_data_proto collect_lazy_compute_data_proto "
        "collect_nd_compute collect_nd_compute_dataproto dispatch_all_to_all "
        "dispatch_dp_compute dispatch_dp_compute_data_proto "
        "dispatch_dp_compute_data_proto_with_func dispatch_lazy_compute_data_proto "
        "dispatch_nd_compute dispatch_nd_compute_dataproto dispatch_one_to_all "
        "dummy_direct_rollout_call get_predefined_dispatch_fn get_predefined_execute_fn "
        "init_predefined_dispatch_mode init_predefined_execute_mode "
        "make_nd_compute_dataproto_dispatch_fn register register_dispatch_mode "
        "update_dispatch_mode"
    ),
    "verl.single_controller.base.worker": ("DistGlobalInfo DistRankInfo Worker WorkerHelper"),
    "verl.single_controller.base.worker_group": (
        "ClassWithInitArgs ResourcePool WorkerGroup check_workers_alive"
    ),
    "verl.single_controller.ray.base": (
        "FusedWorkerCLSName RayClassWithInitArgs RayResourcePool RayWorkerGroup "
        "ResourcePoolManager SubRayResourcePool create_colocated_worker_cls "
        "create_colocated_worker_cls_fused create_colocated_worker_raw_cls "
        "extract_pg_from_exist func_generator get_master_addr_port get_random_string "
        "merge_resource_pool sort_placement_group_by_node_ip split_resource_pool"
    ),
    "verl.utils.ray_utils": ("auto_await get_event_loop parallel_put ray_noset_visible_devices"),
    "verl.utils.device": (
        "AscendHardwareVersion auto_set_device check_ipc_version_support "
        "get_device_capability get_device_id get_device_name get_nccl_backend "
        "get_npu_versions get_resource_name get_torch_device get_vendor "
        "get_visible_devices_keyword is_cuda_available is_device_available is_npu_available "
        "is_support_ipc is_torch_npu_available manual_seed manual_seed_all "
        "set_expandable_segments"
    ),
    "verl.utils.py_functional": (
        "DynamicEnum DynamicEnumMeta NestedNamespace append_to_dict "
        "convert_nested_value_to_list_recursive convert_to_regular_types "
        "list_of_dict_to_dict_of_list rename_dict temp_env_var timeout_limit union_two_dict"
    ),
    "verl.utils.seqlen_balancing": (
        "calculate_workload ceildiv get_group_balanced_partitions get_reverse_idx "
        "get_seqlen_balanced_partitions greedy_partition karmarkar_karp log_seqlen_unbalance "
        "prepare_dynamic_batch rearrange_micro_batches restore_dynamic_batch "
        "roundup_divisible"
    ),
    "verl.utils.tensordict_utils": (
        "assert_tensordict_eq assign_non_tensor assign_non_tensor_data "
        "assign_non_tensor_stack chunk_tensordict concat_nested_tensors concat_tensordict "
        "concat_tensordict_with_none_bsz contiguous get get_keys get_non_tensor_data "
        "get_tensordict index_select_tensor_dict list_of_dict_to_tensordict make_iterator "
        "maybe_fix_3d_position_ids nested_tensor_from_tensor_list pad_to_divisor pop pop_keys "
        "union_tensor_dict unpad unwrap_non_tensor_data"
    ),
    "verl.trainer.ppo.core_algos": (
        "ADV_ESTIMATOR_REGISTRY AdaptiveKLController AdvantageEstimator FixedKLController "
        "POLICY_LOSS_REGISTRY PolicyLossFn agg_loss compute_entropy_loss "
        "compute_gae_advantage_return compute_gdpo_outcome_advantage "
        "compute_gpg_outcome_advantage compute_grpo_outcome_advantage "
        "compute_grpo_passk_outcome_advantage compute_grpo_vectorized_outcome_advantage "
        "compute_multi_turn_optimal_token_baseline_advantage compute_opo_outcome_advantage "
        "compute_optimal_token_baseline_advantage compute_pf_ppo_reweight_data "
        "compute_policy_loss compute_policy_loss_bypass_mode compute_policy_loss_cispo "
        "compute_policy_loss_clip_cov compute_policy_loss_dppo_kl compute_policy_loss_dppo_tv "
        "compute_policy_loss_dro compute_policy_loss_geo_mean compute_policy_loss_gpg "
        "compute_policy_loss_gspo compute_policy_loss_kl_cov compute_policy_loss_reinforce "
        "compute_policy_loss_sapo compute_policy_loss_vanilla "
        "compute_reinforce_plus_plus_baseline_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage "
        "compute_rewards compute_rloo_outcome_advantage "
        "compute_rloo_vectorized_outcome_advantage compute_value_loss get_adv_estimator_fn "
        "get_kl_controller get_policy_loss_fn kl_penalty kl_penalty_forward register_adv_est "
        "register_policy_loss"
    ),
    "verl.trainer.main_ppo": ("TaskRunnerV1 main run_ppo"),
    "verl.trainer.main_ppo_v0": ("BaseTaskRunner TaskRunner"),
    "verl.trainer.main_eval": ("main process_item"),
    "verl.trainer.main_generation_server": (
        "generate generate_per_replica main start_server submit_request"
    ),
    "verl.trainer.sft_trainer": ("SFTTrainer create_sft_dataset main run_sft"),
    "verl.trainer.ppo.ray_trainer": (
        "RayPPOTrainer apply_kl_penalty compute_advantage compute_response_mask "
        "compute_spec_decode_metrics"
    ),
    "verl.trainer.ppo.metric_utils": (
        "RolloutMoELoadBalanceMetricsAccumulator bootstrap_metric calc_maj_val "
        "compute_data_metrics compute_moe_lb_metrics compute_rollout_moe_load_balance_metrics "
        "compute_throughout_metrics compute_timing_metrics compute_variance_proxy_metrics "
        "get_metric_data_with_optional_routed_experts infer_moe_num_experts "
        "infer_rollout_moe_num_experts process_validation_metrics reduce_metrics"
    ),
    "verl.trainer.constants_ppo": ("get_ppo_ray_runtime_env"),
    "verl.trainer.config": (
        "AlgoConfig BaseModelConfig CheckpointConfig FilterGroupsConfig HybridRolloutSwitchConfig "
        "KLControlConfig ProfileConfig RolloutCorrectionConfig"
    ),
    "verl.workers.config": (
        "ActorConfig AgentLoopConfig AutomodelEngineConfig AutomodelOptimizerConfig "
        "CheckpointEngineConfig CriticConfig CustomAsyncServerConfig DisaggregationConfig "
        "DistillationConfig DistillationLossConfig DistillationTeacherModelConfig EngineConfig "
        "EngineRouterReplayConfig FSDPActorConfig FSDPCriticConfig FSDPCriticModelCfg "
        "FSDPEngineConfig FSDPOptimizerConfig HFModelConfig McoreActorConfig McoreCheckpointConfig "
        "McoreCriticConfig McoreEngineConfig McoreOptimizerConfig MtpConfig MultiTurnConfig "
        "OptimizerConfig PolicyLossConfig PrometheusConfig QATConfig QATEngineConfig RewardConfig "
        "RewardModelConfig RolloutConfig RouterReplayConfig SamplingConfig SandboxFusionConfig "
        "ServerConfig TorchTitanActorConfig TorchTitanCriticConfig TorchtitanEngineConfig "
        "TorchtitanOptimizerConfig TraceConfig TrainingWorkerConfig VeOmniActorConfig "
        "VeOmniCriticConfig VeOmniEngineConfig VeOmniOptimizerConfig"
    ),
    "verl.utils.metric": ("AggregationType Metric reduce_metrics"),
    "verl.trainer.ppo.utils": (
        "Role create_rl_dataset create_rl_sampler need_critic need_reference_policy "
        "need_reward_model need_teacher_policy"
    ),
    "verl.workers.engine_workers": ("ActorRolloutRefWorker TrainingWorker"),
    "verl.utils": (
        "as_torch_index build_multimodal_processor_inputs get_processor_token_id group_mean_std "
        "hf_processor hf_tokenizer normalize_token_ids omega_conf_to_dataclass validate_config"
    ),
    "verl.utils.config": ("omega_conf_to_dataclass update_dict_with_config validate_config"),
    "verl.utils.fs": (
        "copy_local_path_from_hdfs copy_to_local copy_to_shm get_local_temp_path is_non_local "
        "local_mkdir_safe md5_encode verify_copy"
    ),
    "verl.utils.model": (
        "CausalLMOutputForPPO LambdaLayer check_exclude_modules check_target_modules "
        "compute_position_id_with_mask convert_weight_keys create_huggingface_actor "
        "create_huggingface_critic create_random_mask extract_multi_modal_inputs "
        "get_generation_config get_hf_auto_model_class get_hf_model_path "
        "get_huggingface_actor_config get_lora_rank_from_adapter get_model_size "
        "get_parallel_gptmodel_from_config get_parallel_model_from_config load_mcore_dist_weights "
        "load_megatron_gptmodel_weights load_megatron_model_weights load_valuehead_model "
        "normalize_model_name normalize_pp_vpp_params pad_packed_inputs patch_valuehead_model "
        "print_model_size squeeze update_model_config"
    ),
    "verl.utils.torch_functional": (
        "allgather_dict_into_dict allgather_dict_tensors broadcast_dict_tensor "
        "calculate_sum_pi_squared_from_logits check_device_is_available clip_by_value "
        "compute_grad_norm distributed_masked_mean distributed_mean_max_min_std "
        "entropy_from_logits entropy_from_logits_with_chunking expand_as_nested gather_from_labels "
        "get_constant_schedule_with_warmup get_cosine_schedule_with_warmup get_response_mask "
        "get_unpad_data get_wsd_schedule_with_warmup log_probs_from_logits_all_rmpad "
        "log_probs_from_logits_response log_probs_from_logits_response_rmpad logprobs_from_logits "
        "logprobs_from_logits_flash_attn logprobs_from_logits_naive "
        "logprobs_from_logits_torch_npu logprobs_from_logits_v2 masked_mean masked_sum masked_var "
        "masked_whiten pad_2d_list_to_length pad_sequence_to_length post_process_logits "
        "postprocess_data prepare_decoder_attention_mask remove_pad_token "
        "split_dict_tensor_into_batches tokenize_and_postprocess_data use_original_torch_compile"
    ),
}

# Public names of these modules of verl 0.9.1 that Quadriga leaves out. docs/concepts/migration.md
# gives the reasons.
LEFT_OUT = {
    "verl.utils.device": "AscendHardwareVersion get_npu_versions check_ipc_version_support",
    "verl.utils.py_functional": "timeout_limit NestedNamespace DynamicEnumMeta DynamicEnum "
    "convert_nested_value_to_list_recursive",
    "verl.utils.tensordict_utils": "maybe_fix_3d_position_ids",
    "verl.single_controller.ray.base": "FusedWorkerCLSName",
    "verl.trainer.main_ppo": "TaskRunnerV1",
    "verl.trainer.main_eval": "process_item",
    "verl.trainer.main_generation_server": "generate generate_per_replica start_server "
    "submit_request",
    "verl.trainer.sft_trainer": "create_sft_dataset",
    "verl.trainer.ppo.ray_trainer": "compute_spec_decode_metrics",
    "verl.trainer.ppo.metric_utils": "RolloutMoELoadBalanceMetricsAccumulator bootstrap_metric "
    "calc_maj_val compute_moe_lb_metrics compute_rollout_moe_load_balance_metrics "
    "compute_variance_proxy_metrics get_metric_data_with_optional_routed_experts "
    "infer_moe_num_experts infer_rollout_moe_num_experts process_validation_metrics",
    "verl.utils.metric": "AggregationType Metric",
    "verl.trainer.ppo.utils": "create_rl_dataset create_rl_sampler need_reward_model "
    "need_teacher_policy",
    "verl.workers.engine_workers": "TrainingWorker",
    "verl.utils": "as_torch_index build_multimodal_processor_inputs get_processor_token_id "
    "group_mean_std normalize_token_ids omega_conf_to_dataclass",
    "verl.utils.config": "omega_conf_to_dataclass update_dict_with_config",
    "verl.utils.fs": "copy_local_path_from_hdfs copy_to_shm get_local_temp_path is_non_local "
    "local_mkdir_safe md5_encode verify_copy",
    # Of these, Quadriga has the few names that worker code imports.
    **{
        module: " ".join(sorted(set(PUBLIC[module].split()) - set(MODULES[module])))
        for module in (
            "verl.trainer.config",
            "verl.utils.model",
            "verl.utils.torch_functional",
            "verl.workers.config",
        )
    },
    "verl.trainer.ppo.core_algos": "compute_optimal_token_baseline_advantage "
    "compute_multi_turn_optimal_token_baseline_advantage compute_pf_ppo_reweight_data "
    "compute_policy_loss_dppo_tv compute_policy_loss_dppo_kl compute_policy_loss_dro "
    "compute_policy_loss_reinforce compute_policy_loss_bypass_mode",
}

# The names of AdvantageEstimator in verl 0.9.1.
ESTIMATORS = (
    "GAE GRPO REINFORCE_PLUS_PLUS REINFORCE_PLUS_PLUS_BASELINE REMAX RLOO OPO GRPO_PASSK GPG "
    "RLOO_VECTORIZED GRPO_VECTORIZED OPTIMAL_TOKEN_BASELINE TIR_OPTIMAL_TOKEN_BASELINE GDPO"
)

# For each module, the names that it imports from other modules of verl: module → home → names.
AGAIN = {
    "verl.trainer.main_ppo": {
        "verl.trainer.ppo.utils": "need_critic need_reference_policy",
        "verl.utils.config": "validate_config",
        "verl.utils.device": "auto_set_device is_cuda_available",
    },
    "verl.trainer.main_ppo_v0": {
        "verl.trainer.ppo.ray_trainer": "RayPPOTrainer",
        "verl.trainer.ppo.utils": "need_critic need_reference_policy",
    },
    "verl.trainer.sft_trainer": {"verl.utils.device": "auto_set_device get_device_name"},
    "verl.trainer.ppo.metric_utils": {
        "verl": "DataProto",
        "verl.utils.metric": "reduce_metrics",
        "verl.utils.fs": "copy_to_local",
    },
    "verl.trainer.ppo.ray_trainer": {
        "verl": "DataProto",
        "verl.protocol": "pad_dataproto_to_divisor unpad_dataproto",
        "verl.trainer.ppo": "core_algos",
        "verl.trainer.ppo.core_algos": "AdvantageEstimator agg_loss",
        "verl.trainer.ppo.metric_utils": "compute_data_metrics compute_throughout_metrics "
        "compute_timing_metrics",
        "verl.trainer.ppo.utils": "Role WorkerType need_critic need_reference_policy",
        "verl.utils.metric": "reduce_metrics",
        "verl.utils.py_functional": "rename_dict",
        "verl.utils.seqlen_balancing": "calculate_workload get_seqlen_balanced_partitions "
        "log_seqlen_unbalance",
        "verl.utils.torch_functional": "masked_mean",
    },
    "verl.trainer.ppo.utils": {
        "verl.single_controller.base": "Worker",
        "verl.trainer.ppo.core_algos": "AdvantageEstimator",
    },
    "verl.workers.engine_workers": {
        "verl.single_controller.base": "Worker",
        "verl.single_controller.base.decorator": "Dispatch register "
        "make_nd_compute_dataproto_dispatch_fn",
        "verl.utils.device": "get_device_name get_torch_device set_expandable_segments",
        "verl.utils.py_functional": "append_to_dict",
    },
    "verl.utils.torch_functional": {"verl.utils.device": "get_device_name get_torch_device"},
}
