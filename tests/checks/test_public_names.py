"""The public names exist, and those of the package are imported when they are first used."""

import importlib
import subprocess
import sys

import pytest

import quadriga

PACKAGE_NAMES = {
    "__version__",
    "DataProto", "DataProtoItem", "DataProtoFuture", "DataProtoConfig",
    "register", "Dispatch", "Execute", "Worker", "WorkerGroup", "ResourcePool",
    "RayResourcePool", "RayClassWithInitArgs", "RayWorkerGroup", "create_colocated_worker_cls",
    "Role", "ResourcePoolManager", "RayPPOTrainer",
    "TrainConfig", "SFTConfig", "GenerateConfig", "load_config",
    "GRPO", "PPO", "SFT", "RewardModel", "Run", "evaluate", "generate",
    "QuadrigaError", "InputError",
}  # fmt: skip

MODULE_NAMES = {
    "quadriga.protocol": (
        "DataProto", "DataProtoItem", "DataProtoFuture", "DataProtoConfig",
        "pad_dataproto_to_divisor", "unpad_dataproto", "fold_batch_dim", "unfold_batch_dim",
        "union_tensor_dict", "union_numpy_dict", "collate_fn", "parallel_put",
    ),
    "quadriga.single_controller": (
        "register", "Dispatch", "Execute", "Worker", "WorkerGroup", "ResourcePool",
        "ClassWithInitArgs", "register_dispatch_mode", "update_dispatch_mode",
        "make_nd_compute_dataproto_dispatch_fn",
    ),
    "quadriga.backends.ray": (
        "RayResourcePool", "RayClassWithInitArgs", "RayWorkerGroup",
        "create_colocated_worker_cls", "create_colocated_worker_raw_cls",
        "create_colocated_worker_cls_fused", "split_resource_pool", "merge_resource_pool",
    ),
    "quadriga.trainer.roles.registry": ("Role", "ResourcePoolManager"),
    "quadriga.trainer.ppo": ("RayPPOTrainer",),
    "quadriga.trainer.main": ("run_training",),
    "quadriga.trainer.fine_tuning": ("run_sft",),
    "quadriga.trainer.evaluation": ("run_generation", "main_generation"),
    "quadriga.workers": ("ActorRolloutRefWorker", "CriticWorker"),
    "quadriga.parallel.balancing": ("get_seqlen_balanced_partitions",),
    "quadriga.config.loading": ("load_config", "to_yaml"),
    "quadriga.config.plan": ("batch_plan", "BatchPlan"),
    "quadriga.trainer.checks.settings": (
        "check_train_settings", "check_fine_tuning_settings", "check_generate_settings",
    ),
    "quadriga.observability.metrics": (
        "METRICS", "MetricSet", "describe_metric", "add_metric", "Timer",
    ),
    "quadriga.observability.trackers": ("TRACKERS", "Tracker", "Trackers", "register_tracker"),
    "quadriga.observability.run_folder": ("RunFolder",),
    "quadriga.observability.jsonl": ("Sample", "JsonlFile", "read_samples"),
    "quadriga.observability.quiet": ("silence_libraries",),
}  # fmt: skip

METHODS = {
    "quadriga.protocol:DataProto": (
        "from_dict", "from_single_dict", "from_tensordict", "to_tensordict", "slice",
        "select_idxs", "select", "pop", "rename", "union", "reorder", "repeat",
        "sample_level_repeat", "unfold_column_chunks", "make_iterator", "to", "save_to_disk",
        "load_from_disk", "print_size", "get_data_info", "check_consistency", "chunk", "split",
        "concat", "padding", "is_padding_enabled",
    ),
    "quadriga.protocol:DataProtoFuture": ("get", "chunk", "concat"),
    "quadriga.single_controller:Dispatch": (
        "ONE_TO_ALL", "ALL_TO_ALL", "RANK_ZERO", "DP_COMPUTE", "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
        "MEGATRON_COMPUTE", "MEGATRON_COMPUTE_PROTO", "MEGATRON_PP_AS_DP",
        "MEGATRON_PP_AS_DP_PROTO", "MEGATRON_PP_ONLY",
    ),
    "quadriga.single_controller:Execute": ("ALL", "RANK_ZERO"),
    "quadriga.trainer.roles.registry:Role": (
        "Actor", "Rollout", "ActorRollout", "Critic", "RefPolicy", "RewardModel",
        "ActorRolloutRef",
    ),
    "quadriga.trainer.roles.registry:ResourcePoolManager": (
        "create_resource_pool", "get_resource_pool", "get_n_gpus",
    ),
    "quadriga.trainer.ppo:RayPPOTrainer": ("init_workers", "fit"),
    "quadriga.workers:ActorRolloutRefWorker": (
        "init_model", "generate_sequences", "compute_log_prob", "compute_ref_log_prob",
        "update_actor", "save_checkpoint", "load_checkpoint",
    ),
    "quadriga.workers:CriticWorker": (
        "init_model", "compute_values", "update_critic", "save_checkpoint", "load_checkpoint",
    ),
}  # fmt: skip


def test_names_of_the_package():
    assert {*quadriga.__all__, "__version__"} == PACKAGE_NAMES


def test_package_names_load():
    assert [name for name in PACKAGE_NAMES if getattr(quadriga, name, None) is None] == []
    assert set(dir(quadriga)) >= PACKAGE_NAMES
    with pytest.raises(AttributeError, match="module 'quadriga' has no attribute 'answer'"):
        _ = quadriga.answer


@pytest.mark.parametrize("owner", sorted(MODULE_NAMES | METHODS))
def test_names_of_modules_and_classes(owner):
    module, _, cls = owner.partition(":")
    loaded = importlib.import_module(module)
    found = getattr(loaded, cls) if cls else loaded
    assert [name for name in (MODULE_NAMES | METHODS)[owner] if not hasattr(found, name)] == []


HEAVY = ("torch", "ray", "transformers", "tensordict", "matplotlib", "pandas", "tensorboard")
LIGHT = ("rich", "hydra", "omegaconf", "numpy", "yaml")


def imported_by(modules: str, watched: tuple[str, ...]) -> str:
    """The watched libraries that are in sys.modules after `import {modules}` in a new process."""
    code = f"import sys, {modules}; print([m for m in {watched!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_package_imports_no_library():
    modules = "quadriga, quadriga.errors, quadriga.config.schema, quadriga.protocol"
    assert imported_by(modules, HEAVY + LIGHT) == "[]"


def test_settings_and_commands_import_nothing_heavy():
    modules = "quadriga.config.loading, quadriga.cli.main, quadriga.observability.trackers"
    assert imported_by(modules, HEAVY) == "[]"


def test_workers_import_transformers_after_their_class():
    """A rank loads its class before it lowers the log levels of transformers and torchao."""
    names = ("actor_rollout_ref", "runtime", "reward_model")
    modules = ", ".join(f"quadriga.workers.{name}" for name in names)
    assert imported_by(modules, ("transformers", "torchao")) == "[]"


def test_what_transformers_imports_shows_nothing():
    assert imported_by("quadriga.models.loading", ("transformers",)) == "['transformers']"


def test_batches_import_neither_ray_nor_the_compiler_of_torch():
    """tensordict would import the compiler: more time than all the rest, in each process."""
    modules = "quadriga.protocol.boundary, quadriga.single_controller.padding"
    assert imported_by(modules, ("ray", "tensordict", "torch._dynamo")) == "['tensordict']"


def test_an_imported_library_is_reported():
    assert imported_by("numpy", ("numpy",)) == "['numpy']"
