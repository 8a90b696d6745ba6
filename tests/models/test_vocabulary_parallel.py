"""Log-probabilities over a vocabulary that is split, against those of all logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from quadriga.models.log_probs.log_prob import log_probs_and_entropy
from quadriga.models.log_probs.vocabulary_parallel import vocabulary_parallel_log_probs
from quadriga.parallel.distributed import init_distributed

VOCABULARY = 7


class TwoRanks:
    """Two ranks in two threads, which meet at each all-reduce."""

    def __init__(self, monkeypatch):
        from threading import Barrier, local

        self.own, self.barrier, self.sent = local(), Barrier(2, timeout=60), {}
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        self.sent[self.own.rank] = tensor.clone()
        self.barrier.wait()
        both = torch.stack([self.sent[0], self.sent[1]])
        tensor.copy_(both.amax(0) if op == dist.ReduceOp.MAX else both.sum(0))
        self.barrier.wait()

    def run(self, work):
        from concurrent.futures import ThreadPoolExecutor

        def on(rank):
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(on, range(2)))


@pytest.mark.parametrize("cut", [3, 6, 7], ids=["even", "uneven", "a rank without tokens"])
@pytest.mark.parametrize("block_logits", [1, 2**20])
@pytest.mark.parametrize("entropy", [True, False])
def test_values_and_gradients_are_those_of_all_logits(monkeypatch, cut, block_logits, entropy):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 4, generator=random, dtype=torch.float64) * 30
    labels = torch.tensor([0, 6, 2, 5, 6])
    scale = torch.randn(2, 5, generator=random, dtype=torch.float64)

    def loss(log_prob, ent):
        return (log_prob * scale[0]).sum() + (ent * scale[1]).sum() * entropy

    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = log_probs_and_entropy(whole[0] @ whole[1].T, labels, 0.7, entropy=entropy)
    loss(*expected).backward()
    ranks = TwoRanks(monkeypatch)
    spans = [(0, cut), (cut, VOCABULARY)]
    own = [
        [hidden.clone().requires_grad_(), weight[a:b].clone().requires_grad_()] for a, b in spans
    ]

    def forward(rank):
        return vocabulary_parallel_log_probs(
            *own[rank],
            labels,
            0.7,
            first=spans[rank][0],
            vocabulary=VOCABULARY,
            group=None,
            entropy=entropy,
            block_logits=block_logits,
        )

    # The backward passes run in the threads of autograd, one after another: their single
    # all-reduce is left out, and the sum is made here.
    outputs = ranks.run(forward)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    for log_prob, ent in outputs:
        torch.testing.assert_close((log_prob, ent), expected, rtol=1e-9, atol=1e-12)
        loss(log_prob, ent).backward()
    torch.testing.assert_close(own[0][0].grad + own[1][0].grad, whole[0].grad)
    torch.testing.assert_close(torch.cat([own[0][1].grad, own[1][1].grad]), whole[1].grad)


def test_one_rank_needs_no_other():
    init_distributed()
    hidden, weight = torch.randn(3, 4), torch.randn(VOCABULARY, 4)
    labels = torch.tensor([1, 2, 3])
    found = vocabulary_parallel_log_probs(
        hidden, weight, labels, first=0, vocabulary=VOCABULARY, group=dist.group.WORLD
    )
    torch.testing.assert_close(found, log_probs_and_entropy(hidden @ weight.T, labels))
