"""The end of Ray's own processes is named within 10 s, and leaves none that a run has started."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import psutil
import pytest
import ray

from processes import command_line, gone, run_python
from quadriga.backends.ray import health
from quadriga.cli.main import LOST
from quadriga.errors import ClusterLostError
from quadriga.single_controller.backend import RankFacts, RankHandle

PROGRAM = Path(__file__).with_name("lost_cluster_program.py")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victim", "error", "reason"),
    [
        ("gcs_server", "ClusterLostError", "sleep cannot end: the control store (GCS) of Ray"),
        ("raylet", "ClusterLostError", "sleep cannot end: the raylet of this node of Ray"),
        ("node", "WorkerDiedError", "ended while sleep was in flight: its node"),
        ("joined", None, ""),
        pytest.param(
            "partition",
            "WorkerDiedError",
            "its node does not respond",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root"),
        ),
    ],
)
def test_the_end_of_a_process_of_ray(victim, error, reason) -> None:
    """A cluster of the user is left alone."""
    told = json.loads(run_python(PROGRAM, victim, timeout=120).stdout.splitlines()[-1])
    assert told.get("type") == error and reason in told.get("text", ""), told
    # A node that is silent may only pause for a while.
    assert told["seconds"] < (20 if victim == "partition" else 10) and told["shutdown"] < 30, told
    if victim in ("node", "joined", "partition"):
        assert any("gcs_server" in line for line in told["left"]), told
    else:
        assert told["left"] == [] and told["mode"] == "0o700" and told["again"] == [0.1, 0.1]
        assert told["nicer"] == [0, 0]  # ranks get as much of a CPU as reward processes


KILLED_AT_START = """
import threading, time, psutil, ray
from quadriga.backends.ray import cluster

def kill():
    while ray._private.worker._global_node is None:
        time.sleep(0.01)
    (store,) = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
    store.kill()

cluster.STORE_LOST_S = 2
threading.Thread(target=kill, daemon=True).start()
cluster.ensure_ray(num_cpus=1, object_store_memory=80 * 2**20)
time.sleep(100)
"""


@pytest.mark.nightly
def test_a_control_store_that_ends_while_ray_starts_ends_the_process_as_a_loss(tmp_path) -> None:
    """Ray would end it after 60 s, with exit code 1, and `--supervise` would not go on."""
    (tmp_path / "program.py").write_text(KILLED_AT_START)
    with TemporaryDirectory(prefix="lost-") as folder:  # a short path, for the sockets in it
        given = {"env": {**os.environ, "TMPDIR": folder}}
        told = run_python(tmp_path / "program.py", status=LOST, timeout=60, **given)
        assert "its control store (GCS) has ended meanwhile" in told.stderr
        assert gone(p.pid for p in psutil.process_iter() if folder in command_line(p))


@pytest.fixture
def node(monkeypatch):
    """The processes of Ray that this process has started, as it knows them."""
    found = SimpleNamespace(gcs_address="[::1]:7", node_ip_address="10.0.0.1",
                            node_manager_port=8, session_name="s", head=True,
                            all_processes={})  # fmt: skip
    monkeypatch.setattr(ray._private.worker, "_global_node", found)
    monkeypatch.setattr(health, "_failing", {})
    return found


@pytest.mark.parametrize(
    ("head", "refused", "seconds", "what"),
    [
        (True, "::1", 3, "control store (GCS) of Ray at [::1]:7"),
        (True, "10.0.0.1", 3, "raylet of this node of Ray at 10.0.0.1:8"),
        (False, "::1", 40, "control store (GCS) of Ray"),
        (False, "10.0.0.1", 3, "raylet of this node of Ray"),
    ],
)
def test_the_cluster_is_lost_after_some_seconds(
    head, refused, seconds, what, node, monkeypatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answers = {refused: "refused"}
    monkeypatch.setattr(health, "_probe", lambda at: answers.get(at.address, "open"))
    node.head = head
    for second in (0, 1, 2, seconds - 0.1):
        now[0] = 100.0 + second
        assert not health.cluster_lost()
    now[0] = 100.0 + seconds
    handle = RankHandle(None, "", RankFacts(0, 1, "10.0.0.1", 1, "", ""))
    assert health.dead_ranks([handle]) == [handle]
    error = health.died(handle, "critic.update", "its process has ended")
    assert isinstance(error, ClusterLostError) and what.replace("[::1]", "::1") in str(error)
    assert isinstance(error, ClusterLostError) and error.own == head
    answers.clear()
    assert not health.cluster_lost()
    ended = SimpleNamespace(process=SimpleNamespace(poll=lambda: -9))
    node.all_processes = {"raylet": [ended]}
    assert "raylet of this node of Ray at 10.0.0.1:8 has ended" in health.cluster_lost()
