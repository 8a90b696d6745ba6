"""Aggregation modes against the reference implementation and numbers computed by hand."""

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import Case, cases
from hypothesis import given, settings

from quadriga.algorithms.aggregation import AGGREGATIONS, aggregate, count_mask
from quadriga.errors import AlgorithmError, MaskError, ShapeError, UnknownNameError

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_modes_against_the_reference(mode: str, case: Case) -> None:
    tokens, sequences = count_mask(case.mask)
    got = aggregate(
        case.values, case.mask, mode, global_tokens=tokens, global_sequences=sequences,
        loss_scale_length=7,
    )  # fmt: skip
    rows = [
        [case.values[i, t] for t in positions]
        for i, positions in enumerate(ref.token_positions(case.mask))
    ]
    torch.testing.assert_close(got, torch.as_tensor(ref.aggregate(rows, mode, 7.0)))


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_batch_without_tokens_has_loss_and_gradient_zero(mode: str) -> None:
    loss = LOSS.clone().requires_grad_()
    got = aggregate(loss, MASK * 0, mode, global_tokens=0, global_sequences=0, loss_scale_length=5)
    got.backward()
    assert got.item() == 0.0 and not loss.grad.any()


def test_count_mask_excludes_empty_sequences() -> None:
    assert [int(n) for n in count_mask(MASK)] == [4, 2]


def test_invalid_arguments_raise() -> None:
    def call(mode: str = "token-mean", mask: torch.Tensor = MASK) -> None:
        aggregate(LOSS, mask, mode, global_tokens=4, global_sequences=2)

    with pytest.raises(UnknownNameError, match=r"no aggregation 'token_mean'.* mean 'token-"):
        call("token_mean")
    with pytest.raises(AlgorithmError, match="`loss_scale_length`, which must be a positive"):
        call("seq-mean-token-sum-norm")
    with pytest.raises(ShapeError, match=r"`loss` has shape \[3, 3\], but `loss_mask` has"):
        call(mask=MASK[:, :2])
    with pytest.raises(MaskError, match="`loss_mask` must hold only 0 and 1, but row 0 holds 2"):
        call(mask=2 * MASK)
