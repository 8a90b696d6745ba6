"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): draw more for zero-variance groups.

If all samples of a prompt group have the same score (a zero-variance prompt group), their
advantages are 0. Such a prompt group costs a rollout and an update without a gradient, and it
makes the effective batch smaller. "Groups" are prompt groups here.

Shapes: B samples, G prompt groups.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from quadriga.algorithms.registry import look_up
from quadriga.algorithms.shaping import groups_of_scores
from quadriga.algorithms.tensors import GroupIds
from quadriga.errors import AlgorithmError, GroupError

UnderFilledPolicy = Literal["proceed", "error"]
SamplingAction = Literal["train", "refill"]

UNDER_FILLED: dict[UnderFilledPolicy, str] = {
    "proceed": "train on the other groups; zero-variance groups with weight 0 fill up the batch",
    "error": "raise GroupError",
}


@dataclass(frozen=True)
class SamplingDecision:
    """What to do with the samples drawn so far.

    Attributes:
        action: "train" on `rows`, or "refill": keep `rows`, draw more groups and call
            `dynamic_sampling` again.
        rows: int64; the rows to keep: all rows of each kept group, in their order in the batch.
        kept: the number of groups among `rows` that are not zero-variance.
    """

    action: SamplingAction
    rows: Tensor
    kept: int


# Five groups of two samples; wanted_groups = 3:
#
#     group           a      b      c      d      e
#     rows            0 1    2 3    4 5    6 7    8 9
#     scores          0 1    1 1    0 0    .5 .5  1 .5
#     zero-variance   no     yes    yes    yes    no        2 groups are not, 1 is missing
#
# Before the bound:         action "refill", rows 0 1 8 9.
# At the bound, "proceed":  action "train", rows 0 1 2 3 8 9. Group b fills up the batch, which has
#                           the shape of three groups.
# At the bound, "error":    GroupError.
def dynamic_sampling(
    scores_B: Tensor,
    group_ids: GroupIds,
    *,
    wanted_groups: int,
    member_B: Tensor | None = None,
    gen_batches: int = 1,
    max_num_gen_batches: int = 3,
    under_filled: UnderFilledPolicy = "proceed",
) -> SamplingDecision:
    """Decide what to do with all samples drawn so far for one step.

    Args:
        scores_B: the reward of each sample.
        group_ids: the id of each sample's prompt; samples of a group need not be adjacent.
        wanted_groups: groups in a full batch.
        member_B: bool; samples that take part in the update. The others stay with their group, but
            their scores do not make it a group with variance. None: all samples.
        gen_batches: batches drawn so far for this step.
        max_num_gen_batches: the maximum of `gen_batches`.
        under_filled: a key of `UNDER_FILLED`; applies when the maximum is reached.

    Raises:
        GroupError: there are no samples, or groups are missing and `under_filled` is "error".
        UnknownNameError: `under_filled` is unknown.
        AlgorithmError: `wanted_groups` or `max_num_gen_batches` is below 1.
        ShapeError, NonFiniteError.
    """
    look_up(UNDER_FILLED, under_filled, "policy for under-filled batches")
    if wanted_groups < 1 or max_num_gen_batches < 1:
        raise AlgorithmError(
            f"`wanted_groups` and `max_num_gen_batches` must be at least 1, but received "
            f"{wanted_groups} and {max_num_gen_batches}."
        )
    groups = groups_of_scores(scores_B, group_ids)
    if member_B is not None:
        groups = replace(groups, member_B=member_B)
    varied = groups.nonzero_variance_G(scores_B)
    num_varied = int(varied.sum())
    missing = max(wanted_groups - num_varied, 0)
    action: SamplingAction = "train"
    if missing and gen_batches < max_num_gen_batches:
        action, chosen = "refill", varied
    elif missing and under_filled == "error":
        raise GroupError(
            f"{num_varied} of {groups.num_groups} prompt groups are not zero-variance after "
            f"{gen_batches} batches of rollouts, {missing} fewer than the {wanted_groups} wanted. "
            f"Choose prompts that are neither too easy nor too hard, raise max_num_gen_batches "
            f"({max_num_gen_batches}), or set under_filled=proceed.",
            tensor="scores",
            wanted=wanted_groups,
            got=num_varied,
        )
    else:
        chosen = _fill(varied, wanted_groups)
    rows = chosen[groups.index_B].nonzero()[:, 0]
    return SamplingDecision(action, rows, kept=int((chosen & varied).sum()))


def _fill(varied_G: Tensor, wanted: int) -> Tensor:
    """Return bool [G], True for `wanted` groups: zero-variance ones last, each in batch order."""
    # `~varied` is 1 for zero-variance groups, and a stable sort keeps the order of equal keys:
    # varied T F F F T → order 0 4 1 2 3 → the first three are groups 0, 4 and 1.
    order = torch.argsort(~varied_G, stable=True)[:wanted]
    chosen = torch.zeros_like(varied_G)
    chosen[order] = True
    return chosen
