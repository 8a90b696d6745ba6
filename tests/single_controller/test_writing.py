"""A method may write into its arguments, also into arrays inside objects of the user's classes."""

from collections import deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest

from group_fixtures import group_on_both, local_group
from quadriga.single_controller import Dispatch, Worker, rank_host, register, worker_group

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Plain:
    array: np.ndarray
    inner: object = None
    numbers: list = field(default_factory=lambda: [0])


@dataclass(frozen=True, slots=True)
class Frozen:
    array: np.ndarray
    inner: object = None


class Base:
    __slots__ = ("array",)


class Slotted(Base):
    __slots__ = ("inner",)

    def __init__(self, array, inner=None):
        self.array, self.inner = array, inner


def arrays_of(value):
    """Every array in an argument."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value]
    if isinstance(value, Plain | Frozen | Slotted):
        return [value.array, *arrays_of(value.inner)]
    if isinstance(value, dict):
        value = list(value.values())
    return [] if value is None else [a for item in value for a in arrays_of(item)]


def objects(size):
    """One argument of each kind, with arrays of `size` zeros."""
    a = lambda: np.zeros(size)  # noqa: E731
    cyclic = Plain(a())
    cyclic.inner = [Plain(a())]
    cyclic.numbers.append(cyclic.numbers)
    rows = np.empty(2, dtype=object)
    rows[:] = [a(), Plain(a())]
    return {
        "frozen with slots": Frozen(a(), Plain(a())),
        "slots of a base class": Slotted(a(), Frozen(a())),
        "nested": {"x": [Plain(a(), (a(), Pair(a(), [Frozen(a())])))]},
        "cyclic": cyclic,
        "deque": deque([a(), Plain(a())]),
        "object array": Plain(a(), rows),
    }


class Writer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, value):
        """Add the rank + 1 to every array. Return their sums."""
        for array in arrays_of(value):
            array += self.rank + 1
        if isinstance(value, Plain):
            value.numbers[0] += 1
        return [float(array.sum()) for array in arrays_of(value)]


writer = group_on_both(Writer)


def check(writer, kind, size):
    value = objects(size)[kind]
    count = len(arrays_of(value))
    for _ in range(2):  # the second call receives what the first one has not changed
        assert writer.write(value) == [[size * 1.0] * count, [size * 2.0] * count]
    assert all(array.sum() == 0 for array in arrays_of(value))
    if isinstance(value, Plain):
        assert value.numbers[0] == 0


@pytest.mark.parametrize("size", [3, 2**18], ids=["small", "large"])
@pytest.mark.parametrize("kind", objects(1))
def test_arrays_inside_objects_can_be_written_and_no_other_process_sees_it(writer, kind, size):
    check(writer, kind, size)


@pytest.mark.parametrize("kind", objects(1))
def test_arrays_inside_objects_in_a_process_without_torch(kind, monkeypatch):
    for module in (rank_host, worker_group):
        monkeypatch.setattr(module, "boundary_for", lambda values: None)
    check(local_group(Writer), kind, 3)
