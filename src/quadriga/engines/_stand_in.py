"""Log-probabilities and entropy of given labels, from logits."""

from __future__ import annotations

from torch import Tensor


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """[..., V] logits and [...] labels -> [...] nats at `temperature`."""
    scores = logits.float() / temperature
    return scores.gather(-1, labels[..., None])[..., 0] - scores.logsumexp(-1)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[..., V] logits -> [...] entropy in nats at `temperature`."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)
