"""A role of a program: its settings, its worker, its stage, and a runner that places it."""

from dataclasses import dataclass

import ray
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

from quadriga.trainer.roles import RoleStage


@dataclass(frozen=True)
class JudgeConfig:
    """The section `judge` of the configuration."""

    weight: float = 1.0


class JudgeWorker(Worker):
    """Adds a weight to the score of each response."""

    def __init__(self, config: JudgeConfig) -> None:
        super().__init__()
        self.weight = config.weight

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def judge(self, data: DataProto) -> DataProto:
        scores = data.batch["token_level_scores"].clone()
        scores[:, 0] += self.weight
        measured = {"weight": self.weight, "ranks": float(self.world_size)}
        return DataProto.from_dict({"token_level_scores": scores}, {}, {"metrics": measured})


SCORES = "token_level_scores"
STAGE = RoleStage(
    "judge", reads=("response_mask", SCORES), writes=(SCORES,), after="score_responses"
)


class JudgeRunner(TaskRunner):
    """Places the judge on a pool of its own, beside two ranks of the policy."""

    def add_judge_worker(self, config):
        self.role_worker_mapping[Role.Judge] = ray.remote(JudgeWorker)
        self.mapping[Role.Judge] = "judge_pool"

    def init_resource_pool_mgr(self, config):
        spec = {"global_pool": [2], "judge_pool": [1]}
        return ResourcePoolManager(spec, self.mapping, max_colocate_count=1)
