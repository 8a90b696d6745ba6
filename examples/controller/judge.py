"""A file of a user: a new role and its worker class."""

from __future__ import annotations

import torch

from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles.registry import Role

JUDGE = Role.add("Judge")


class JudgeWorker(Worker):
    """Judge short responses to be better."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_judgement(self, data: DataProto) -> DataProto:
        """Return `judgement` [B]: minus the number of tokens of each response."""
        lengths = data.batch["response_mask"].sum(-1)
        return DataProto.from_dict(tensors={"judgement": (0 - lengths).to(torch.float32)})
