"""The rows of each epoch: permutations, and mixtures of files."""

from collections import Counter

import pytest

from quadriga.data.loader import Mixture, shares
from quadriga.errors import ConfigError


@pytest.mark.parametrize(
    ("rows", "weights", "epochs", "expected"),
    [
        (10, [1, 1, 1], 1, [4, 3, 3]),
        (10, [1, 1, 1], 3, [10, 10, 10]),
        (7, [5], 2, [14]),
        (5, [0.9, 0.1], 1, [5, 0]),
        (5, [0.9, 0.1], 2, [9, 1]),
        (8, [1, 3], 1, [2, 6]),
    ],
)
def test_shares(rows, weights, epochs, expected):
    assert shares(rows, weights, epochs) == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_file_has_its_share_and_all_its_rows_are_used_equally_often(shuffle):
    sizes, weights = [30, 7, 13], [1, 2, 2]
    mixture = Mixture(sizes, weights)
    used = Counter()
    for epoch in range(9):
        order = mixture.order(seed=3, epoch=epoch, shuffle=shuffle).tolist()
        assert len(order) == 50
        of_file = [sum(row < 30 for row in order), sum(30 <= row < 37 for row in order)]
        assert of_file == [10, 20]
        used.update(order)
    for rows in (range(30), range(30, 37), range(37, 50)):
        counts = [used[row] for row in rows]
        assert max(counts) - min(counts) <= 1 and min(counts) >= 1


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ConfigError, match=r"one positive number for each of the 2 training files"):
        Mixture([3, 3], weights)


def test_a_file_without_rows_can_have_no_share():
    with pytest.raises(ConfigError, match=r"training file 1 .* were left out"):
        Mixture([3, 0], [1, 1])
