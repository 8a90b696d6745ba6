"""Methods that are generators: each rank yields batches, and the controller receives them."""

import asyncio
import functools
import gc
import time

import pytest
import torch

from group_fixtures import Starter
from quadriga.backends import get_backend
from quadriga.errors import DispatchError, LengthError, WorkerMethodError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register


def wrapped(function):
    return functools.wraps(function)(lambda *args: function(*args))


class Streamer(Worker):
    def __init__(self):
        super().__init__()
        self.made = self.closed = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data):
        """Yield the rows one by one."""
        try:
            for i in range(len(data)):
                self.made += 1
                yield data[i : i + 1]
        finally:
            self.closed += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def numbers(self, counts, fail_at=None):
        """Yield as many numbers as `counts` says for this rank, each of which takes its time."""
        for i in range(counts[self.rank]):
            time.sleep(0.02 * (1 + self.rank))
            if i == fail_at and self.rank == 1:
                raise KeyError("planted")
            yield 10 * self.rank + i

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def numbers_later(self, count):
        for i in range(count):
            await asyncio.sleep(0.001)
            yield 10 * self.rank + i

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @wrapped
    def behind_a_decorator(self, count):
        yield from range(count)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generator_object(self, count):
        return (i for i in range(count))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def counts(self):
        return self.made, self.closed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plain(self):
        return 1


class LoopStreamer(Streamer):
    """The same on an event loop."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self):
        return self.rank


@pytest.fixture(
    scope="module",
    params=[("local", Streamer), ("ray", LoopStreamer)],
    ids=lambda each: f"{each[0]}-{each[1].__name__}",
)
def group(request):
    name, cls = request.param
    ray = name == "ray"
    start = Starter(request.getfixturevalue("ray_backend") if ray else get_backend(name))
    yield start(cls, 2, timeout=60)
    start.end()


def batch(n, **options):
    return DataProto.from_dict({"row": torch.arange(n)}, **options)


def test_items_of_all_ranks_are_joined_in_order(group):
    items = [item.batch["row"].tolist() for item in group.rows.stream(batch(6))]
    assert items == [[0, 3], [1, 4], [2, 5]]
    assert list(group.numbers.stream([3, 3])) == [[0, 10], [1, 11], [2, 12]]
    assert list(group.numbers_later.stream(2)) == [[0, 10], [1, 11]]
    assert list(group.numbers.stream([0, 0])) == []


def test_padding_rows_are_removed_from_each_item(group):
    items = [item.batch["row"].tolist() for item in group.rows.stream(batch(5, auto_padding=True))]
    assert items == [[0, 3], [1, 4], [2]]


def test_a_stream_computes_at_most_one_item_ahead_and_ends_when_it_is_dropped(group):
    made, closed = group.counts()[0]
    stream = group.rows.stream(batch(40))
    next(stream)
    assert group.counts()[0] == (made + 2, closed)
    del stream
    gc.collect()
    assert group.counts()[0] == (made + 2, closed + 1)


def test_an_error_of_one_rank_ends_the_stream(group):
    received = []
    with pytest.raises(WorkerMethodError, match=r"KeyError in \w+\.numbers, rank 1 of 2"):
        for item in group.numbers.stream([4, 4], fail_at=2):
            received.append(item)
    assert received == [[0, 10], [1, 11]]
    assert group.plain() == [1, 1]


def test_ranks_with_different_numbers_of_items_are_refused_in_order(group):
    stream = group.numbers.stream([3, 1])
    assert next(stream) == [0, 10]
    with pytest.raises(LengthError, match=r"rank\(s\) \[1\] ended after 1 item.*same number"):
        next(stream)


def test_generators_and_other_methods_are_not_confused(group):
    with pytest.raises(DispatchError, match=r"numbers is a generator.*numbers\.stream\("):
        group.numbers([1, 1])
    with pytest.raises(DispatchError, match=r"plain is not a generator"):
        group.plain.stream()
    assert list(group.behind_a_decorator.stream(2)) == [[0, 0], [1, 1]]
    for method in (group.behind_a_decorator, group.generator_object):
        with pytest.raises(WorkerMethodError, match=r"returned a generator object.*Return a list"):
            method(2)
