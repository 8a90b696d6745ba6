"""Masked sums, means, variances and whitening; discounted sums; mergeable metrics."""

import math

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import NAN, Case, cases
from hypothesis import given, settings, strategies as st

from quadriga.algorithms import tensors
from quadriga.algorithms.aggregation import Partial, merge_partials

VALUES = torch.tensor([[1.0, NAN, 3.0], [5.0, 7.0, NAN]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])


def test_masked_statistics_by_hand() -> None:
    assert tensors.masked_sum(VALUES, MASK).item() == 16.0
    assert tensors.masked_sum(VALUES, MASK, dim=1).tolist() == [4.0, 12.0]
    assert tensors.masked_mean(VALUES, MASK).item() == 4.0
    assert tensors.masked_mean(VALUES, MASK, dim=1).tolist() == [2.0, 6.0]
    assert tensors.masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(5.0)
    assert tensors.masked_var(VALUES, MASK).item() == pytest.approx(20 / 3)
    white = tensors.masked_whiten(VALUES, MASK)
    step = 1 / math.sqrt(20 / 3)
    assert white.flatten().tolist() == pytest.approx(
        [-3 * step, 0, -step, step, 3 * step, 0], abs=1e-6
    )
    kept = tensors.masked_whiten(VALUES, MASK, shift_mean=False)
    assert kept.flatten().tolist() == pytest.approx(
        [4 - 3 * step, 0, 4 - step, 4 + step, 4 + 3 * step, 0], abs=1e-6
    )


def test_statistics_of_an_empty_mask_are_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert tensors.masked_mean(VALUES, nothing).item() == 0.0
    assert tensors.masked_var(VALUES, nothing).item() == 0.0
    assert not tensors.masked_whiten(VALUES, nothing).any()


def test_one_value_or_equal_values_whiten_to_exactly_zero() -> None:
    one = torch.tensor([[True, False, False], [False] * 3])
    assert not tensors.masked_whiten(VALUES, one).any()
    assert not tensors.masked_whiten(torch.full((50, 7), 0.1), torch.ones(50, 7)).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.sampled_from([0.0, 0.3, 0.99, 1.0, 1.01]), st.integers(0, 99))
def test_discounted_sums_against_the_recurrence(width: int, decay: float, seed: int) -> None:
    terms = torch.randn(3, width, dtype=torch.float64, generator=torch.manual_seed(seed))
    got = tensors.reverse_discounted_sum(terms, decay)
    following = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(width)):
        following = terms[:, t] + decay * following
        torch.testing.assert_close(got[:, t], following, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_pack_left_and_unpack_left_are_inverse(case: Case) -> None:
    mask = case.mask.bool()
    assert tensors.is_left_aligned(mask) == all(
        positions == list(range(len(positions))) for positions in ref.token_positions(case.mask)
    )
    front, packed = tensors.pack_left(mask, case.values)
    for row, positions, source in zip(
        packed, ref.token_positions(case.mask), case.values, strict=True
    ):
        assert row[: len(positions)].tolist() == [float(source[t]) for t in positions]
    back = tensors.unpack_left(packed, front, mask)
    assert torch.equal(back, case.values.masked_fill(~mask, 0))


def test_merged_partials_are_statistics_of_the_whole_batch() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [10.0, NAN, NAN]])
    mask = torch.tensor([[True, True, True], [True, False, False]])

    def parts(rows: slice) -> dict[str, Partial]:
        return {
            "mean": Partial.mean(x[rows], mask[rows]),
            "sum": Partial.sum(x[rows], mask[rows]),
            "max": Partial.max(x[rows], mask[rows]),
            "min": Partial.min(x[rows], mask[rows]),
        }

    merged = merge_partials([parts(slice(0, 1)), parts(slice(1, 2)), parts(slice(2, 2))])
    assert merged == {"mean": 4.0, "sum": 16.0, "max": 10.0, "min": 1.0}
    assert merge_partials([parts(slice(2, 2))]) == {}
