"""Worked examples in verl's spelling. `examples/controller` has the same ones in ours."""

import dataclasses
import os
from pathlib import Path

import pytest
import ray
import torch
from program_workers import Calculator
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import kl_penalty
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
from verl.workers.fsdp_workers import ActorRolloutRefWorker

from processes import run_python

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent


def another_driver(*arguments):
    """Run a program in a process of its own; return what it printed."""
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env["PYTHONPATH"] = str(HERE)
    return run_python(HERE / "another_driver.py", *arguments, env=env).stdout


def test_an_accumulator_before_ray_init():
    assert "sums [[0], [1], [3]]" in another_driver("accumulator")


def test_a_detached_group_is_found_from_another_driver(cluster):
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    held = RayClassWithInitArgs(ray.remote(Calculator), 7)
    group = RayWorkerGroup(
        pool, held, name_prefix="lasting_", detached=True, device_name="cpu", use_gpu=False
    )
    context = ray.get_runtime_context()
    try:
        shown = another_driver("attach", context.gcs_address, context.namespace, "lasting_")
    finally:
        total = group.add(0)
        group.shutdown()
        pool.release()
    assert "total [12, 12] 1" in shown
    assert total == [12, 12]


class ActorWithKL(ActorRolloutRefWorker):
    """An actor that estimates its KL divergence from the reference."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_kl(self, data):
        mine = self.compute_log_prob(data).batch["old_log_probs"]
        ref = self.compute_ref_log_prob(data).batch["ref_log_prob"]
        return DataProto.from_dict({"kl": kl_penalty(mine, ref, kl_penalty="low_var_kl")})


def test_the_kl_divergence_between_actor_and_reference(start, model_folder):
    from quadriga.config.schema import ActorRolloutRefConfig

    config = ActorRolloutRefConfig()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model_folder))
    held = RayClassWithInitArgs(
        cls=ray.remote(ActorWithKL), config=config, role="actor_rollout_ref"
    )
    group = start(held, ranks=1)
    group.init_model()
    ids = torch.arange(5, 25).view(4, 5)
    ones = torch.ones_like(ids)
    batch = DataProto.from_dict(
        {
            "input_ids": ids % 10,
            "attention_mask": ones,
            "position_ids": ones.cumsum(-1) - 1,
            "responses": ids[:, 3:] % 10,
            "response_mask": ones[:, 3:],
        }
    )
    kl = group.compute_kl(batch).batch["kl"]
    assert kl.shape == (4, 2)
    assert kl.abs().max() < 1e-6  # the actor has not been trained yet


class Judge(Worker):
    """The worker of a role of one's own."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def judge(self, data):
        return DataProto.from_dict({"score": -data.batch["response_mask"].sum(-1).float()})


def test_a_role_of_ones_own_on_a_pool_of_its_own(start, judge):
    manager = ResourcePoolManager({"judges": [1]}, {judge: "judges"}, max_colocate_count=1)
    assert (manager.mapping[Role.Judge], manager.get_n_gpus()) == ("judges", 1)
    group = start(Judge, ranks=manager.get_n_gpus())
    data = DataProto.from_dict({"response_mask": torch.tensor([[1, 1], [1, 0]])})
    assert group.judge(data).batch["score"].tolist() == [-2.0, -1.0]
