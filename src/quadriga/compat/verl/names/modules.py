"""The table of verl's names: for each of its modules, name → "module:attribute" of Quadriga."""

from __future__ import annotations

from quadriga.compat.verl.names.imported import imported_by
from quadriga.compat.verl.names.trainers import TRAINER_MODULES

PROTOCOL = "quadriga.protocol"
CONTROLLER = "quadriga.single_controller"
RAY = "quadriga.backends.ray"
COMPAT = "quadriga.compat.verl"

_PROTOCOL_NAMES = (
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
)
_DECORATOR_OWN = (
    "Dispatch",
    "Execute",
    "register_dispatch_mode",
    "update_dispatch_mode",
)
_DECORATOR_SHIMS = (
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "_check_dispatch_mode",
    "_check_execute_mode",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_megatron_compute",
    "collect_megatron_compute_data_proto",
    "collect_megatron_pp_as_dp",
    "collect_megatron_pp_as_dp_data_proto",
    "collect_megatron_pp_only",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_megatron_compute",
    "dispatch_megatron_compute_data_proto",
    "dispatch_megatron_pp_as_dp",
    "dispatch_megatron_pp_as_dp_data_proto",
    "dispatch_megatron_pp_only",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "dummy_direct_rollout_call",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "init_predefined_dispatch_mode",
    "init_predefined_execute_mode",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
)
_RAY_OWN = (
    "RayClassWithInitArgs",
    "RayResourcePool",
    "SubRayResourcePool",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "merge_resource_pool",
    "split_resource_pool",
)
_DEVICE = (
    "auto_set_device",
    "get_device_capability",
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_resource_name",
    "get_torch_device",
    "get_vendor",
    "get_visible_devices_keyword",
    "is_cuda_available",
    "is_device_available",
    "is_npu_available",
    "is_support_ipc",
    "is_torch_npu_available",
    "manual_seed",
    "manual_seed_all",
    "set_expandable_segments",
)
_FUNCTIONAL = (
    "append_to_dict",
    "convert_to_regular_types",
    "list_of_dict_to_dict_of_list",
    "rename_dict",
    "temp_env_var",
    "union_two_dict",
)
_BALANCING = (
    "calculate_workload",
    "ceildiv",
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
)
_TENSORDICT = (
    "assert_tensordict_eq",
    "assign_non_tensor",
    "assign_non_tensor_data",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_nested_tensors",
    "concat_tensordict",
    "concat_tensordict_with_none_bsz",
    "contiguous",
    "get",
    "get_keys",
    "get_non_tensor_data",
    "get_tensordict",
    "index_select_tensor_dict",
    "list_of_dict_to_tensordict",
    "make_iterator",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "pop_keys",
    "union_tensor_dict",
    "unpad",
    "unwrap_non_tensor_data",
)
_CORE = (
    "ADV_ESTIMATOR_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "kl_penalty",
    "kl_penalty_forward",
    "register_adv_est",
)
_OUTCOME_ADVANTAGES = (
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
)
_LOSSES = (
    "POLICY_LOSS_REGISTRY",
    "PolicyLossFn",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "register_policy_loss",
)


