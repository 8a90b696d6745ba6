"""Worker groups on both backends."""

import pytest
import torch
from worker_cases import Coroutines

from group_fixtures import group_on_both
from quadriga.errors import DispatchError, LengthError, WorkerMethodError
from quadriga.protocol import DataProto


def batch(n: int) -> DataProto:
    return DataProto.from_dict(tensors={"a": torch.arange(n)})


coroutines = group_on_both(Coroutines)


def test_lists_are_split_only_where_the_mode_says_so(cases):
    with pytest.raises(WorkerMethodError, match=r"TypeError in critic\.add"):
        cases.add([1, 2])
    assert cases.lists([[1, 2], [3]]) == [[1, 2], [3]]
    with pytest.raises(LengthError, match="3 entries for 2 ranks"):
        cases.lists([1, 2, 3])
    with pytest.raises(DispatchError):
        cases.each(3)


def test_one_rank_answers_a_method_of_rank_zero(cases):
    assert cases.first("a") == (0, "a")


def test_results_of_a_group_with_coroutines_feed_the_same_group(coroutines):
    """A rank may wait for a result of its own that its event loop has not sent yet."""
    for _ in range(10):
        once = coroutines.twice.submit(batch(4))
        twice = coroutines.twice_later.submit(once)
        thrice = coroutines.twice.options(timeout=150).submit(twice)
        assert thrice.get().batch["a"].tolist() == [0, 8, 16, 24]
    assert coroutines.later(0.01) == [0, 1]


def test_execute_by_name(cases):
    group = cases
    assert group.execute_all_sync("add", [10, 20]) == [11, 22]
    assert group.execute_all_sync("add", 10) == [11, 12]
    assert group.execute_all_sync("unregistered") == ["here", "here"]
    assert group.execute_rank_zero_sync("add", 5) == 6
    assert group.execute_func_rank_zero(lambda x, y: x + y, 1, 2) == 3


def test_function_with_batches(cases):
    def negate(worker, data):
        data.batch["a"] = -data.batch["a"] - worker.rank * 100
        return data

    joined = cases.execute_with_func_generator(negate, batch(4))
    assert joined.batch["a"].tolist() == [0, -1, -102, -103]
