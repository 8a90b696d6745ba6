"""A user's file with a role, and runs with it."""

from pathlib import Path

TALLY = '''
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from quadriga.algorithms.shaping import add_to_last_token
from quadriga.checkpoint.files import write_tensors
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.roles import RoleStage, register_role


@dataclass(frozen=True)
class TallyConfig:
    """The section `tally`."""

    weight: float = 1.0  # of the bonus
    kind: Literal["short", "long"] = "short"  # which responses get it
    dies_at: int | None = None  # rows after which the process of the role ends

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be at least 0, got {self.weight}")


class TallyWorker(Worker):
    """Adds a bonus to the scores, which grows with the rows that it has seen: its state."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__()
        self.config = config
        self.seen = torch.zeros(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_bonus(self, data: DataProto) -> DataProto:
        self.seen += len(data)
        if self.config.dies_at is not None and self.seen > self.config.dies_at:
            os._exit(7)
        mask, scores = data.batch["response_mask"], data.batch["token_level_scores"]
        length_B = mask.sum(-1).float()
        size_B = length_B if self.config.kind == "long" else 100 - length_B
        bonus_B = self.config.weight * size_B * (1 + self.seen) / 1000
        return DataProto.from_dict(
            tensors={"token_level_scores": add_to_last_token(scores, mask, bonus_B)},
            meta_info={"metrics": {"seen": float(self.seen), "tally/bonus": float(bonus_B.mean())}},
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int) -> list:
        return [write_tensors(Path(path) / f"tally_{self.rank}.safetensors", {"seen": self.seen})]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, step: int) -> None:
        self.seen = load_file(Path(path) / f"tally_{self.rank}.safetensors")["seen"]


register_role(
    Role.add("Tally"),
    worker=TallyWorker,
    settings=TallyConfig,
    stages=[
        RoleStage(
            "add_bonus",
            reads=("response_mask", "token_level_scores"),
            writes=("token_level_scores",),
            after="score_responses",
        )
    ],
)
'''


def write_tally(folder: Path, *changes: tuple[str, str]) -> str:
    """Write the file with texts replaced, and return the override that loads it."""
    text = TALLY
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "tally.py"
    file.write_text(text)
    return f"algorithm.user_files=[{file}]"
