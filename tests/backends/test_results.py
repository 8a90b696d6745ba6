"""Results with large fields: which process owns them, and that every kind of batch is complete."""

import gc
import pickle
import time

import numpy as np
import pytest
import ray
import torch
from worker_cases import WIDTH, Cases, fields, prompts

from quadriga.backends.ray import store
from quadriga.backends.ray.calls import is_plain
from quadriga.backends.ray.store import Result, ResultStore, is_plain_batch, opened
from quadriga.errors import WorkerMethodError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.boundary import pack_argument
from quadriga.protocol.storage import traffic
from quadriga.protocol.values import same as same_parts

KB, MB = 2**10, 2**20


def check(data: DataProto, rows: int) -> None:
    expected = fields(torch.arange(rows))
    for key in ("one", "two", "small"):
        assert torch.equal(data.batch[key], expected.batch[key])


def owners(data: DataProto) -> set[str]:
    """The processes that own the stored fields of a batch."""
    columns = dict(getattr(data.batch, "columns", {})).values()
    handles = [handle for column in columns for handle in getattr(column, "handles", ())]
    return {handle.location.ref.owner_address() for handle in handles}


def test_a_future_that_has_arrived_is_split_as_its_batch(cases, monkeypatch):
    """A reader then receives handles of its own shards, not of all results."""
    later = cases.make.submit(prompts(6))
    later.get()
    traffic.reset()
    assert len(later.arrived()) == 6
    assert traffic.reset().fetched_bytes == 6 * 8  # `small`, which is in the results
    with monkeypatch.context() as patched:
        patched.setattr(DataProtoFuture, "chunk", None)
        found = cases.total(later)
    assert sum(part["one"] for part in found) == 15.0 * WIDTH
    lists = cases.several.submit(3)
    lists.get()
    assert lists.arrived() is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_that_a_method_returns_are_not_read_as_a_message(cases, kind):
    data = pickle.dumps({"code": "of the user"})
    assert [bytes(value) for value in cases.run(lambda: kind(data))] == [data] * 2


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_a_method_raises_is_the_error_of_its_call(cases, kind):
    def leave():
        raise kind("planted")

    # Ctrl-C in a program whose ranks share its process ends the program.
    ends = kind is KeyboardInterrupt and cases._ranks.backend.name == "local"
    with pytest.raises(kind if ends else WorkerMethodError, match="planted"):
        cases.run(leave)
    assert cases.run(int) == [0, 0]


def test_several_batches_in_one_result(cases):
    for count in (4, 2, 5):
        for answers in cases.several(count):
            for data, rows in zip(answers, (count, 1, 0), strict=True):
                check(data, rows)


def test_a_method_that_fails_after_it_has_made_fields(ray_cases, monkeypatch):
    """The error is shown once: Ray logs an error in a return that is never read."""
    logged = []
    monkeypatch.setattr(ray._private.worker.logger, "error", lambda *told: logged.append(told))
    for _ in range(2):
        check(ray_cases.fail_or_make(False)[1], 4)
    with pytest.raises(WorkerMethodError, match=r"fail_or_make.*asked to fail"):
        ray_cases.fail_or_make(True)
    gc.collect()
    for _ in range(3):  # Ray looks after a moment
        check(ray_cases.fail_or_make(False)[0], 4)
        time.sleep(0.1)
    assert not logged


