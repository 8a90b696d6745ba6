"""Log-probabilities and entropies against `log_softmax` in float64."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.algorithms.full_kl import kl_full
from quadriga.errors import AlgorithmError, ShapeError
from quadriga.models import log_probs


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def naive(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    chosen = log_p.gather(-1, labels[..., None])[..., 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def problem(count: int, vocabulary: int, size: int) -> list[Tensor]:
    hidden, weight = torch.randn(count, size), torch.randn(vocabulary, size)
    labels = torch.randint(0, vocabulary, (count,))
    return [hidden, weight, labels, torch.randn(count), torch.randn(count)]


def test_two_logits_by_hand() -> None:
    # p = (1/4, 3/4): log p(1) = log 3/4, H = log 4 − 3/4·log 3.
    logits = torch.tensor([[0.0, torch.tensor(3.0).log()]])
    log_prob, entropy = log_probs.log_probs_and_entropy(logits, torch.tensor([1]))
    assert log_prob.item() == pytest.approx(-0.2876820724)
    assert entropy.item() == pytest.approx(0.5623351446)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize(("entropy", "shape"), [(True, (3, 5, 11)), (False, (7, 300_000))])
def test_values_and_gradients_from_logits(
    temperature: float, entropy: bool, shape: tuple[int, ...]
) -> None:
    logits = (4 * torch.randn(shape)).requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:-1])
    got = log_probs.log_probs_and_entropy(logits, labels, temperature, entropy=entropy)
    want = naive(logits, labels, temperature)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    weights = torch.randn(2, *labels.shape)
    used = 2 if entropy else 1
    if entropy:
        torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    grads = [
        torch.autograd.grad((weights[:used] * torch.stack(pair[:used])).sum(), logits)[0]
        for pair in (got, want)
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits = torch.randn(4, 32_768).bfloat16().requires_grad_()
    labels = torch.randint(0, 32_768, (4,))
    got = log_probs.log_probs_from_logits(logits, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), naive(logits, labels, 1.0)[0], rtol=1e-6, atol=1e-5)
    got.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_infinite_and_huge_logits_give_finite_results() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1e4, -1e4, 0.0]], requires_grad=True)
    entropy = log_probs.entropy_from_logits(logits)
    assert entropy.tolist() == pytest.approx([0.6931472, 0.0])
    entropy.sum().backward()
    assert logits.grad is not None and bool(torch.isfinite(logits.grad).all())


# (tokens, vocabulary, hidden size). The tiles below divide neither rows nor columns evenly.
SIZES = [(1, 2, 3), (5, 17, 4), (33, 101, 8)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tile", [1, 7, 64, None])
def test_values_and_gradients_from_hidden_states(
    size: tuple[int, int, int], temperature: float, tile: int | None
) -> None:
    hidden, weight, labels, a, b = problem(*size)
    outcomes = []
    for form in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if form:
            pair = log_probs.linear_log_probs(h, w, labels, temperature, tile_elements=tile)
        else:
            pair = naive(h @ w.T, labels, temperature)
        ((a * pair[0]).sum() + (b * pair[1]).sum()).backward()
        outcomes.append([*pair, h.grad, w.grad])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_linear_log_probs_splits_rows_and_keeps_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quadriga.models.log_probs._TILE_ROWS", 4)
    hidden, weight, labels, a, _ = problem(10, 13, 3)
    hidden = hidden.requires_grad_()
    got, entropy = log_probs.linear_log_probs(
        hidden.view(2, 5, 3), weight, labels.view(2, 5), tile_elements=20, entropy=False
    )
    want = naive(hidden @ weight.T, labels, 1.0)[0]
    assert got.shape == (2, 5) and not entropy.any()
    torch.testing.assert_close(got.view(-1).double(), want, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad((a * x.view(-1)).sum(), hidden)[0] for x in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_linear_log_probs_with_frozen_weight_and_with_bfloat16() -> None:
    hidden, weight, labels, _, _ = problem(6, 40, 8)
    hidden = hidden.requires_grad_()
    log_probs.linear_log_probs(hidden, weight, labels)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    half_h = hidden.detach().bfloat16().requires_grad_()
    half_w = weight.bfloat16().requires_grad_()
    got, _ = log_probs.linear_log_probs(half_h, half_w, labels, tile_elements=64)
    assert got.dtype == torch.float32
    want = naive(half_h @ half_w.T, labels, 1.0)[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert half_w.grad is not None and half_w.grad.dtype == torch.bfloat16
    reference = torch.autograd.grad(want.sum(), half_w)[0]
    torch.testing.assert_close(half_w.grad, reference, rtol=5e-2, atol=5e-2)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = fn(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def test_no_tensor_of_all_logits_is_created() -> None:
    count, vocabulary, size = 256, 512, 8
    hidden, weight, labels, a, _ = problem(count, vocabulary, size)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as largest:
        log_prob, entropy = log_probs.linear_log_probs(hidden, weight, labels, tile_elements=8192)
        ((a * log_prob).sum() - entropy.sum()).backward()
    assert largest.elements <= max(8192, vocabulary * size) <= count * vocabulary / 8


def test_invalid_inputs_are_rejected() -> None:
    hidden, _, labels, _, _ = problem(4, 5, 3)
    with pytest.raises(ShapeError, match=r"`labels` has shape \[3\], but \[4\]"):
        log_probs.log_probs_from_logits(hidden, labels[:3])
    with pytest.raises(AlgorithmError, match="`temperature` must be above 0"):
        log_probs.log_probs_from_logits(hidden, labels, 0.0)


VOCABULARY = 7


class TwoRanks:
    """Two ranks in two threads, which meet at each all-reduce."""

    def __init__(self, monkeypatch):
        self.own, self.barrier, self.sent = local(), Barrier(2, timeout=60), {}
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        self.sent[self.own.rank] = tensor.clone()
        self.barrier.wait()
        both = torch.stack([self.sent[0], self.sent[1]])
        tensor.copy_(both.amax(0) if op == dist.ReduceOp.MAX else both.sum(0))
        self.barrier.wait()

    def run(self, work):
        def on(rank):
            self.own.rank = rank
            return work(rank)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(on, range(2)))


@pytest.mark.parametrize("cut", [3, 6, 7], ids=["even", "uneven", "a rank without tokens"])
@pytest.mark.parametrize("tile", [1, None])
@pytest.mark.parametrize("entropy", [True, False])
def test_ranks_that_split_the_vocabulary(monkeypatch, cut, tile, entropy):
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=random, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 4, generator=random, dtype=torch.float64) * 30
    labels = torch.tensor([0, 6, 2, 5, 6])
    scale = torch.randn(2, 5, generator=random, dtype=torch.float64)

    def loss(log_prob, ent):
        return (log_prob * scale[0]).sum() + (ent * scale[1]).sum() * entropy

    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = log_probs.log_probs_and_entropy(whole[0] @ whole[1].T, labels, 0.7, entropy=entropy)
    loss(*expected).backward()
    ranks = TwoRanks(monkeypatch)
    spans = [(0, cut), (cut, VOCABULARY)]
    own = [
        [hidden.clone().requires_grad_(), weight[a:b].clone().requires_grad_()] for a, b in spans
    ]

    def forward(rank):
        return log_probs.linear_log_probs(
            *own[rank], labels - spans[rank][0], 0.7, group=ranks, entropy=entropy,
            tile_elements=tile,
        )  # fmt: skip

    # The backward passes run in the threads of autograd, one after another: their single
    # all-reduce is left out, and the sum is made here.
    outputs = ranks.run(forward)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    for log_prob, ent in outputs:
        torch.testing.assert_close((log_prob, ent), expected, rtol=1e-9, atol=1e-12)
        loss(log_prob, ent).backward()
    torch.testing.assert_close(own[0][0].grad + own[1][0].grad, whole[0].grad)
    torch.testing.assert_close(torch.cat([own[0][1].grad, own[1][1].grad]), whole[1].grad)


# Tokens, vocabulary, hidden sizes of policy and reference.
KL_SIZES = [(1, 2, 3, 3), (5, 17, 4, 6), (33, 101, 8, 8), (0, 4, 3, 3)]


def kl_problem(tokens: int, vocabulary: int, size: int, ref_size: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, size), (vocabulary, size), (tokens, ref_size), (vocabulary, ref_size)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("size", KL_SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 300, None])
def test_full_kl_values_and_gradients(size, temperature: float, chunk: int | None) -> None:
    h, w, h_ref, w_ref = kl_problem(*size)
    upstream = torch.linspace(-1, 1, size[0])
    outcomes = []
    for linear in (False, True):
        hidden, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
        if linear:
            kl = log_probs.linear_full_kl(
                hidden, weight, h_ref, w_ref, temperature, chunk_elements=chunk
            )
        else:
            kl = kl_full((hidden @ weight.T).double(), (h_ref @ w_ref.T).double(), temperature)
        kl.backward(upstream.to(kl.dtype))
        outcomes.append([kl.double(), hidden.grad.double(), weight.grad.double()])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_full_kl_in_bfloat16_with_frozen_weight() -> None:
    h, w, h_ref, w_ref = kl_problem(9, 40, 8, 8, torch.bfloat16)
    hidden = h.requires_grad_()
    kl = log_probs.linear_full_kl(hidden, w, h_ref, w_ref, chunk_elements=100)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, kl_full(h @ w.T, h_ref @ w_ref.T), rtol=1e-4, atol=1e-4)
    kl.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16 and w.grad is None
