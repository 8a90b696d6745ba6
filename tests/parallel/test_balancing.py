"""Balancing: every index once, about equal sums, token budgets kept."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from quadriga.errors import LengthError
from quadriga.parallel import balancing


def sums(lengths: list[int], partitions: list[list[int]]) -> list[int]:
    return [sum(lengths[i] for i in p) for p in partitions]


def spread(lengths: list[int], partitions: list[list[int]]) -> int:
    totals = sums(lengths, partitions)
    return max(totals) - min(totals)


def longest_first_spread(lengths: list[int], k: int) -> int:
    """Compute the spread of greedy assignment, longest first."""
    totals = [0] * k
    for length in sorted(lengths, reverse=True):
        totals[totals.index(min(totals))] += length
    return max(totals) - min(totals)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, bool]:
    k = draw(st.integers(1, 40))
    equal = draw(st.booleans())
    count = k * draw(st.integers(1, 6)) if equal else draw(st.integers(k, 120))
    top = draw(st.sampled_from([0, 1, 9, 5000]))
    return draw(st.lists(st.integers(0, top), min_size=count, max_size=count)), k, equal


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_index_is_in_exactly_one_partition(problem: tuple[list[int], int, bool]) -> None:
    lengths, k, equal = problem
    partitions = balancing.get_seqlen_balanced_partitions(lengths, k, equal)
    assert len(partitions) == k
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert all(p and p == sorted(p) for p in partitions)
    if equal:
        assert {len(p) for p in partitions} == {len(lengths) // k}
    assert partitions == balancing.get_seqlen_balanced_partitions(lengths, k, equal)


def test_first_partitions_and_exchanges_by_hand() -> None:
    """The examples in `alternating_blocks` and `exchange_items`."""
    lengths = np.array([8.0, 7, 6, 5, 4])
    padded = np.append(lengths, 0.0)  # index -1 is a gap
    table = balancing.longest_first(lengths, 2)
    assert sorted(padded[table].sum(1)) == [13, 17]
    table = np.array([[4, 1, 3], [0, 2, -1]])
    balancing.exchange_items(lengths, table)
    assert padded[table].sum(1).tolist() == [15, 15]
    # The partition of the 40 needs the 1 of another heavy one.
    lengths = np.array([40.0, 11, 10, 9, 8, 8, 8, 7, 5, 5, 5, 5, 4, 4, 3, 2, 1, 1])
    partitions = balancing.get_seqlen_balanced_partitions(lengths, 6, equal_size=True)
    assert max(lengths[partition].sum() for partition in partitions) == 42
    six = np.array([9.0, 8, 7, 6, 5, 4])
    assert six[balancing.alternating_blocks(six, 3)].tolist() == [[9, 4], [8, 5], [7, 6]]


@settings(max_examples=60, deadline=None)
@given(problems())
def test_unequal_sizes_are_never_worse_than_longest_first(
    problem: tuple[list[int], int, bool],
) -> None:
    lengths, k, _ = problem
    partitions = balancing.get_seqlen_balanced_partitions(lengths, k, equal_size=False)
    allowed = max(longest_first_spread(lengths, k), 2e-4 * sum(lengths) / k)
    assert spread(lengths, partitions) <= allowed


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("count", "k"), [(1024, 64), (256, 8)])
def test_spread_of_long_tailed_lengths_is_below_a_thousandth(
    count: int, k: int, equal: bool
) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, count), 1, 8192).astype(int).tolist()
    partitions = balancing.get_seqlen_balanced_partitions(lengths, k, equal)
    assert spread(lengths, partitions) <= 1e-3 * sum(lengths) / k


@pytest.mark.parametrize(
    ("lengths", "k", "equal", "message"),
    [
        ([1, 2], 3, False, "2 sequences cannot fill 3 partitions"),
        ([1, 2, 3], 2, True, "3 sequences do not divide into 2 partitions"),
        ([], 0, False, "cannot fill 0 partitions"),
    ],
)
def test_invalid_inputs_are_rejected(
    lengths: list[float], k: int, equal: bool, message: str
) -> None:
    with pytest.raises(LengthError, match=message):
        balancing.get_seqlen_balanced_partitions(lengths, k, equal)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(100, 400), st.integers(1, 4)
)
def test_micro_batches_respect_the_token_budget(
    lengths: list[int], budget: int, least: int
) -> None:
    least = min(least, len(lengths))
    partitions = balancing.token_budget_micro_batches(lengths, budget, min_batches=least)
    assert sorted(itertools.chain(*partitions)) == list(range(len(lengths)))
    assert all(partitions)
    assert max(sums(lengths, partitions)) <= budget
    assert len(partitions) >= least
    # Two micro-batches of first fit together always exceed the budget.
    assert len(partitions) <= max(2 * sum(lengths) // budget + 1, least)


def test_micro_batches_are_balanced() -> None:
    # Filling one micro-batch after the other would give 100, 100, 20.
    assert sums([20] * 11, balancing.token_budget_micro_batches([20] * 11, 100)) == [80, 80, 60]


def test_sequences_above_the_budget_are_rejected() -> None:
    with pytest.raises(LengthError, match="Sequence 1 has 120 tokens, more than the 100"):
        balancing.token_budget_micro_batches([10, 120], 100)
    with pytest.raises(LengthError, match="2 sequences cannot fill 3 partitions"):
        balancing.token_budget_micro_batches([10, 12], 100, min_batches=3)
    assert balancing.token_budget_micro_batches([], 100) == []
