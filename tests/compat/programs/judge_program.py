"""Train with a role that this program itself defines, on the pool of the policy.

Arguments: the address and the namespace of a cluster, and a file with settings of verl as JSON.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import ray

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.trainer.roles import RoleStage, register_role


def main() -> None:
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.trainer.main_ppo import run_ppo
    from verl.trainer.main_ppo_v0 import BaseTaskRunner
    from verl.trainer.ppo.ray_trainer import Role

    @dataclass(frozen=True)
    class JudgeConfig:
        weight: float = 1.0

    class JudgeWorker(Worker):
        def __init__(self, config) -> None:
            super().__init__()
            self.weight = config.weight

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def judge(self, data):
            scores = self.weight * data.batch["response_mask"].float()
            return DataProto.from_dict(tensors={"judgement": scores})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def report(self, data):
            metrics = {"weight": float(data.batch["judgement"].max())}
            return DataProto(meta_info={"metrics": metrics})

    @ray.remote
    class Runner(BaseTaskRunner):
        def add_critic_worker(self, config):
            super().add_critic_worker(config)
            self.role_worker_mapping[Role.Judge] = ray.remote(JudgeWorker)

        def run(self, config):
            super().run(config)
            return [str(role) for role in self.role_worker_mapping]

    of_step = {"reads": ("response_mask",), "writes": ("judgement",), "before": "shape_scores"}
    report = RoleStage("report", reads=("judgement",), after="update_actor")
    stages = [RoleStage("judge", **of_step), report]
    register_role(Role.add("Judge"), settings=JudgeConfig, stages=stages)
    address, namespace, settings = sys.argv[1:]
    ray.init(address=address, namespace=namespace, log_to_driver=False)
    try:
        print(run_ppo(json.loads(Path(settings).read_text()), task_runner_class=Runner))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
