"""Log-probabilities and entropies against `log_softmax` in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.errors import AlgorithmError, ShapeError
from quadriga.models.log_probs.linear_log_prob import chunk_cuts, linear_log_probs, linear_loss
from quadriga.models.log_probs.log_prob import (
    entropy_from_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def naive(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.double() / temperature, dim=-1)
    chosen = log_p.gather(-1, labels[..., None])[..., 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def problem(
    count: int, vocabulary: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.randn(count, size),
        torch.randn(vocabulary, size),
        torch.randint(0, vocabulary, (count,)),
        torch.randn(count),
        torch.randn(count),
    )


def test_two_logits_by_hand() -> None:
    # p = (1/4, 3/4): log p(1) = log 3/4, H = log 4 − 3/4·log 3.
    logits = torch.tensor([[0.0, torch.tensor(3.0).log()]])
    log_prob, entropy = log_probs_and_entropy(logits, torch.tensor([1]))
    assert log_prob.item() == pytest.approx(-0.2876820724)
    assert entropy.item() == pytest.approx(0.5623351446)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize(("entropy", "shape"), [(True, (3, 5, 11)), (False, (7, 300_000))])
def test_values_and_gradients_from_logits(
    temperature: float, entropy: bool, shape: tuple[int, ...]
) -> None:
    logits = (4 * torch.randn(shape)).requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:-1])
    got = log_probs_and_entropy(logits, labels, temperature, entropy=entropy)
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
    got = log_probs_from_logits(logits, labels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), naive(logits, labels, 1.0)[0], rtol=1e-6, atol=1e-5)
    got.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_infinite_and_huge_logits_give_finite_results() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [1e4, -1e4, 0.0]], requires_grad=True)
    entropy = entropy_from_logits(logits)
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
            pair = linear_log_probs(h, w, labels, temperature, tile_elements=tile)
        else:
            pair = naive(h @ w.T, labels, temperature)
        ((a * pair[0]).sum() + (b * pair[1]).sum()).backward()
        outcomes.append([*pair, h.grad, w.grad])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_linear_log_probs_splits_rows_and_keeps_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quadriga.models.log_probs.linear_log_prob._TILE_ROWS", 4)
    hidden, weight, labels, a, _ = problem(10, 13, 3)
    hidden = hidden.requires_grad_()
    got, entropy = linear_log_probs(
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
    linear_log_probs(hidden, weight, labels)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    half_h = hidden.detach().bfloat16().requires_grad_()
    half_w = weight.bfloat16().requires_grad_()
    got, _ = linear_log_probs(half_h, half_w, labels, tile_elements=64)
    assert got.dtype == torch.float32
    want = naive(half_h @ half_w.T, labels, 1.0)[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert half_w.grad is not None and half_w.grad.dtype == torch.bfloat16
    reference = torch.autograd.grad(want.sum(), half_w)[0]
    torch.testing.assert_close(half_w.grad, reference, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [1, 120, None])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_linear_loss_values_and_gradients(
    size: tuple[int, int, int], chunk: int | None, coefficient: float
) -> None:
    hidden, weight, labels, a, _ = problem(*size)

    def loss_of(log_prob: Tensor, entropy: Tensor, start: int, stop: int) -> Tensor:
        ratio = (log_prob - log_prob.detach() + 0.1).exp()
        loss = (a[start:stop] * ratio).sum()
        return loss if coefficient == 0 else loss - coefficient * entropy.sum()

    outcomes = []
    for folded in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if folded:
            loss = linear_loss(h, w, labels, loss_of, 0.8, chunk_elements=chunk).loss
        else:
            log_prob, entropy = naive(h @ w.T, labels, 0.8)
            loss = loss_of(log_prob, entropy, 0, len(labels))
        (2 * loss).backward()
        outcomes.append([loss, h.grad, w.grad])
    for want, got in zip(*outcomes, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_linear_loss_returns_metrics_and_respects_boundaries() -> None:
    hidden, weight, labels, _, _ = problem(9, 10, 4)
    seen: list[tuple[int, int]] = []

    def loss_of(log_prob: Tensor, entropy: Tensor, start: int, stop: int) -> Tensor:
        seen.append((start, stop))
        return log_prob.sum()

    result = linear_loss(
        hidden.requires_grad_(), weight, labels, loss_of, boundaries=[0, 3, 4, 9], chunk_elements=40
    )
    assert seen == [(0, 4), (4, 9)]  # chunks of 4 tokens; the last sequence has 5
    want = naive(hidden @ weight.T, labels, 1.0)
    torch.testing.assert_close(result.log_prob.double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy.double(), want[1], rtol=1e-5, atol=1e-5)
    assert not result.log_prob.requires_grad


def test_linear_loss_without_gradient() -> None:
    hidden, weight, labels, _, _ = problem(4, 5, 3)
    result = linear_loss(hidden, weight, labels, lambda lp, ent, a, b: (lp + ent).sum())
    assert not result.loss.requires_grad
    assert result.loss.item() == pytest.approx(float((result.log_prob + result.entropy).sum()))


def test_chunk_cuts_by_hand() -> None:
    assert chunk_cuts(10, 4, None) == [0, 4, 8, 10]
    assert chunk_cuts(10, 4, [0, 2, 3, 9, 10]) == [0, 3, 9, 10]
    assert chunk_cuts(10, 100, [0, 5, 10]) == [0, 10]


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


@pytest.mark.parametrize("form", ["linear_log_probs", "linear_loss"])
def test_no_tensor_of_all_logits_is_created(form: str) -> None:
    count, vocabulary, size = 256, 512, 8
    hidden, weight, labels, a, _ = problem(count, vocabulary, size)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as largest:
        if form == "linear_log_probs":
            log_prob, entropy = linear_log_probs(hidden, weight, labels, tile_elements=8192)
            loss = (a * log_prob).sum() - entropy.sum()
        else:
            loss = linear_loss(
                hidden,
                weight,
                labels,
                lambda lp, ent, s, t: (a[s:t] * lp).sum() - ent.sum(),
                chunk_elements=8192,
            ).loss
        loss.backward()
    assert largest.elements <= max(8192, vocabulary * size)
    assert largest.elements * 8 <= count * vocabulary


def test_invalid_inputs_are_rejected() -> None:
    hidden, weight, labels, _, _ = problem(4, 5, 3)
    with pytest.raises(ShapeError, match=r"`labels` has shape \[3\], but \[4\]"):
        log_probs_from_logits(hidden, labels[:3])
    with pytest.raises(AlgorithmError, match="`temperature` must be above 0"):
        log_probs_from_logits(hidden, labels, 0.0)
    with pytest.raises(ShapeError, match=r"`weight` has shape \[5, 2\]"):
        linear_log_probs(hidden, weight[:, :2], labels)
    with pytest.raises(ShapeError, match="`boundaries` must rise from 0 to 4"):
        linear_loss(hidden, weight, labels, lambda lp, e, a, b: lp.sum(), boundaries=[0, 3])
