"""Names that a module of verl imports from another one, and that programs import from there.

`from verl.trainer.ppo.ray_trainer import AdvantageEstimator` works with verl, although
`verl.trainer.ppo.core_algos` defines this name.
"""

from __future__ import annotations

_TENSORDICTS = {"verl.utils": {"tu": "tensordict_utils"}}
_FUNCTIONS = {"verl.utils": {"verl_F": "torch_functional"}}


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


_NEEDS = {"verl.trainer.ppo.utils": _same("need_critic need_reference_policy")}

IMPORTED: dict[str, dict[str, dict[str, str]]] = {
    "verl.trainer.main_ppo": {
        **_NEEDS,
        "verl.utils.config": _same("validate_config"),
        "verl.utils.device": _same("auto_set_device is_cuda_available"),
    },
    "verl.trainer.main_ppo_v0": {
        **_NEEDS,
        "verl.utils.config": _same("validate_config"),
        "verl.trainer.ppo.ray_trainer": _same("RayPPOTrainer"),
    },
    "verl.trainer.sft_trainer": {
        **_TENSORDICTS,
        "verl.utils.device": _same("auto_set_device get_device_name"),
    },
    "verl.trainer.ppo.core_algos": _FUNCTIONS,
    "verl.trainer.ppo.metric_utils": {
        **_FUNCTIONS,
        "verl": _same("DataProto"),
        "verl.utils.fs": _same("copy_to_local"),
        "verl.utils.metric": _same("reduce_metrics"),
    },
    "verl.trainer.ppo.ray_trainer": {
        **_TENSORDICTS,
        "verl": _same("DataProto"),
        "verl.protocol": _same("pad_dataproto_to_divisor unpad_dataproto"),
        "verl.single_controller.base": _same("Worker"),
        "verl.trainer.ppo": _same("core_algos"),
        "verl.trainer.ppo.core_algos": _same("AdvantageEstimator agg_loss"),
        "verl.trainer.ppo.metric_utils": _same(
            "compute_data_metrics compute_throughout_metrics compute_timing_metrics"
        ),
        "verl.trainer.ppo.utils": _same("Role WorkerType need_critic need_reference_policy"),
        "verl.utils.metric": _same("reduce_metrics"),
        "verl.utils.py_functional": _same("rename_dict"),
        "verl.utils.seqlen_balancing": _same(
            "calculate_workload get_seqlen_balanced_partitions log_seqlen_unbalance"
        ),
        "verl.utils.torch_functional": _same("masked_mean"),
    },
    "verl.trainer.ppo.utils": {
        "verl.single_controller.base": _same("Worker"),
        "verl.trainer.ppo.core_algos": _same("AdvantageEstimator"),
    },
    "verl.utils": {"verl.utils.config": _same("validate_config")},
    "verl.utils.seqlen_balancing": _TENSORDICTS,
    "verl.utils.torch_functional": {
        "verl.utils.device": _same("get_device_name get_torch_device"),
    },
    "verl.workers.engine_workers": {
        **_TENSORDICTS,
        "verl.single_controller.base": _same("Worker"),
        "verl.single_controller.base.decorator": _same(
            "Dispatch make_nd_compute_dataproto_dispatch_fn register"
        ),
        "verl.utils.device": _same("get_device_name get_torch_device set_expandable_segments"),
        "verl.utils.py_functional": _same("append_to_dict"),
    },
}
"""Module → module that it imports from → name in the first → name in the second."""


def imported_by(module: str) -> dict[str, str]:
    """Return for each name that a module of verl imports from others: "module:attribute"."""
    return {
        name: f"{home}:{attribute}"
        for home, names in IMPORTED.get(module, {}).items()
        for name, attribute in names.items()
    }
