"""The worker that trains a reward model on pairs of responses.

If every micro-batch has whole pairs, their loss is computed from its scores. If the two responses
of a pair are in different micro-batches, or adapters drop inputs, a first pass computes all scores
without gradients, and with them the derivative of the loss by each score. A second pass adds up
derivative × score, whose gradient is that of the loss, however the rows are split.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quadriga.config.commands import RMConfig
from quadriga.data.pairs import MARGINS
from quadriga.engines.base import VALUES
from quadriga.errors import LengthError, WorkerError
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.single_controller import (
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.single_controller.batch_modes import dispatch_by_mesh
from quadriga.single_controller.call import GroupView, Split
from quadriga.workers.method_fields import MODEL_INPUTS
from quadriga.workers.runtime import RankRuntime, prepare_rank, register_engine_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quadriga.checkpoint.files import SavedFile
    from quadriga.engines.base import Outputs, TrainEngine

_SLOPES = "slopes"
"""The derivative of the loss by the score of each row, [B]."""
_ROWS = "rows"
"""The number of each row in its batch, [B]: rows 2p and 2p + 1 are pair p."""


_MESH = "reward_model"


def _dispatch_pairs(view: GroupView, /, data: object) -> Split:
    """Split by data-parallel rank, with both rows of a pair in one part.

    A future that is pending is split as in other modes.

    Raises `LengthError` if the pairs do not divide and padding is off, or a row has no partner.
    """
    from quadriga.single_controller.padding import add_padding

    if isinstance(data, DataProtoFuture) and (arrived := data.arrived()) is not None:
        data = arrived
    parts = max(view.dispatch_info(_MESH)) + 1
    if isinstance(data, DataProto) and len(data) % (2 * parts):
        rows = len(data)
        if rows % 2 or not data.is_padding_enabled():
            remedy = "" if rows % 2 else ", or enable padding (auto_padding=True)"
            raise LengthError(
                f"{view.method}: expected pairs of neighbouring rows that divide into {parts} "
                f"equal parts, got {rows} rows. Pass a multiple of {2 * parts} rows{remedy}."
            )
        data = add_padding(view, "argument 'data'", data, parts, unit=2)
    return dispatch_by_mesh(_MESH, view, data)


class PairTrainingWorker(Worker):
    """A reward model that is trained, in one rank.

    Args:
        config: settings of `quadriga rm`.
        runtime: what every rank is told about the run.
    """

    def __init__(self, config: RMConfig, runtime: RankRuntime | None = None) -> None:
        super().__init__()
        self.config = config
        self.runtime = runtime or RankRuntime()
        self.device = prepare_rank(self.runtime)
        self.engine: TrainEngine | None = None
        register_engine_ranks(self, _MESH, config.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model with its head. A head that the folder does not have is zero."""
        from quadriga.engines import build_engine

        self.engine = build_engine(
            self.config.model,
            self.config.engine,
            self.config.optim,
            head="score",
            device=self.device,
            total_steps=self.runtime.total_steps,
        )

    @register(
        dispatch_mode={
            **make_nd_compute_dataproto_dispatch_fn(_MESH),
            "dispatch_fn": _dispatch_pairs,
        }
    )
    def update_rm(self, data: DataProto) -> DataProto:
        """Take one optimizer step. See `update_pairs`."""
        size = self.config.data.micro_batch_size_per_gpu
        return update_pairs(
            self._engine(),
            data,
            size,
            forward_rows=self.config.engine.forward_rows(size),
            drops=self.config.model.lora.dropout > 0,
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(_MESH))
    def compute_pair_scores(self, data: DataProto) -> DataProto:
        """Compute `rm_scores` [B, R] float32: the score where `response_mask` is 1, 0 elsewhere."""
        rows = {key: data.batch[key] for key in MODEL_INPUTS}
        return DataProto.from_dict(tensors={fields.RM_SCORES: self._scores(rows)})

    def _scores(self, rows: Mapping[str, Tensor]) -> Tensor:
        size = self.config.engine.forward_rows(self.config.data.micro_batch_size_per_gpu)
        return self._engine().forward(rows, micro_batch_size=size)[VALUES]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int) -> list[SavedFile]:
        """Save the shard of this rank under `path`, as of `step`. Return its files."""
        return self._engine().save(path, step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, step: int) -> None:
        """Load a folder of `save_checkpoint` that was saved at `step`."""
        self._engine().load(path, step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_hf(self, path: str) -> None:
        """Write the model as a sequence classifier with its tokenizer."""
        self._engine().save_hf(path)

    def _engine(self) -> TrainEngine:
        if self.engine is None:
            raise WorkerError(
                f"rank {self.rank} with role 'reward_model' has no training engine: call "
                "init_model first",
                role="reward_model",
                rank=self.rank,
            )
        return self.engine


def update_pairs(
    engine: TrainEngine,
    data: DataProto,
    micro_batch_size: int | None,
    *,
    forward_rows: int | None,
    drops: bool = False,
) -> DataProto:
    """Take one optimizer step on the mean loss of the pairs of all ranks.

    Args:
        data: rows of `PairDataset.collate`; the two rows of a pair are neighbours.
        micro_batch_size: sequences of a micro-batch; None: split by tokens.
        forward_rows: the same of the pass without gradients, if there is one.
        drops: whether adapters drop inputs in an update. The loss is that of scores without
            dropout, so the pass without gradients is made always.

    Returns:
        `meta_info["metrics"]`: `rm/loss` in nats per pair, `rm/accuracy`, `rm/difference`, and the
        metrics of the engine.

    Raises:
        LengthError: on a rank, a row has no partner.
    """
    import torch

    from quadriga.protocol.dataproto import padding_rows
    from quadriga.workers.updates import rows_of_update

    rows = rows_of_update(data, MODEL_INPUTS)
    plan = engine.micro_batches(rows, micro_batch_size=micro_batch_size)
    real_P = ~padding_rows(data)[0::2]
    pairs, odd, split = engine.global_counts(
        real_P.sum(), len(data) % 2, drops or not all(map(_has_whole_pairs, plan))
    )
    if odd:  # on all ranks: one alone would leave the others in a collective
        raise LengthError(
            f"update_rm: expected whole pairs of neighbouring rows on every rank, but {odd:.0f} "
            f"ranks have an odd number of rows ({len(data)} on this one). Split the batch into "
            "parts of whole pairs."
        )
    margin_B = data.batch[MARGINS]
    if split:
        scores_B = engine.forward(rows, micro_batch_size=forward_rows)[VALUES].sum(-1)
        slope_P, found = _loss_of_pairs(scores_B, margin_B)
        slope_P = slope_P * real_P / pairs
        rows[_SLOPES] = torch.stack([-slope_P, slope_P], dim=1).flatten()
        metrics = engine.train_step(rows, _weighted_scores, micro_batch_size=micro_batch_size)
        totals = engine.global_counts(*(values_P[real_P].sum() for values_P in found.values()))
        metrics |= {name: total / pairs for name, total in zip(found, totals, strict=True)}
    else:
        rows |= {_ROWS: torch.arange(len(data)), MARGINS: margin_B}
        share = partial(_share_of_loss, pairs=pairs)
        metrics = engine.train_step(rows, share, micro_batch_size=micro_batch_size)
    return DataProto(meta_info={"metrics": {f"rm/{k}": v for k, v in metrics.items()}})


def _has_whole_pairs(micro_batch: Tensor | None) -> bool:
    """Return whether the rows of a micro-batch are pairs; None has none."""
    if micro_batch is None:
        return True
    in_order = micro_batch.sort().values
    first, second = in_order[0::2], in_order[1::2]
    return len(first) == len(second) and bool(((first % 2 == 0) & (second == first + 1)).all())


def _loss_of_pairs(scores_B: Tensor, margin_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the derivative of the loss by the rejected scores, and what is reported, all [P].

    The rows of a pair are neighbours.
    """
    from quadriga.algorithms.pairwise_loss import pairwise_loss

    chosen_P, rejected_P = scores_B[0::2], scores_B[1::2]
    loss = pairwise_loss(chosen_P, rejected_P, margin_B[0::2])
    return loss.slope_P, {
        "loss": loss.loss_P,
        "accuracy": (chosen_P > rejected_P).float(),
        "difference": chosen_P - rejected_P,
    }


def _share_of_loss(
    outputs: Outputs, micro: Mapping[str, Tensor], *, pairs: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of the mean loss that the pairs of a micro-batch have, and of the means."""
    order = micro[_ROWS].argsort()
    _, found = _loss_of_pairs(outputs[VALUES].sum(-1)[order], micro[MARGINS][order])
    shares = {name: values_P.sum() / pairs for name, values_P in found.items()}
    return shares.pop("loss"), {name: share.detach() for name, share in shares.items()}


def _weighted_scores(
    outputs: Outputs, micro: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Return Σ derivative × score, whose gradient is that of the loss."""
    return (outputs[VALUES].sum(-1) * micro[_SLOPES]).sum(), {}
