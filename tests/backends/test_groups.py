"""Worker groups on both backends."""

from __future__ import annotations

import pytest
import torch
from worker_cases import Adder, Coroutines, Neighbour

from group_fixtures import Starter
from quadriga.errors import LengthError, UnregisteredMethodError
from quadriga.protocol import DataProto


def batch(n: int) -> DataProto:
    return DataProto.from_dict(tensors={"a": torch.arange(n)})


@pytest.fixture(scope="module")
def coroutines(backend):
    start = Starter(backend)
    yield start(Coroutines, 2)
    start.end()


def test_calls_by_mode(cases):
    assert cases.world_size == 2
    assert cases.add(10) == [11, 12]
    assert cases.each([5, 6]) == [(0, 5), (1, 6)]
    assert cases.each([5, 6], scale=[1, 10]) == [(0, 5), (1, 60)]
    assert cases.first([9, 9]) == (0, [9, 9])
    assert cases.add.__name__ == "add"


def test_lists_are_split_only_where_the_mode_says_so(cases):
    with pytest.raises(TypeError):
        raise_cause(lambda: cases.add([1, 2]))
    assert cases.lists([[1, 2], [3]]) == [[1, 2], [3]]
    with pytest.raises(LengthError, match="3 entries for 2 ranks"):
        cases.lists([1, 2, 3])


def raise_cause(run):
    try:
        run()
    except Exception as error:
        raise error.__cause__ from None


def test_results_of_a_group_with_coroutines_feed_the_same_group(coroutines):
    """A rank may wait for a result of its own that its event loop has not sent yet."""
    for _ in range(10):
        once = coroutines.twice.submit(batch(4))
        twice = coroutines.twice_later.submit(once)
        thrice = coroutines.twice.options(timeout=150).submit(twice)
        assert thrice.get().batch["a"].tolist() == [0, 8, 16, 24]
    assert coroutines.later(0.01) == [0, 1]


def test_batches_are_split_and_joined_and_the_argument_is_unchanged(cases):
    data = batch(4)
    assert cases.twice(data).batch["a"].tolist() == [0, 2, 4, 6]
    assert cases.length(data) == [2, 2]
    with pytest.raises(LengthError, match=r"twice: argument 0 has 3 rows.*Pass 2 or 4 rows"):
        cases.twice(batch(3))


def test_futures(cases):
    future = cases.twice.submit(batch(4))
    assert cases.twice(future).batch["a"].tolist() == [0, 4, 8, 12]
    assert cases.soon().get() == [0, 1]


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


def test_environment(start):
    group = start(Adder, 2, worker_env={"MINE": "yes"})
    for rank, seen in enumerate(group.environment()):
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "2")
        assert (seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"]) == (str(rank), "2")
        assert seen["MASTER_PORT"] == group.master_port
        assert seen["MASTER_ADDR"] == group.master_address
        assert seen["MINE"] == "yes"


def test_roles_share_a_process(start, backend):
    roles = {
        "actor": backend.class_with_args(Adder, 1),
        "actor_rollout": backend.class_with_args(Neighbour),
    }
    group = start(None, 2, roles=roles)
    views = group.spawn({"actor", "actor_rollout"})
    assert views["actor"].add(1) == group.actor_add(1) == [2, 3]
    both = ["actor", "actor_rollout"]
    assert views["actor_rollout"].ask(1) == [(2, 0, both), (3, 1, both)]
    assert group.actor_rollout_ask(1) == views["actor_rollout"].ask(1)
    assert views["actor"].workers == views["actor_rollout"].workers
    with pytest.raises(UnregisteredMethodError, match="hosts the roles"):
        group.spawn({"critic"})
