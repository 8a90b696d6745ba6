"""Programs that mix `ray.get` with worker groups."""

import pytest
import ray
import torch
from program_workers import LARGE
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.utils.ray_utils import parallel_put

from quadriga.errors import LengthError, WorkerMethodError


@pytest.fixture
def group(calculators):
    return calculators


def rows(n, value=1):
    return DataProto.from_dict(tensors={"a": torch.full((n,), value)})


def test_ray_get_of_a_call_to_all(group):
    refs = group.rank_plus(10)
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [10, 11]


def test_ray_get_of_a_call_with_one_argument_per_rank(group):
    assert ray.get(group.own(["x", "y"])) == [(0, "x", 0), (1, "y", 0)]
    assert ray.get(group.own([1, 2], y=[3, 4])) == [(0, 1, 3), (1, 2, 4)]


def test_a_future_of_a_batch(group):
    future = group.double(rows(4, 3))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["a"].tolist() == [6, 6, 6, 6]
    parts = ray.get(future.futures)
    assert [part.batch["rank"].tolist() for part in parts] == [[0, 0], [1, 1]]


def test_the_parts_of_a_metric_call_are_references(group):
    assert ray.get(group.count(rows(6))) == [3, 3]


def test_a_future_of_a_mesh(group):
    assert group.by_mesh(rows(4)).get().batch["rank"].tolist() == [0, 0, 1, 1]


def test_a_future_of_a_mesh_has_the_references_that_are_collected(group):
    future = group.replicated(rows(2, 3))
    (part,) = ray.get(future.futures)
    assert part.batch["a"].tolist() == [3, 3]
    assert future.collect_fn([part]).batch["a"].tolist() == future.get().batch["a"].tolist()
    assert group.double(future).get().batch["rank"].tolist() == [0, 1]
    padded = DataProto.from_dict(tensors={"a": torch.arange(3)}, auto_padding=True)
    assert group.by_mesh(padded).get().batch["rank"].tolist() == [0, 0, 1]


def test_the_failure_of_a_rank_that_is_not_collected_ends_the_wait(group):
    future = group.replicated(rows(2), failing_rank=1)
    assert len(ray.get(future.futures)) == 1  # that of rank 0, which has not failed
    with pytest.raises(WorkerMethodError, match=r"KeyError in Calculator\.replicated, rank 1"):
        future.get()


def test_ray_get_of_tensors(group):
    small, large = (ray.get(group.execute_all_async("tensor", n)) for n in (3, LARGE))
    assert [t.tolist() for t in small] == [[0.0] * 3, [1.0] * 3]
    assert [float(t.sum()) for t in large] == [0.0, float(LARGE)]


def test_ray_get_of_a_batch_of_rank_zero(group):
    batch = ray.get(group.execute_rank_zero_async("batch", 2))
    assert isinstance(batch, DataProto)
    assert batch.batch["a"].sum() == 2 * LARGE
    assert batch.non_tensor_batch["name"].tolist() == ["x", "x"]
    assert ray.get(group.execute_rank_zero("raw")) == b"not a pickle"


def test_ray_wait(group):
    refs = group.rank_plus(0)
    ready, rest = ray.wait(refs, num_returns=2, timeout=60)
    assert (set(ready), rest) == (set(refs), [])


def test_a_reference_is_an_argument_of_another_actor_and_of_a_task(group):
    @ray.remote(num_cpus=0)
    def total(data):
        return int(data.batch["a"].sum())

    ref = group.execute_rank_zero_async("batch", 1)
    assert ray.get(group.workers[1].total_of.remote(ref)) == LARGE
    assert ray.get(total.remote(ref)) == LARGE
    assert ray.get(group.execute_all_async("total_of", ref)) == [LARGE, LARGE]


def test_a_worker_returns_a_reference(group):
    refs = group.put(rows(2, 5))
    assert [part.batch["a"].tolist() for part in ray.get(refs)] == [[5, 5], [5, 5]]
    (inner,) = {type(ref) for ref in ray.get(group.execute_all_async("put", 1))}
    assert inner is ray.ObjectRef
    assert ray.get(ray.get(group.workers[0].put.remote(1))) == 1


def test_futures_made_of_references(group):
    refs = [ray.put(rows(2, 1)), ray.put(rows(2, 2))]
    future = DataProtoFuture.concat(refs)
    assert (future.futures, future.collect_fn) == (refs, DataProto.concat)
    assert future.get().batch["a"].tolist() == [1, 1, 2, 2]
    assert future.chunk(2)[1].get().batch["a"].tolist() == [2, 2]
    last = DataProtoFuture(
        collect_fn=DataProto.concat, futures=refs, dispatch_fn=lambda batch: batch[-1:]
    )
    assert last.get().batch["a"].tolist() == [2]
    assert last.dispatch_fn(rows(3)).batch["a"].tolist() == [1]


def test_a_future_is_an_argument(group):
    future = group.double(rows(4, 5))
    assert group.in_place(future).batch["a"].tolist() == [11] * 4
    assert group.double(group.double(rows(4, 1))).get().batch["a"].tolist() == [4] * 4
    made = DataProtoFuture.concat([ray.put(rows(4, 7))])
    assert group.in_place(made).batch["a"].tolist() == [8] * 4


def test_a_method_receives_the_future_itself(group):
    assert group.read_future(group.double(rows(2, 1))).get().batch["a"].tolist() == [2, 2]


def test_parallel_put(cluster):
    refs = parallel_put([1, rows(2, 4), torch.ones(3)], max_workers=2)
    number, batch, tensor = ray.get(refs)
    assert (number, batch.batch["a"].tolist(), tensor.tolist()) == (1, [4, 4], [1.0] * 3)
    with pytest.raises(LengthError, match="empty"):
        parallel_put([])
    with pytest.raises(LengthError, match="max_workers of 1 or more, got 0"):
        parallel_put([1], max_workers=0)


def test_the_error_of_a_worker_is_raised_by_ray_get(group):
    for error in (WorkerMethodError, ray.exceptions.RayTaskError):
        with pytest.raises(error, match=r"KeyError in Calculator\.fail, rank"):
            ray.get(group.fail())
