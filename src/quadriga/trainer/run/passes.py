"""The passes over a batch without gradient: log-probabilities, reference, values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.workers.objectives import mask_with_advantage

if TYPE_CHECKING:
    from quadriga.trainer.run.groups import PPOGroups


def submit_passes(
    groups: PPOGroups, batch: DataProto, *, log_probs: bool, with_advantage: bool
) -> list[DataProtoFuture]:
    """Start the passes that the run has, and return the futures of their fields.

    `submit` does not wait: roles on different processes compute side by side.

    Args:
        log_probs: whether the old log-probabilities have a pass of their own.
        with_advantage: leave out rows whose advantages are all 0; what is computed is 0 there.
    """
    rows = rows_with_advantage(batch) if with_advantage else batch
    pending = []
    if log_probs:
        pending.append(groups.actor.compute_log_prob.submit(rows))
    if groups.ref:
        pending.append(groups.ref.compute_ref_log_prob.submit(rows))
    if groups.critic:
        pending.append(groups.critic.compute_values.submit(rows))
    return pending


def rows_with_advantage(batch: DataProto) -> DataProto:
    """Return a batch with the same fields, but response mask 0 where all advantages of a row are 0.

    The given batch keeps its mask.
    """
    mask = mask_with_advantage(batch.batch[fields.RESPONSE_MASK], batch.batch[fields.ADVANTAGES])
    rows = batch.select()
    rows.batch[fields.RESPONSE_MASK] = mask
    return rows