def made_by(group) -> dict[str, tuple[DataProto, list[int]]]:
    """Results of calls of every kind, and the rows in them."""
    four, rows = prompts(4), [0, 1, 2, 3]
    found = {f"call {number}": (group.make(four), rows) for number in range(2)}
    found["little"] = group.little(four), rows
    for number, (count, some) in enumerate([(0, []), (2, rows), (2, rows)]):
        name = f"call {number} of a method whose first result has no fields"
        found[name] = group.first_rows(four, count), some
    for number, item in enumerate(group.one_by_one.stream(four)):
        found[f"item {number} of a stream"] = item, [number, number, 2 + number, 2 + number]
    joined = group.joined(four, group.make(four))
    found["received rows and new ones"] = joined, [0, 1, 0, 1, 2, 3, 2, 3]
    again = [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    found["the same again"] = group.joined(four, joined), again
    return found


def test_results_of_every_call_belong_to_the_caller_and_outlive_the_worker(start_on_ray):
    """The first call and later ones; streams; rows that were received."""
    group = start_on_ray(Cases)
    found = made_by(group)
    me = ray.put(0).owner_address()
    for name, (data, rows) in found.items():
        assert owners(data) == ({me} if rows else set()), name
    for handle in group.workers:
        ray.kill(handle)
    group.wait_until_ended()
    time.sleep(1.0)  # Ray tells the holders of an object of the death of its owner
    for name, (data, rows) in found.items():
        assert data.batch["one"][:, -1].tolist() == rows, name


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


class Mine(DataProto):
    """A batch of a class of the user."""


class Here:
    """A class of the user."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Here) and self.number == other.number

    __hash__ = None


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_every_kind_come_back(cases, name):
    made = BATCHES[name]()
    for _ in range(2):
        back = cases.rows(made)
        assert type(back) is type(made) and same(back, made)
        for one in cases.same([made, {"k": made}]):
            assert same(one[0], made) and same(one[1]["k"], made)


def same(a: DataProto, b: DataProto) -> bool:
    return same_parts(parts(a), parts(b))


def parts(data: DataProto) -> tuple[object, ...]:
    tensors = None if data.batch is None else dict(data.batch.items())
    return tensors, dict(data.non_tensor_batch.items()), data.meta_info


@pytest.mark.parametrize("value", [b"", pickle.dumps(1), b"x" * 200_000, "s", 1, None])
def test_bytes_and_plain_values_come_back_unchanged(cases, value):
    assert cases.same(value) == [value] * 2


def test_a_rank_that_is_called_directly_gives_values(ray_cases):
    rank = ray_cases.workers[0]
    for value in (b"bytes", 3, "s"):
        assert ray.get(rank.same.remote(value)) == value
    for name in ("small", "large"):
        made = BATCHES[name]()
        assert same(ray.get(rank.same.remote(made)), made)


# The store of one result, without Ray


@pytest.fixture(autouse=True)
def several_nodes(request, monkeypatch):
    """Fields of 16 MiB are objects of their own."""
    if not {"cases", "ray_cases", "start", "start_on_ray"} & set(request.fixturenames):
        monkeypatch.setattr(store, "alone_bytes", lambda: 16 * MB)


def result(sizes: list[int], count: int) -> tuple[list[int], list[object], list[tuple[str, int]]]:
    """Return the sizes of the objects of fields, in pieces; and where each handle points."""
    kept = ResultStore(store.RayStore())
    handles = kept.put_many([(i, nbytes) for i, nbytes in enumerate(sizes[:-1])])
    handles.append(kept.put(len(sizes) - 1, sizes[-1]))
    first, *rest = kept.returns("value", count)
    assert isinstance(first, Result) and len(rest) == count
    objects = [first.fields] if count == 0 else [found for found in rest if found is not None]
    fields = [[v for v in found if isinstance(v, int)] for found in objects]
    assert opened(first, "first", [f"field {i}" for i in range(count)]) == "value"
    places = [(handle.location.ref, handle.index) for handle in handles]
    return first.objects, fields, places


def test_small_fields_are_one_object_and_large_ones_are_apart():
    sizes = [60 * KB, 20 * MB, 15 * MB]
    assert result(sizes, 2) == (
        2, [[1], [0, 2]], [("field 1", 0), ("field 0", 0), ("field 1", 1)],
    )  # fmt: skip


def test_fields_beyond_the_last_return_are_put_into_it():
    sizes = [20 * MB, 20 * MB, MB]
    assert result(sizes, 2)[:2] == (3, [[1], [0, 2]])
    assert result(sizes, 1)[:2] == (3, [[1, 0, 2]])
    assert result(sizes, 4)[:2] == (3, [[1], [0], [2]])


def test_without_a_return_for_them_fields_are_in_the_first():
    assert result([MB, MB], 0) == (1, [[0, 1]], [("first", 0), ("first", 1)])


@pytest.mark.parametrize("count", [0, 1])
def test_small_fields_fill_a_return_that_ray_stores(count):
    """Ray would send a smaller one through the memory of the caller."""
    kept = ResultStore(store.RayStore())
    kept.put(np.zeros(70 * KB, np.uint8), 70 * KB)
    *_, last = kept.returns(None, count)
    fields = last if count else last.fields
    assert sum(part.nbytes for part in fields) == store.RETURNED_BYTES


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_result_without_fields_is_its_value(count):
    assert ResultStore(store.RayStore()).returns("value", count) == ("value", *[None] * count)
    assert opened("value", None, ()) == "value"


@pytest.mark.parametrize(("name", "plain"), [(name, name in PLAIN) for name in BATCHES])
def test_which_batches_python_pickles(name, plain):
    """Any other batch may hold references, or code that must be sent with it."""
    packed = pack_argument(BATCHES[name](), ResultStore(store.RayStore()))
    assert is_plain_batch(packed) == is_plain(packed) == plain
    assert not is_plain_batch([packed]) and is_plain(b"bytes") and not is_plain("s" * 1000)


def test_handles_of_one_object_share_its_location_after_pickling():
    kept = ResultStore(store.RayStore())
    handles = kept.put_many([("a", MB), ("b", MB)])
    first, _ = kept.returns(handles, 1)
    back = pickle.loads(pickle.dumps(first))
    a, b = opened(back, "first", ["there"])
    assert (a.location.ref, a.index, b.location.ref, b.index) == ("there", 0, "there", 1)
    assert handles[0].location.ref is None
