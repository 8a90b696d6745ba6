"""A method may write into its arguments, also into arrays inside objects of the user's classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from writing_workers import Plain, Writer, arrays_of, objects

from group_fixtures import Starter

KINDS = list(objects(1))


@pytest.fixture(scope="module")
def writer(backend):
    start = Starter(backend)
    yield start(Writer, 2)
    start.end()


@pytest.mark.parametrize("size", [3, 2**18], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_inside_objects_can_be_written_and_no_other_process_sees_it(writer, kind, size):
    value = objects(size)[kind]
    count = len(arrays_of(value))
    for _ in range(2):  # the second call receives what the first one has not changed
        assert writer.write(value) == [[size * 1.0] * count, [size * 2.0] * count]
    assert all(array.sum() == 0 for array in arrays_of(value))
    if isinstance(value, Plain):
        assert value.numbers[0] == 0


def test_arrays_inside_objects_in_a_process_without_torch():
    code = (
        "import sys\n"
        "from quadriga.backends import get_backend\n"
        "from writing_workers import Writer, arrays_of, objects\n"
        "backend = get_backend('local')\n"
        "pool = backend.resource_pool([2])\n"
        "group = backend.worker_group(pool, backend.class_with_args(Writer))\n"
        "for kind, value in objects(3).items():\n"
        "    assert set(group.write(value)[1]) == {6.0}, kind\n"
        "    assert all(array.sum() == 0 for array in arrays_of(value)), kind\n"
        "assert 'torch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
