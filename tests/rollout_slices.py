"""Responses that are generated in slices, in calls of an engine that rows join and leave."""

import torch

from quadriga.data.loader import pad_rows
from quadriga.rollout.base import Continued


def in_slices(engine, prompts, sampling, at_most, keep, between=lambda call: None):
    """The (tokens, log-probabilities) of each prompt. The second half begins in the second call.

    Args:
        prompts: rows of tokens; row i has the seed i.
        keep: rows whose caches the engine may keep.
        between: called with the number of each call that has ended.
    """
    found = [([], []) for _ in prompts]
    going, call = list(range(len(prompts))), 0
    while going:
        now = [row for row in going if call or row < len(prompts) / 2]
        ids, mask = pad_rows([prompts[row] + found[row][0] for row in now], 0, 40, "left")
        continued = Continued(torch.tensor([len(found[row][0]) for row in now]), at_most, keep)
        out = engine.generate(ids, mask, sampling, torch.tensor(now), continued=continued)
        for i, row in enumerate(now):
            own = out.response_mask[i].bool()
            found[row][0].extend(out.response_ids[i][own].tolist())
            found[row][1].extend(out.rollout_log_probs[i][own].tolist())
            if out.finish_reason[i] != "paused":
                going.remove(row)
        between(call)
        call += 1
    return found
