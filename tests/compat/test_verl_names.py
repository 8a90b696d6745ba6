"""Code that imports verl's names runs on Quadriga's classes."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl_names import ESTIMATORS, LEFT_OUT, PUBLIC

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.compat.verl.names import MODULES
from quadriga.compat.verl.names.not_offered import NO_COUNTERPART, NOT_OFFERED
from quadriga.compat.verl.names.trainers import TRAINER_MODULES
from quadriga.errors import ConflictError, LengthError


@pytest.mark.parametrize("module", MODULES)
def test_every_name_can_be_imported(module):
    loaded = importlib.import_module(module)
    for name in MODULES[module]:
        assert getattr(loaded, name) is not None
    with pytest.raises(AttributeError, match="in Quadriga"):
        loaded.no_such_name  # noqa: B018


def test_names_are_quadrigas_objects():
    from verl import DataProto
    from verl.single_controller.base.decorator import Dispatch
    from verl.single_controller.ray import RayClassWithInitArgs

    import quadriga.backends.ray
    import quadriga.protocol
    import quadriga.single_controller

    assert DataProto is quadriga.protocol.DataProto
    assert Dispatch is quadriga.single_controller.Dispatch
    assert RayClassWithInitArgs is quadriga.backends.ray.RayClassWithInitArgs


def test_the_migration_page_lists_the_names_that_are_left_out():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "migration.md").read_text()
    for module, names in LEFT_OUT.items():
        assert not set(names.split()) & set(MODULES[module])
        for name in names.split():
            assert is_on_page(name, page), name


def test_the_migration_page_lists_the_estimators_that_are_left_out():
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    page = (Path(__file__).parents[2] / "docs" / "concepts" / "migration.md").read_text()
    missing = set(ESTIMATORS.split()) - set(AdvantageEstimator.__members__)
    assert missing == {"OPTIMAL_TOKEN_BASELINE", "TIR_OPTIMAL_TOKEN_BASELINE"}
    assert all(is_on_page(name, page) for name in missing)


def is_on_page(name: str, page: str) -> bool:
    """Whether the page has the name or a pattern of it, such as `serialize_*` or `loss_{a,b}`."""
    patterns = re.findall(r"`([\w*]+(?:\{[\w,]+\})?)`", page)
    for pattern in patterns:
        head, _, choices = pattern.rstrip("}").partition("{")
        if name in [head + choice for choice in choices.split(",")] or fnmatch(name, head):
            return True
    return False


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_of_verl_is_provided_or_left_out(module):
    missing = set(PUBLIC[module].split()) - set(MODULES[module])
    assert missing == set(LEFT_OUT.get(module, "").split())


@pytest.mark.parametrize("module", TRAINER_MODULES)
def test_a_name_that_is_not_offered_says_what_to_use(module):
    loaded = importlib.import_module(module)
    for name in LEFT_OUT.get(module, "").split():
        with pytest.raises(AttributeError, match=f"has no '{name}' in Quadriga"):
            getattr(loaded, name)


def test_advice_for_names_and_modules_that_are_not_offered():
    from verl.trainer import main_ppo
    from verl.workers import engine_workers

    with pytest.raises(AttributeError, match=r"Use verl\.trainer\.main_ppo\.TaskRunner\."):
        main_ppo.TaskRunnerV1  # noqa: B018
    with pytest.raises(AttributeError, match=r"Use quadriga\.workers\.CriticWorker"):
        engine_workers.TrainingWorker  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"Use quadriga\.rollout"):
        importlib.import_module("verl.workers.rollout.vllm_rollout")
    with pytest.raises(ModuleNotFoundError, match=r"module 'verl\.nothing'\. docs/concepts"):
        importlib.import_module("verl.nothing")


@pytest.mark.parametrize("use", sorted(set(NOT_OFFERED.values())))
def test_what_is_advised_exists(use):
    """Each advice begins with a name that can be imported."""
    found: object = None
    module, *attributes = use.split(" ")[0].rstrip(";,.").split(".")
    for number in range(len(attributes), -1, -1):
        try:
            found = importlib.import_module(".".join([module, *attributes[:number]]))
        except ModuleNotFoundError:
            continue
        for name in attributes[number:]:
            found = getattr(found, name)
        break
    assert found is not None


def test_advice_for_what_has_no_counterpart():
    with pytest.raises(ModuleNotFoundError, match=r"'verl\.tools'\. Quadriga generates one"):
        importlib.import_module("verl.tools")
    assert not set(NO_COUNTERPART) & set(NOT_OFFERED)
    assert all(reason.endswith(".") for reason in NO_COUNTERPART.values())


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
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
    )
    assert run.stdout.startswith("1 verl is imported already"), run.stderr


def test_dispatch_functions_of_verl():
    from verl.protocol import DataProto
    from verl.single_controller.base.decorator import (
        DISPATCH_MODE_FN_REGISTRY,
        Dispatch,
        Execute,
        collect_nd_compute_dataproto,
        dispatch_nd_compute_dataproto,
        get_predefined_dispatch_fn,
        get_predefined_execute_fn,
    )

    group = SimpleNamespace(world_size=4)
    data = DataProto.from_dict(tensors={"a": torch.arange(4)})
    (parts,), _ = dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, group, data)
    assert [p.batch["a"].tolist() for p in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    joined = collect_nd_compute_dataproto([True, False, True, False], group, parts)
    assert joined.batch["a"].tolist() == [0, 1, 2, 3]
    functions = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    assert DISPATCH_MODE_FN_REGISTRY[Dispatch.DP_COMPUTE_PROTO] == functions
    assert get_predefined_execute_fn(Execute.RANK_ZERO)["execute_fn_name"] == "execute_rank_zero"


def test_functional():
    from verl.utils.py_functional import append_to_dict, temp_env_var, union_two_dict
    from verl.utils.ray_utils import auto_await, ray_noset_visible_devices

    with temp_env_var("QUADRIGA_TEST", "1"):
        assert os.environ["QUADRIGA_TEST"] == "1"
    assert "QUADRIGA_TEST" not in os.environ
    metrics: dict = {}
    append_to_dict(metrics, {"loss": 1.0})
    append_to_dict(metrics, {"loss": [2.0, 3.0]})
    assert metrics == {"loss": [1.0, 2.0, 3.0]}
    with pytest.raises(ConflictError, match="'a'"):
        union_two_dict({"a": 1}, {"a": 2})
    assert not ray_noset_visible_devices({})

    @auto_await
    async def number():
        await asyncio.sleep(0)
        return 42

    async def awaited():
        return await number()

    assert number() == 42
    assert asyncio.run(awaited()) == 42


def test_device():
    from verl.utils import device

    name = device.get_device_name()
    assert name in ("cpu", "cuda", "npu")
    assert device.is_device_available() == (name != "cpu")
    assert {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[name] == device.get_nccl_backend()
    device.manual_seed(1)
    device.manual_seed_all(1)


def test_balancing():
    from verl.utils import seqlen_balancing as sb

    lengths = [8, 7, 1, 2, 6, 3, 5, 4]
    parts = sb.karmarkar_karp(lengths, 4, equal_size=True)
    assert [sum(lengths[i] for i in part) for part in parts] == [9, 9, 9, 9]
    assert sb.get_reverse_idx([2, 0, 1]) == [1, 2, 0]
    assert (sb.ceildiv(7, 3), sb.roundup_divisible(7, 3)) == (3, 9)
    balance = sb.log_seqlen_unbalance(lengths, parts, "tokens")
    assert (balance["tokens/minmax_diff"], balance["tokens/balanced_max"]) == (12, 9)
    grouped = sb.get_group_balanced_partitions([1, 1, 5, 5, 2, 2, 4, 4], list("aabbccdd"), 2)
    assert sorted(map(sorted, grouped)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dynamic_batches():
    from verl.protocol import DataProto
    from verl.utils import seqlen_balancing as sb

    lengths = torch.tensor([4, 1, 3, 2])
    mask = (torch.arange(4)[None] < lengths[:, None]).long()
    data = DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(4)})
    parts, rows = sb.prepare_dynamic_batch(data, max_token_len=5)
    assert all(int(part.batch["attention_mask"].sum()) <= 5 for part in parts)
    joined = torch.cat([part.batch["row"] for part in parts])
    assert sb.restore_dynamic_batch(joined, rows).tolist() == [0, 1, 2, 3]


def test_rows_of_a_group_stay_in_one_micro_batch():
    from verl.utils import seqlen_balancing as sb
    from verl.utils import tensordict_utils as tu

    lengths = torch.tensor([1, 1, 4, 4, 2, 2])
    mask = (torch.arange(4)[None] < lengths[:, None]).long()
    batch = tu.get_tensordict({"attention_mask": mask, "row": torch.arange(6)})
    parts, rows = sb.rearrange_micro_batches(
        batch, max_token_len=8, num_batches_divided_by=3, force_group_size=2
    )
    assert rows == [[2, 3], [4, 5], [0, 1]]  # largest workload first
    assert [part["row"].tolist() for part in parts] == rows
    with pytest.raises(LengthError, match="6 rows, which do not divide into groups"):
        sb.rearrange_micro_batches(batch, max_token_len=8, force_group_size=4)


def test_names_of_verls_worker(monkeypatch):
    from verl.single_controller.base import Worker

    import quadriga.single_controller

    monkeypatch.setenv("MASTER_ADDR", "10.0.0.5")
    monkeypatch.setenv("MASTER_PORT", "2345")
    worker = Worker()
    assert isinstance(worker, quadriga.single_controller.Worker)
    assert worker.get_master_addr_port() == ("10.0.0.5", "2345")
    worker._register_dispatch_collect_info("actor", 0, False)
    assert worker.query_collect_info("actor") is False
    assert worker.fused_worker_dict == {}
    assert worker.get_fused_worker_by_name("critic") is None


def test_a_fused_class_has_verls_names():
    from verl.single_controller.base import ClassWithInitArgs, Worker
    from verl.single_controller.ray.base import create_colocated_worker_raw_cls

    class Actor(Worker):
        pass

    fused = create_colocated_worker_raw_cls({"actor": ClassWithInitArgs(Actor)})()
    assert isinstance(fused.actor, Actor)
    assert fused.actor.get_fused_worker_by_name("actor") is fused.actor
    assert fused.get_fused_worker_by_name("critic") is None


def test_a_worker_written_for_verl_runs_on_ray(tmp_path):
    """A program whose module imports verl, in the controller and in the workers."""
    (tmp_path / "their_worker.py").write_text(
        "import torch\n"
        "from verl import DataProto\n"
        "from verl.single_controller.base import Worker\n"
        "from verl.single_controller.base.decorator import Dispatch, Execute, register\n"
        "class Actor(Worker):\n"
        "    def __init__(self, scale):\n"
        "        super().__init__()\n"
        "        self.scale = scale\n"
        "    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)\n"
        "    def double(self, data):\n"
        "        critic = self.get_fused_worker_by_name('critic')\n"
        "        assert self.fused_worker_dict['critic'] is critic\n"
        "        data.batch['a'] = data.batch['a'] * self.scale\n"
        "        return data\n"
        "    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)\n"
        "    def who(self):\n"
        "        return self.rank\n"
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import quadriga.compat.verl\n"
        "import ray, torch\n"
        "from their_worker import Actor\n"
        "from verl import DataProto\n"
        "from verl.single_controller.ray import (RayClassWithInitArgs, RayResourcePool,\n"
        "    RayWorkerGroup, create_colocated_worker_cls)\n"
        "ray.init('local', num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20,\n"
        "         log_to_driver=False)\n"
        "pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)\n"
        "cls = RayClassWithInitArgs(cls=ray.remote(Actor), scale=3)\n"
        "both = create_colocated_worker_cls({'actor': cls, 'critic': cls})\n"
        "wg = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=both, device_name='cpu')\n"
        "actor = wg.spawn(prefix_set={'actor', 'critic'})['actor']\n"
        "data = DataProto.from_dict(tensors={'a': torch.arange(4)})\n"
        "print(actor.double(data).batch['a'].tolist(), actor.who(),\n"
        "      ray.get(actor.execute_all_async('who')))\n"
        "ray.shutdown()\n"
    )
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    assert "[0, 3, 6, 9] 0 [0, 1]" in run.stdout