def _all_in(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_BASE = {
    **_all_in(CONTROLLER, "ClassWithInitArgs", "ResourcePool"),
    **_all_in(f"{COMPAT}.controller.binding", "WorkerGroup"),
    **_all_in(f"{COMPAT}.controller.worker", "Worker"),
}
_FUTURE = _all_in(f"{COMPAT}.controller.futures", "DataProtoFuture")
_POOLS = {
    **_all_in(f"{COMPAT}.controller.groups", "RayWorkerGroup"),
    **_all_in(f"{COMPAT}.controller.pools", "ResourcePoolManager"),
}

_PLACES = ("DistGlobalInfo", "DistRankInfo")

# Names that a module of verl imports from another one and that users import from there.
_DEVICE_AGAIN = ("get_resource_name", "get_torch_device", "get_visible_devices_keyword")
_DECORATOR_AGAIN = {
    **_all_in(CONTROLLER, "Dispatch"),
    **_all_in(
        f"{COMPAT}.controller.decorator",
        "MAGIC_ATTR",
        "get_predefined_dispatch_fn",
        "get_predefined_execute_fn",
    ),
}

_DEFINED: dict[str, dict[str, str]] = {
    "verl": {
        **_all_in(PROTOCOL, "DataProto"),
        **_all_in(f"{COMPAT}.device", "is_npu_available"),
    },
    "verl.protocol": {
        **_all_in(PROTOCOL, *_PROTOCOL_NAMES),
        **_FUTURE,
        **_all_in(
            f"{COMPAT}.tensors.serialization",
            "BatchData",
            "deserialize_single_tensor",
            "deserialize_tensordict",
            "serialize_single_tensor",
            "serialize_tensordict",
        ),
        **_all_in(
            f"{COMPAT}.functional",
            "all_gather_data_proto",
            "list_of_dict_to_dict_of_list",
            "union_two_dict",
        ),
        **_all_in(f"{COMPAT}.device", "get_device_id", "get_torch_device"),
        "_padding_size_key": f"{COMPAT}.controller.padding:PADDING",
    },
    "verl.single_controller": _BASE,
    "verl.single_controller.base": _BASE,
    "verl.single_controller.base.decorator": {
        **_FUTURE,
        **_all_in(CONTROLLER, *_DECORATOR_OWN),
        **_all_in(f"{COMPAT}.controller.decorator", *_DECORATOR_SHIMS),
    },
    "verl.single_controller.base.worker": {
        **_all_in(CONTROLLER, "Dispatch", "Execute", "register"),
        **_all_in(f"{COMPAT}.device", *_DEVICE_AGAIN),
        **_all_in(f"{COMPAT}.controller.ports", "WorkerHelper"),
        **_all_in(
            f"{COMPAT}.controller.worker", "DistGlobalInfo", "DistRankInfo", "Worker", "WorkerMeta"
        ),
    },
    "verl.single_controller.base.megatron": {},
    "verl.single_controller.base.megatron.worker": {
        **_all_in(
            f"{COMPAT}.controller.worker",
            "DistGlobalInfo",
            "DistRankInfo",
            "MegatronWorker",
            "Worker",
        ),
    },
    "verl.single_controller.base.worker_group": {
        **_DECORATOR_AGAIN,
        **_all_in(CONTROLLER, "ClassWithInitArgs", "ResourcePool"),
        **_all_in(f"{COMPAT}.controller.binding", "WorkerGroup"),
        **_all_in(f"{COMPAT}.controller.groups", "check_workers_alive"),
    },
    "verl.single_controller.ray": {
        **_all_in(RAY, *_RAY_OWN),
        **_POOLS,
    },
    "verl.single_controller.ray.base": {
        **_DECORATOR_AGAIN,
        **_all_in(PROTOCOL, "DataProto"),
        **_BASE,
        **_all_in(f"{COMPAT}.device", "get_device_name"),
        **_all_in(f"{COMPAT}.functional", "temp_env_var"),
        **_all_in(RAY, *_RAY_OWN),
        **_POOLS,
        **_all_in(f"{COMPAT}.controller.binding", "func_generator"),
        **_all_in(
            f"{COMPAT}.controller.pools", "extract_pg_from_exist", "sort_placement_group_by_node_ip"
        ),
        **_all_in(f"{COMPAT}.controller.ports", "get_master_addr_port", "get_random_string"),
    },
    "verl.utils": _all_in(f"{COMPAT}.files", "hf_processor", "hf_tokenizer"),
    "verl.utils.ray_utils": {
        **_all_in(CONTROLLER, "ray_noset_visible_devices"),
        **_all_in(f"{COMPAT}.functional", "auto_await", "get_event_loop", "parallel_put"),
    },
    "verl.utils.device": _all_in(f"{COMPAT}.device", *_DEVICE),
    "verl.utils.py_functional": _all_in(f"{COMPAT}.functional", *_FUNCTIONAL),
    "verl.utils.seqlen_balancing": {
        **_all_in(PROTOCOL, "DataProto"),
        **_all_in(f"{COMPAT}.device", "get_device_name"),
        **_all_in(f"{COMPAT}.tensors.balancing", *_BALANCING),
    },
    "verl.utils.tensordict_utils": _all_in(f"{COMPAT}.tensors.tensordicts", *_TENSORDICT),
    "verl.trainer": {},
    "verl.trainer.ppo": {},
    "verl.trainer.ppo.core_algos": {
        **_all_in(f"{COMPAT}.algorithms.core_algos", *_CORE),
        **_all_in(f"{COMPAT}.algorithms.outcome_advantages", *_OUTCOME_ADVANTAGES),
        **_all_in(f"{COMPAT}.algorithms.policy_losses", *_LOSSES),
    },
    **TRAINER_MODULES,
}

# Own names come first, also in messages, and are not replaced.
MODULES = {module: {**names, **imported_by(module), **names} for module, names in _DEFINED.items()}
