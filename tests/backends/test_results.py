"""Results with large fields: which process owns them, and that every kind of batch is complete."""

from __future__ import annotations

import gc
import pickle
import time

import pytest
import ray
import torch
from field_workers import WIDTH, AsyncEcho, Echo, Fields, Interleaving, Mine, fields

from quadriga.backends.ray.calls import store
from quadriga.backends.ray.calls.store import Result, ResultStore, is_plain_batch, opened
from quadriga.backends.ray.calls.submission import is_plain
from quadriga.errors import LostObjectError, WorkerMethodError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.boundary import pack_argument
from quadriga.protocol.values import operations as values
from quadriga.protocol.values.storage import traffic

KB, MB = 2**10, 2**20


@pytest.fixture(scope="module")
def echo(start_for_module):
    return start_for_module(Echo, 2)


def prompts(rows: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(rows)})


def check(data: DataProto, rows: int) -> None:
    expected = fields(torch.arange(rows))
    for key in ("one", "two", "small"):
        assert torch.equal(data.batch[key], expected.batch[key])


def owners(data: DataProto) -> set[str]:
    """The processes that own the stored fields of a batch."""
    stored = [data.batch.columns[key] for key in ("one", "two")]
    return {h.location.ref.owner_address() for column in stored for h in column.handles}


@pytest.mark.parametrize("worker", [Fields, Interleaving])
def test_every_call_of_a_method_gives_the_same(start, worker):
    group = start(worker, 2)
    for _ in range(3):
        check(group.make(prompts(6)), 6)
        check(group.make(prompts(2)), 2)


def test_fields_are_passed_from_call_to_call_and_in_futures(start):
    makers, readers = start(Fields, 2), start(Fields, 3)
    for _ in range(3):
        data = makers.add(makers.make(prompts(6)))
        check(data, 6)
        assert torch.equal(data.batch["three"], 3 * data.batch["one"])
        one = 15.0 * WIDTH
        later = makers.add.submit(makers.make.submit(prompts(6)))
        for given in (later, data):
            found = readers.total(given)
            sums = {key: sum(part[key] for part in found) for key in found[0]}
            assert sums == {"one": one, "two": 2 * one, "small": 150.0, "three": 3 * one}


def test_a_future_that_has_arrived_is_split_as_its_batch(start, monkeypatch):
    """A reader then receives handles of its own shards, not of all results."""
    makers, readers = start(Fields, 2), start(Fields, 3)
    later = makers.make.submit(prompts(6))
    later.get()
    traffic.reset()
    assert len(later.arrived()) == 6
    assert traffic.reset().fetched_bytes == 6 * 8  # `small`, which is in the results
    with monkeypatch.context() as patched:
        patched.setattr(DataProtoFuture, "chunk", None)
        found = readers.total(later)
    assert sum(part["one"] for part in found) == 15.0 * WIDTH
    lists = makers.several.submit(3)
    lists.get()
    assert lists.arrived() is None
    uneven = makers.make.submit(prompts(4))
    uneven.get()
    with pytest.raises(WorkerMethodError, match="4 rows do not divide into 3 equal parts"):
        readers.total(uneven)


def test_several_batches_in_one_result(start):
    group = start(Fields, 2)
    for count in (4, 2, 5):
        for answers in group.several(count):
            for data, rows in zip(answers, (count, 1, 0), strict=True):
                check(data, rows)


def test_a_method_that_fails_after_it_has_made_fields(start, monkeypatch):
    """The error is shown once: Ray logs an error in a return that is never read."""
    logged = []
    monkeypatch.setattr(ray._private.worker.logger, "error", lambda *told: logged.append(told))
    group = start(Fields, 2)
    for _ in range(2):
        check(group.fail_or_make(False)[1], 4)
    with pytest.raises(WorkerMethodError, match=r"fail_or_make.*asked to fail"):
        group.fail_or_make(True)
    gc.collect()
    for _ in range(3):  # Ray looks after a moment
        check(group.fail_or_make(False)[0], 4)
        time.sleep(0.1)
    assert not logged


def test_fields_belong_to_the_worker_at_first_and_then_to_the_controller(ray_backend):
    """The first result shows that a method has large fields."""
    pool = ray_backend.resource_pool([2], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(Fields))
    workers, mine = group.make(prompts(4)), group.make(prompts(4))
    assert len(owners(workers)) == 2 and len(owners(mine)) == 1
    assert owners(mine) == {ray.put(0).owner_address()} and not owners(mine) & owners(workers)
    for handle in group.workers:
        ray.kill(handle)
    deadline = time.monotonic() + 20
    with pytest.raises(LostObjectError, match=r"'one'.*rank 0 in make"):
        while time.monotonic() < deadline:
            workers[:2].batch["one"]
            time.sleep(0.1)
    check(mine, 4)
    pool.release()


