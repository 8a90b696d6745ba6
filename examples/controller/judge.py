"""A user's own file: a role that the package does not know, and the worker that plays it."""

from __future__ import annotations

import torch

from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.placement import Role

JUDGE = Role.add("Judge")


class JudgeWorker(Worker):
    """Prefers answers that end early."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_judgement(self, data: DataProto) -> DataProto:
        """`judgement` [B]: minus the length of the response."""
        lengths = data.batch["response_mask"].sum(-1)
        return DataProto.from_dict(tensors={"judgement": (0 - lengths).to(torch.float32)})
