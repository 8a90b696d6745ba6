"""The Ray backend ends all that it has started, even if Ray refuses to end a part of it."""

import subprocess
from unittest import mock
from weakref import WeakSet

import pytest

from quadriga.backends.ray import backend as ray_backends, cluster, pool as pools
from quadriga.backends.ray.backend import RayBackend
from quadriga.errors import WorkerDiedError


def test_every_pool_is_released_and_the_connection_closed_even_if_one_raises(monkeypatch):
    backend, session, stop = RayBackend(), mock.Mock(), mock.Mock()
    release = mock.Mock(side_effect=[RuntimeError("no connection"), None, None])
    for _ in range(3):
        backend.resource_pool([1])
    monkeypatch.setattr(backend, "_session", session)
    monkeypatch.setattr(cluster, "_open_sessions", WeakSet())
    monkeypatch.setattr(ray_backends.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_backends.servers, "stop", stop)
    monkeypatch.setattr(pools.RayResourcePool, "release", release)
    with pytest.raises(RuntimeError, match="no connection"):
        backend.shutdown()
    assert release.call_count == 3
    stop.assert_called_once_with()
    session.close.assert_called_once_with(lost=False)


@pytest.fixture
def connection(monkeypatch):
    """A Ray that notes whether it runs. No session is open."""
    running: list[object] = []
    monkeypatch.setattr(cluster, "_open_sessions", WeakSet())
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: bool(running))
    monkeypatch.setattr(cluster.ray, "init", lambda **_: running.append("ray"))
    monkeypatch.setattr(cluster.ray, "shutdown", running.clear)
    monkeypatch.setattr(cluster, "cluster_nodes", lambda: [mock.Mock(alive=True)])
    monkeypatch.setattr(cluster, "protect_token", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return running


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_the_last_of_two_backends_ends_ray_and_the_row_servers(
    connection, monkeypatch, first_to_close
):
    stopped: list[object] = []
    monkeypatch.setattr(ray_backends.servers, "stop", lambda: stopped.append("servers"))
    backends = [RayBackend(), RayBackend()]
    for backend in backends:
        backend.start()
    backends[first_to_close].shutdown()
    backends[first_to_close].shutdown()  # a second call ends no use of the other
    assert connection and not stopped
    backends[1 - first_to_close].shutdown()
    assert not connection and stopped == ["servers"]


def test_a_connection_of_the_program_stays(connection):
    connection.append("of the program")
    sessions = [cluster.ensure_ray(), cluster.ensure_ray()]
    for session in sessions:
        session.close()
    assert connection


def test_a_session_of_a_ray_that_has_ended_does_not_end_the_next(connection):
    old = cluster.ensure_ray()
    connection.clear()
    new = cluster.ensure_ray()
    old.close()
    assert connection
    new.close()
    assert not connection


@pytest.mark.parametrize("error", [Exception, RuntimeError])  # of a raylet, of a GCS
def test_a_ray_that_does_not_come_up_is_a_loss_and_leaves_no_process(
    connection, monkeypatch, error
):
    def init(**_):
        connection.append(subprocess.Popen(["sleep", "600"]))
        raise error("The current node timed out during startup")  # as Ray does

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(WorkerDiedError, match=r"Ray has not started .*: The current node"):
        cluster.ensure_ray()
    assert connection[0].wait(10) == -9
