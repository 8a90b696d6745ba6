"""A file of a user: a reward model as a role of its own, for `algorithm.user_files`.

Settings: `grader.model_path`, `grader.scale`, and `placement.grader` for its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles import RoleStage, register_role
from quadriga.trainer.roles.registry import Role
from quadriga.workers.runtime import RankRuntime, prepare_rank

READS = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSE_MASK)


@dataclass(frozen=True)
class GraderConfig:
    """The section `grader` of the settings."""

    model_path: str = ""  # folder of a sequence-classification model with one label
    scale: float = 1.0  # factor of the score

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")


class GraderWorker(Worker):
    """Scores each response with a sequence-classification model."""

    def __init__(self, config: GraderConfig, runtime: RankRuntime) -> None:
        super().__init__()
        self.config = config
        self.device = prepare_rank(runtime)  # threads, seed, process group
        self.model: PreTrainedModel | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model."""
        path = self.config.model_path
        self.model = AutoModelForSequenceClassification.from_pretrained(path).to(self.device).eval()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    @torch.no_grad()
    def compute_score(self, data: DataProto) -> DataProto:
        """Return `token_level_scores` [B, R] float32, with the score at the last response token."""
        assert self.model is not None, "init_model comes first"
        ids, attention, mask = (data.batch[key] for key in READS)
        # Row by row without padding, so that the model needs no padding token.
        rows = (row[kept.bool()][None] for row, kept in zip(ids, attention, strict=True))
        logits = [self.model(row.to(self.device)).logits.float().cpu()[0, 0] for row in rows]
        scores_B = self.config.scale * torch.stack(logits)
        scores_BR = add_to_last_token(torch.zeros(mask.shape), mask, scores_B)
        return DataProto.from_dict(
            tensors={fields.TOKEN_LEVEL_SCORES: scores_BR},
            meta_info={"metrics": {"score": float(scores_B.mean())}},
        )


GRADER = Role.add("Grader")
register_role(
    GRADER,
    worker=GraderWorker,
    settings=GraderConfig,
    starts_after=[Role.Critic],
    stages=[
        # It writes the scores before `score_responses`, which then calls no rule function.
        RoleStage(
            "compute_score",
            reads=READS,
            writes=(fields.TOKEN_LEVEL_SCORES,),
            before="score_responses",
            in_validation=True,
        )
    ],
)
