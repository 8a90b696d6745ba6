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
        ids, mask = pad_rows([[*prompts[row], *found[row][0]] for row in now], 0, 40, "left")
        continued = Continued(torch.tensor([len(found[row][0]) for row in now]), at_most, keep)
        out = engine.generate(ids, mask, sampling, torch.tensor(now), continued=continued)
        assert out.weight_versions.tolist() == [engine.version] * len(now)
        for i, row in enumerate(now):
            own = out.response_mask[i].bool()
            found[row][0].extend(out.response_ids[i][own].tolist())
            found[row][1].extend(out.rollout_log_probs[i][own].tolist())
            if out.finish_reason[i] != "paused":
                going.remove(row)
        between(call)
        call += 1
    return found


def in_turns(engine, prompts, sampling, at_most, keep, count):
    """The tokens and log-probabilities of `count` turns of each prompt, with one to three tokens of
    an observation behind each; a row waits for a call or two, or for none."""
    rows, log_probs = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    due, left, call = [0] * len(rows), [count] * len(rows), -1
    while any(left):
        call += 1
        if not (own := [i for i, at in enumerate(due) if at <= call and left[i]]):
            continue
        ids, mask = pad_rows([rows[i] for i in own], 0, 50, "left")
        sampled = torch.tensor([len(rows[i]) - len(prompts[i]) for i in own])
        continued = Continued(sampled, at_most, keep, keep_ended=True)
        out = engine.generate(ids, mask, sampling, torch.tensor(own), continued=continued)
        for place, i in enumerate(own):
            new = out.response_mask[place].bool()
            rows[i] += out.response_ids[place, new].tolist()
            log_probs[i] += out.rollout_log_probs[place, new].tolist()
            if out.finish_reason[place] != "paused":
                left[i], due[i] = left[i] - 1, call + 1 + i % 3
                rows[i] += [7, 8, 9][: 1 + (i + left[i]) % 3]
                left[i] *= len(rows[i]) - len(prompts[i]) < sampling.max_new_tokens - 5
    return rows, log_probs
