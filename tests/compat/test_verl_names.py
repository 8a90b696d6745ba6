"""Code that imports verl's names gets Quadriga's objects, or is told what to use."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

from quadriga.compat.verl.names import MODULES, NAMES, NOT_OFFERED

# The names of verl 0.9.1 that programs, its examples and the specification import.
OFFERED = {
    "verl": "DataProto",
    "verl.protocol": (
        "BatchData DataProto DataProtoConfig DataProtoFuture DataProtoItem _padding_size_key "
        "all_gather_data_proto collate_fn deserialize_single_tensor deserialize_tensordict "
        "fold_batch_dim pad_dataproto_to_divisor serialize_single_tensor serialize_tensordict "
        "unfold_batch_dim union_numpy_dict union_tensor_dict unpad_dataproto"
    ),
    "verl.single_controller.base.decorator": (
        "DISPATCH_MODE_FN_REGISTRY Dispatch Execute MAGIC_ATTR _check_dispatch_mode "
        "_check_execute_mode collect_all_to_all collect_dp_compute collect_dp_compute_data_proto "
        "collect_lazy_compute_data_proto collect_nd_compute collect_nd_compute_dataproto "
        "dispatch_all_to_all dispatch_dp_compute dispatch_dp_compute_data_proto "
        "dispatch_dp_compute_data_proto_with_func dispatch_lazy_compute_data_proto "
        "dispatch_nd_compute dispatch_nd_compute_dataproto dispatch_one_to_all "
        "dummy_direct_rollout_call get_predefined_dispatch_fn get_predefined_execute_fn "
        "init_predefined_dispatch_mode init_predefined_execute_mode "
        "make_nd_compute_dataproto_dispatch_fn register register_dispatch_mode "
        "update_dispatch_mode"
    ),
    "verl.single_controller.base.worker": "DistGlobalInfo DistRankInfo Worker WorkerHelper",
    "verl.single_controller.base.worker_group": (
        "ClassWithInitArgs ResourcePool WorkerGroup check_workers_alive"
    ),
    "verl.single_controller.ray.base": (
        "RayClassWithInitArgs RayResourcePool RayWorkerGroup ResourcePoolManager "
        "SubRayResourcePool create_colocated_worker_cls create_colocated_worker_cls_fused "
        "create_colocated_worker_raw_cls extract_pg_from_exist func_generator "
        "get_master_addr_port get_random_string merge_resource_pool "
        "sort_placement_group_by_node_ip split_resource_pool"
    ),
    "verl.utils": "hf_processor hf_tokenizer validate_config",
    "verl.utils.ray_utils": "parallel_put ray_noset_visible_devices",
    "verl.utils.device": (
        "auto_set_device get_device_id get_device_name get_nccl_backend get_resource_name "
        "get_torch_device get_visible_devices_keyword is_cuda_available is_npu_available "
        "set_expandable_segments"
    ),
    "verl.utils.py_functional": (
        "append_to_dict list_of_dict_to_dict_of_list rename_dict temp_env_var union_two_dict"
    ),
    "verl.utils.seqlen_balancing": (
        "calculate_workload ceildiv get_group_balanced_partitions get_reverse_idx "
        "get_seqlen_balanced_partitions greedy_partition karmarkar_karp log_seqlen_unbalance "
        "prepare_dynamic_batch rearrange_micro_batches restore_dynamic_batch roundup_divisible"
    ),
    "verl.utils.tensordict_utils": (
        "assert_tensordict_eq assign_non_tensor assign_non_tensor_data assign_non_tensor_stack "
        "chunk_tensordict concat_nested_tensors concat_tensordict concat_tensordict_with_none_bsz "
        "contiguous get get_keys get_non_tensor_data get_tensordict index_select_tensor_dict "
        "list_of_dict_to_tensordict make_iterator nested_tensor_from_tensor_list pad_to_divisor "
        "pop pop_keys union_tensor_dict unpad unwrap_non_tensor_data"
    ),
    "verl.utils.torch_functional": (
        "clip_by_value entropy_from_logits get_response_mask logprobs_from_logits masked_mean "
        "masked_sum masked_var masked_whiten pad_2d_list_to_length pad_sequence_to_length"
    ),
    "verl.trainer.ppo.core_algos": (
        "ADV_ESTIMATOR_REGISTRY AdaptiveKLController AdvantageEstimator FixedKLController "
        "POLICY_LOSS_REGISTRY PolicyLossFn agg_loss compute_entropy_loss "
        "compute_gae_advantage_return compute_gdpo_outcome_advantage "
        "compute_gpg_outcome_advantage compute_grpo_outcome_advantage "
        "compute_grpo_passk_outcome_advantage compute_grpo_vectorized_outcome_advantage "
        "compute_opo_outcome_advantage compute_policy_loss compute_policy_loss_cispo "
        "compute_policy_loss_clip_cov compute_policy_loss_geo_mean compute_policy_loss_gpg "
        "compute_policy_loss_gspo compute_policy_loss_kl_cov compute_policy_loss_sapo "
        "compute_policy_loss_vanilla compute_reinforce_plus_plus_baseline_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage "
        "compute_rewards compute_rloo_outcome_advantage compute_rloo_vectorized_outcome_advantage "
        "compute_value_loss get_adv_estimator_fn get_kl_controller get_policy_loss_fn kl_penalty "
        "kl_penalty_forward register_adv_est register_policy_loss verl_F"
    ),
    "verl.trainer.ppo.metric_utils": "compute_data_metrics reduce_metrics verl_F",
    "verl.trainer.ppo.ray_trainer": (
        "RayPPOTrainer apply_kl_penalty compute_advantage compute_response_mask tu"
    ),
    "verl.trainer.main_ppo": "TaskRunner main run_ppo",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker CriticWorker",
}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_can_be_imported(module):
    loaded = importlib.import_module(module)
    spelled = [name for key in NAMES for home, _, name in [key.rpartition(".")] if home == module]
    for name in [*OFFERED.get(module, "").split(), *spelled]:
        assert getattr(loaded, name) is not None
    with pytest.raises(AttributeError, match="in Quadriga"):
        loaded.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from verl.utils.torch_functional import get_unpad_data", r"Instead: quadriga\.engines"),
        ("from verl.trainer.main_ppo import TaskRunnerV1", r"Did you mean TaskRunner\?"),
        ("from verl.trainer.ppo.core_algos import compute_dro", r"Instead: .* register_adv_est"),
        ("import verl.single_controller.base.register_center.ray", r"register_center=True"),
        ("import verl.tools", r"one response per prompt"),
        ("import verl.nothing", r"module 'verl\.nothing'\. docs/concepts"),
    ],
)
def test_an_import_of_what_is_not_offered_says_what_to_use(statement, advice):
    with pytest.raises(ImportError, match=advice):
        exec(statement, {})


@pytest.mark.parametrize("module", NOT_OFFERED)
def test_what_is_advised_exists(module):
    for word in NOT_OFFERED[module].replace("(", "").replace(",", " ").split():
        parts = word.strip(").;").split(".")
        if parts[0] != "quadriga" or len(parts) == 1:
            continue
        try:
            importlib.import_module(".".join(parts))
        except ModuleNotFoundError:
            getattr(importlib.import_module(".".join(parts[:-1])), parts[-1])


def test_importing_the_modules_imports_no_library():
    code = (
        "import sys, quadriga.compat.verl, verl.utils.device, verl.single_controller.ray.base\n"
        "print([m for m in ('torch', 'ray', 'tensordict') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr


def test_an_imported_verl_is_not_replaced(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("MINE = 1\n")
    code = (
        "import verl\n"
        "from quadriga.errors import ConfigError\n"
        "try:\n    import quadriga.compat.verl\n"
        "except ConfigError as error:\n    print(verl.MINE, error)"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
    )
    assert run.stdout.startswith("1 verl is imported already"), run.stderr
