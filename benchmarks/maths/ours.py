"""Quadriga's side of the speed comparison: functions to measure, on the inputs of `inputs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maths import inputs
from quadriga.algorithms.advantages import compute_advantages
from quadriga.models.log_probs import linear_log_probs
from quadriga.parallel.balancing import get_seqlen_balanced_partitions

FORMS = ("naive", "linear")


def advantage_call(name: str) -> Callable[[], Any]:
    """Return a function that computes advantages with an estimator."""
    data = inputs.advantage_inputs()
    rewards, values, mask = (torch.from_numpy(data[k]) for k in ("rewards", "values", "mask"))
    return lambda: compute_advantages(
        name,
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        group_ids=data["groups"],
        values_BT=values,
        gamma=inputs.GAMMA,
        lam=inputs.LAM,
    )


def balance_call(name: str) -> Callable[[], Any]:
    """Return a function that balances a batch over partitions of unequal sizes."""
    lengths, parts = inputs.balance_lengths(name)
    return lambda: get_seqlen_balanced_partitions(lengths, parts, equal_size=False)


def logits_call(form: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that computes a policy-gradient loss from hidden states, and its gradients.

    The loss needs log-probabilities and entropies. Forms: "naive" (logits, log-softmax, gather),
    "linear" (`linear_log_probs`). The function returns the gradients of hidden states and weight.
    """
    data = {key: torch.from_numpy(value) for key, value in inputs.logit_inputs().items()}
    hidden, weight, labels = data["hidden"], data["weight"], data["labels"]
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    advantages, count = data["advantages"], len(labels)

    def loss_of(log_prob: Tensor, entropy: Tensor, start: int, stop: int) -> Tensor:
        return (-(advantages[start:stop] * log_prob).sum() - 0.01 * entropy.sum()) / count

    def run() -> tuple[Tensor, Tensor]:
        hidden.grad = weight.grad = None
        if form == "linear":
            loss = loss_of(*linear_log_probs(hidden, weight, labels), 0, count)
        else:
            log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            loss = loss_of(log_p.gather(1, labels[:, None])[:, 0], entropy, 0, count)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return hidden.grad, weight.grad

    return run
