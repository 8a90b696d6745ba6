"""What a rank's node tells of its process: stacks, places in collectives, last lines of output."""

import glob
import os
import tempfile
import tracemalloc

import pytest
import ray
from worker_cases import Cases

from quadriga.backends.ray.health import dump, in_collective, tail
from quadriga.errors import CallTimeoutError

SITE = "/venv/lib/python3.11/site-packages/"


def stack(*frames: str) -> str:
    """Frames as `faulthandler` writes them, from "file.py function" each, innermost first."""
    pairs = [frame.split() for frame in frames]
    return "\n".join(f'  File "{SITE}{file}", line 10 in {name}' for file, name in pairs)


@pytest.mark.parametrize(
    "frames",
    [
        ("torch/distributed/distributed_c10d.py all_reduce", "my/worker.py update"),
        (
            "torch/_ops.py __call__",
            "torch/distributed/_functional_collectives.py wait_tensor",
            "my/worker.py update",
        ),
        ("ray/util/collective/collective.py allreduce", "my/worker.py update"),
    ],
)
def test_places_in_a_collective(frames):
    assert in_collective(stack(*frames))


@pytest.mark.parametrize(
    "frames",
    [
        ("torch/distributed/checkpoint/filesystem.py _write_item", "my/worker.py save"),
        ("torch/distributed/distributed_c10d.py _object_to_tensor", "my/worker.py gather"),
        ("my/tokenizer.py encode", "torch/distributed/distributed_c10d.py all_gather_object"),
    ],
)
def test_places_that_wait_for_no_other_rank(frames):
    """A disk may be slow for longer than a rank may stand still in a collective."""
    assert not in_collective(stack(*frames))


def test_stacks_are_read_from_a_file_without_a_name_that_no_killed_rank_leaves(start_on_ray):
    group = start_on_ray(Cases, 1)
    with pytest.raises(CallTimeoutError) as caught:
        group.sleep.options(timeout=1)(0, 30)
    assert "in sleep" in caught.value.stacks[0]
    facts = [handle.facts for handle in group._ranks.handles]
    assert "in sleep" in dump((facts[0].pid, facts[0].stack_path))
    for worker in group.workers:
        ray.kill(worker)
    group.wait_until_ended()
    pattern = os.path.join(tempfile.gettempdir(), "quadriga-stack-*")
    assert not [path for path in glob.glob(pattern) if any(f"-{f.pid}-" in path for f in facts)]


def test_the_stack_of_a_process_that_does_not_exist(tmp_path):
    gone = tmp_path / "stack"
    gone.write_text("")
    assert "cannot be asked" in dump((2**22 - 1, str(gone)))
    assert "cannot be asked" in dump((os.getpid(), str(tmp_path / "none")))


def test_only_the_end_of_a_log_is_read(tmp_path):
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.write(b"first line\n")
        file.truncate(300 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(30)) + b":actor_name:A\nlast\n")
    tracemalloc.start()
    lines = tail(str(log)).splitlines()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert lines == [*(f"  line {i}" for i in range(11, 30)), "  last"]
    log.write_text("")
    assert tail(str(log)) == "  (nothing)"
    assert tail(None) == tail(str(tmp_path / "none")) == "  (no log)"
