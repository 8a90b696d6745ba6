"""The statements by which programs import names of verl, offered and not offered."""

from __future__ import annotations

import importlib.util

import pytest
from verl_names import AGAIN, LEFT_OUT

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.compat.verl.names import MODULES, advice


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from verl.utils.torch_functional import get_unpad_data", r"Use quadriga\.parallel\.p"),
        ("from verl.trainer.main_ppo import TaskRunnerV1", r"Use verl\.trainer\.main_ppo\.TaskR"),
        ("from verl.utils import tracking", r"Use quadriga\.observability\.trackers\."),
        ("from verl.utils.tracking import Tracking", r"Use quadriga\.observability\.trackers\."),
        ("from verl.workers import engine", r"Use quadriga\.engines"),
        ("from verl.workers.config import CriticConfig", r"Use quadriga\.config\.schema"),
        ("from verl.trainer.config import FilterGroupsConfig", r"Use quadriga\.config\.schema"),
        ("import verl.utils.import_utils", r"Use quadriga\.algorithms\.user_files"),
        ("from verl.trainer.ppo.metric_utils import bootstrap_metric", r"Use quadriga\.obs"),
        ("from verl.trainer.main_ppo_v0 import run_ppo", r"Import it from verl\.trainer\.main_p"),
        ("from verl.trainer import nothing", r"has no 'nothing' in Quadriga"),
    ],
)
def test_an_import_of_what_is_not_offered_says_what_to_use(statement, advice):
    with pytest.raises(ImportError, match=advice):
        exec(statement, {})


def test_the_error_of_an_import_names_the_module():
    with pytest.raises(ImportError) as caught:
        exec("from verl.utils.torch_functional import get_unpad_data", {})
    assert caught.value.name == "verl.utils.torch_functional"
    assert "It has: clip_by_value, " in str(caught.value)


def test_an_attribute_that_is_not_offered_is_still_an_attribute_error():
    module = importlib.import_module("verl.utils.torch_functional")
    assert not hasattr(module, "get_unpad_data")
    assert getattr(module, "get_unpad_data", None) is None
    with pytest.raises(AttributeError, match="has no 'get_unpad_data' in Quadriga"):
        module.get_unpad_data  # noqa: B018


def test_all_names_of_a_module_are_imported():
    names: dict = {}
    exec("from verl.trainer.ppo.metric_utils import *", names)
    assert callable(names["compute_data_metrics"])


def test_names_that_a_module_of_verl_imports_are_found_there_too():
    from verl.trainer.ppo import core_algos as original
    from verl.trainer.ppo.ray_trainer import (
        AdvantageEstimator,
        DataProto,
        Worker,
        agg_loss,
        core_algos,
    )

    from quadriga.protocol import DataProto as OurDataProto

    assert (core_algos, agg_loss) == (original, original.agg_loss)
    assert AdvantageEstimator is original.AdvantageEstimator
    assert DataProto is OurDataProto
    assert Worker is importlib.import_module("verl.single_controller.base").Worker


@pytest.mark.parametrize("module", AGAIN)
def test_a_name_that_is_imported_again_is_the_same_object(module):
    """`AGAIN`: for each module of verl, the names that it imports from other modules of ours."""
    loaded = importlib.import_module(module)
    for home, names in AGAIN[module].items():
        for name in names.split():
            assert name in MODULES[module], name
            assert getattr(loaded, name) is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("module", LEFT_OUT)
def test_each_name_that_is_left_out_has_advice(module):
    silent = [name for name in LEFT_OUT[module].split() if not advice(f"{module}.{name}")]
    assert silent == []


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("from verl.trainer.ppo.core_algos import compute_policy_loss_dro", r"Use quadriga\.algo"),
        ("from verl.trainer.ppo.ray_trainer import compute_reward", r"Use quadriga\.rewards"),
        ("from verl.trainer.main_ppo import create_rl_dataset", r"Use quadriga\.data"),
        ("import verl.single_controller.ray.megatron", r"Use verl\.single_controller\.ray\.Ray"),
        ("import verl.single_controller.base.register_center.ray", r"register_center=True"),
        ("import verl.third_party.vllm", r"Use quadriga\.rollout"),
        ("import verl.utils.megatron.tensor_parallel", r"Megatron engine of its own"),
        ("import verl.utils.fp8_utils", r"does not quantize"),
        ("import verl.utils.npu_utils", r"device types of PyTorch"),
        ("import verl.interactions.base", r"one response per prompt"),
        ("import verl.workers.engine_workers_tinker", r"Use quadriga\.workers"),
    ],
)
def test_names_of_other_parts_and_other_versions_have_advice(statement, reason):
    with pytest.raises(ImportError, match=reason):
        exec(statement, {})


@pytest.mark.parametrize(
    "module",
    [
        "verl.base_config",
        "verl.trainer.ppo.padding_utils",
        "verl.trainer.sft_trainer_ray",
        "verl.utils.attention_utils",
        "verl.utils.distributed",
        "verl.utils.flops_counter",
        "verl.utils.groupwise",
        "verl.utils.hdfs_io",
        "verl.utils.import_utils",
        "verl.utils.logger",
        "verl.utils.logging_utils",
        "verl.utils.memory_utils",
        "verl.utils.metric.utils",
        "verl.utils.net_utils",
        "verl.utils.rollout_trace",
        "verl.utils.torch_dtypes",
        "verl.utils.transferqueue_utils",
        "verl.utils.vllm",
        "verl.version",
        "verl.workers.utils",
    ],
)
def test_a_module_that_is_not_offered_names_its_counterpart(module):
    with pytest.raises(ModuleNotFoundError, match=r"\. Use "):
        importlib.import_module(module)


def test_libraries_find_the_modules():
    assert importlib.util.find_spec("verl") is not None
    spec = importlib.util.find_spec("verl.utils.device")
    assert (spec.name, spec.origin) == ("verl.utils.device", "quadriga.compat.verl")