BATCHES = {
    "small": lambda: DataProto.from_dict({"x": torch.arange(4)}, {"s": ["a", "b", "c", "d"]}),
    "no tensors": lambda: DataProto.from_dict({}, {"s": ["a", "b"]}, {"step": 3, "name": "n"}),
    "empty": lambda: DataProto.from_dict({"x": torch.zeros(0, 3)}),
    "meta of tensors": lambda: DataProto.from_dict(
        {"x": torch.arange(2)}, meta_info={"t": torch.ones(2), "deep": [{"k": (1, 2)}]}
    ),
    "own class": lambda: Mine.from_dict({"x": torch.arange(2)}),
    "own objects": lambda: DataProto.from_dict(
        {"x": torch.arange(2)}, {"o": [Here(1), Here(2)]}, {"f": Here}
    ),
    "large": lambda: fields(torch.arange(4)),
}


PLAIN = ("small", "no tensors", "empty")


class Here:
    """A class of the user."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Here) and self.number == other.number

    __hash__ = None


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_every_kind_come_back(echo, name):
    made = BATCHES[name]()
    for _ in range(2):
        back = echo.echo_batch(made)
        assert type(back) is type(made) and same(back, made)
        for one in echo.echo([made, {"k": made}]):
            assert same(one[0], made) and same(one[1]["k"], made)


def same(a: DataProto, b: DataProto) -> bool:
    return values.same(parts(a), parts(b))


def parts(data: DataProto) -> tuple[object, ...]:
    tensors = None if data.batch is None else dict(data.batch.items())
    return tensors, dict(data.non_tensor_batch.items()), data.meta_info


@pytest.mark.parametrize("value", [b"", b"bytes", pickle.dumps(1), b"x" * 200_000, "s", 1, None])
def test_bytes_and_plain_values_come_back_unchanged(echo, value):
    assert echo.echo(value) == [value] * 2


@pytest.mark.parametrize("worker", [Echo, AsyncEcho])
def test_a_rank_that_is_called_directly_gives_values(ray_backend, worker):
    pool = ray_backend.resource_pool([1], use_gpu=False)
    group = ray_backend.worker_group(pool, ray_backend.class_with_args(worker))
    (rank,) = group.workers
    for value in (b"bytes", 3, "s"):
        assert ray.get(rank.echo.remote(value)) == value
    for name in ("small", "large"):
        made = BATCHES[name]()
        assert same(ray.get(rank.echo.remote(made)), made)
    group.shutdown()
    pool.release()


# The store of one result, without Ray


@pytest.fixture
def put(monkeypatch):
    """What was put, in order; a reference is its number."""
    kept: list[object] = []
    monkeypatch.setattr(store.ray, "put", lambda value: kept.append(value) or len(kept) - 1)
    monkeypatch.setattr(store, "alone_bytes", lambda: 16 * MB)
    return kept


def test_fields_that_are_put_together_are_one_return(put):
    kept = ResultStore()
    handles = kept.put_many([("a", 60 * KB), ("b", 20 * MB), ("c", 15 * MB)])
    handles += kept.put_many([("d", 50 * MB), ("e", 15 * MB)])
    first, second = kept.returns("value", apart=True)
    assert second == ("a", "c", "e") and put == ["b", "d"]
    assert opened(first, "second return") == "value"
    assert [handle.location.ref for handle in handles] == ["second return", 0, "second return", 1,
                                                        "second return"]  # fmt: skip
    assert [handle.index for handle in handles] == [0, -1, 1, -1, 2]


def test_fields_that_exceed_the_bundle_are_put_alone(put):
    kept = ResultStore()
    kept.put_many([(i, 15 * MB) for i in range(6)])
    assert kept.returns(None, apart=True)[1] == (0, 1, 2, 3) and put == [4, 5]


@pytest.mark.parametrize(("apart", "nbytes"), [(False, MB), (True, 99 * KB)])
def test_fields_are_put_without_a_second_return_or_if_they_are_small(put, apart, nbytes):
    kept = ResultStore()
    (handle,) = kept.put_many([("a", nbytes)])
    first, second = kept.returns("value", apart)
    assert second is None and put == [("a",)] and handle.location.ref == 0
    assert opened(first, "unused") == "value" and handle.location.ref == 0


@pytest.mark.parametrize("apart", [False, True])
def test_a_result_without_fields_is_its_value(put, apart):
    assert ResultStore().returns("value", apart) == ("value", None)
    assert opened("value", None) == "value" and not put


@pytest.mark.parametrize(("name", "plain"), [(name, name in PLAIN) for name in BATCHES])
def test_which_batches_python_pickles(put, name, plain):
    """Any other batch may hold references, or code that must be sent with it."""
    packed = pack_argument(BATCHES[name](), ResultStore())
    assert is_plain_batch(packed) == is_plain(packed) == plain
    assert not is_plain_batch([packed]) and is_plain(b"bytes") and not is_plain("s" * 1000)


def test_a_single_put_is_an_object_of_its_own(put):
    kept = ResultStore()
    handle = kept.put("a", MB)
    assert handle.location.ref == 0 and kept.returns("value", True) == ("value", None)


def test_a_result_is_pickled_with_one_place(put):
    kept = ResultStore()
    handles = kept.put_many([("a", MB), ("b", MB)])
    first, _ = kept.returns(handles, apart=True)
    back = pickle.loads(pickle.dumps(first))
    assert isinstance(back, Result) and back.location.ref is None
    a, b = opened(back, "there")
    assert (a.location.ref, a.index, b.location.ref, b.index) == ("there", 0, "there", 1)
    assert handles[0].location.ref is None
