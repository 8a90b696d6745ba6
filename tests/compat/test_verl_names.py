"""Code that imports verl's names gets Quadriga's objects, or is told what to use."""

import importlib
import importlib.util
import os

import pytest

from processes import run_python
from quadriga.compat.verl.names import MODULES, NAMES, NOT_OFFERED

# Names of verl 0.9.1 that its examples and the specification import, besides those that the other
# tests and the programs of this folder import.
OFFERED = {
    "verl.protocol": (
        "DataProtoConfig DataProtoItem all_gather_data_proto fold_batch_dim "
        "pad_dataproto_to_divisor unfold_batch_dim unpad_dataproto"
    ),
    "verl.single_controller.base.decorator": (
        "collect_dp_compute collect_lazy_compute_data_proto collect_nd_compute "
        "collect_nd_compute_dataproto dispatch_dp_compute "
        "dispatch_dp_compute_data_proto_with_func dispatch_lazy_compute_data_proto "
        "dispatch_nd_compute dispatch_nd_compute_dataproto dummy_direct_rollout_call "
        "init_predefined_dispatch_mode init_predefined_execute_mode"
    ),
    "verl.single_controller.base.worker": "WorkerHelper",
    "verl.single_controller.base.worker_group": (
        "ClassWithInitArgs ResourcePool check_workers_alive"
    ),
    "verl.single_controller.ray.base": (
        "SubRayResourcePool extract_pg_from_exist get_random_string merge_resource_pool "
        "sort_placement_group_by_node_ip"
    ),
    "verl.utils.device": (
        "auto_set_device get_device_id get_nccl_backend get_resource_name get_torch_device "
        "get_visible_devices_keyword is_cuda_available is_npu_available set_expandable_segments"
    ),
    "verl.utils.py_functional": "list_of_dict_to_dict_of_list rename_dict",
    "verl.utils.seqlen_balancing": (
        "calculate_workload get_seqlen_balanced_partitions greedy_partition"
    ),
    "verl.utils.tensordict_utils": (
        "assign_non_tensor assign_non_tensor_data assign_non_tensor_stack concat_nested_tensors "
        "concat_tensordict_with_none_bsz contiguous get_keys get_non_tensor_data make_iterator "
        "pop_keys unwrap_non_tensor_data"
    ),
    "verl.utils.torch_functional": "masked_var masked_whiten",
    "verl.trainer.ppo.core_algos": (
        "AdaptiveKLController FixedKLController PolicyLossFn compute_entropy_loss "
        "compute_gdpo_outcome_advantage compute_gpg_outcome_advantage "
        "compute_opo_outcome_advantage compute_policy_loss_cispo compute_policy_loss_clip_cov "
        "compute_policy_loss_geo_mean compute_policy_loss_gpg compute_policy_loss_gspo "
        "compute_policy_loss_kl_cov compute_policy_loss_sapo "
        "compute_reinforce_plus_plus_baseline_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage "
        "compute_rewards compute_rloo_vectorized_outcome_advantage register_policy_loss"
    ),
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


def printed(code, path=""):
    """What a program prints. `path`: a folder in which it finds modules first."""
    env = {**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    return run_python("-c", code, timeout=60, env=env).stdout


def test_importing_the_modules_imports_no_library():
    code = (
        "import sys, quadriga.compat.verl, verl.utils.device, verl.single_controller.ray.base\n"
        "print([m for m in ('torch', 'ray', 'tensordict') if m in sys.modules])"
    )
    assert printed(code) == "[]\n"


def test_an_imported_verl_is_not_replaced(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("MINE = 1\n")
    code = (
        "import verl\n"
        "from quadriga.errors import ConfigError\n"
        "try:\n    import quadriga.compat.verl\n"
        "except ConfigError as error:\n    print(verl.MINE, error)"
    )
    assert printed(code, tmp_path).startswith("1 verl is imported already")
