"""When a rank counts as dead, and what asking for it costs."""

import socket
import time
from unittest import mock

import pytest
from worker_cases import Adder

from quadriga.backends.ray import health
from quadriga.backends.ray.cluster import RayNode
from quadriga.errors import WorkerDiedError
from quadriga.single_controller import backend


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def probes(monkeypatch):
    """probes(second, result) -> the lost nodes of one look at node "n" at that second."""
    clock = Clock()
    monkeypatch.setattr(health, "time", clock)
    monkeypatch.setattr(health, "_failing", {})

    def look(second, result):
        clock.now = 1000.0 + second
        monkeypatch.setattr(health, "probe_nodes", lambda ids: dict.fromkeys(ids, result))
        return health.lost_nodes(["n"])

    return look


@pytest.mark.parametrize(("result", "seconds"), [("refused", 3), ("silent", 10)])
def test_a_node_is_lost_after_three_probes_and_some_seconds(probes, result, seconds):
    """One probe that fails is no death, nor are two that are far apart."""
    assert probes(-200, result) == probes(-100, result) == set()
    assert probes(-50, "open") == set()
    assert probes(0, result) == probes(1, result) == probes(2, result) == set()
    assert probes(seconds - 0.1, result) == set()
    assert probes(seconds, result) == {"n"}
    assert probes(seconds + 1, "open") == set()
    assert probes(seconds + 2, result) == set()  # counted from the start again


def test_ray_s_own_record_of_a_dead_node_is_believed_at_once(probes):
    assert probes(0, None) == {"n"}


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as server:
        yield server.getsockname()[1]


def test_ports_are_probed_all_at_once(listening, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = closed.getsockname()[1]
    found = [RayNode(f"up{i}", "127.0.0.1", listening, True, {}) for i in range(200)]
    found.append(RayNode("refused", "127.0.0.1", refused, True, {}))
    monkeypatch.setattr(health, "cluster_nodes", lambda: found)
    monkeypatch.setattr(health, "this_node", lambda: "here")
    began = time.monotonic()
    result = health.probe_nodes(node.node_id for node in found)
    assert time.monotonic() - began < health.PROBE_TIMEOUT_S
    assert result.pop("here") == "open"
    assert result.pop("refused") == "refused"
    assert len(result) == 200 and set(result.values()) == {"open"}
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=TimeoutError))
    assert health._probe(found[0]) == "silent"


def test_a_look_at_a_thousand_ranks_probes_each_node_once(monkeypatch):
    asked = []
    monkeypatch.setattr(health, "actor_alive", lambda actor: True)
    monkeypatch.setattr(health.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        health, "probe_nodes", lambda ids: asked.append(sorted(ids)) or dict.fromkeys(ids, "open")
    )
    handles = [
        backend.RankHandle(
            None, "", backend.RankFacts(i, 1024, "", 0, "", "", node_id=f"n{i // 8:03}")
        )
        for i in range(1024)
    ]
    assert health.dead_ranks(handles) == []
    assert asked == [[f"n{i:03}" for i in range(128)]]


def test_a_silent_node_and_a_living_rank(ray_backend, start_on_ray, monkeypatch):
    """Nothing connects to the node of a rank for a while, and the rank is alive all the same."""
    group = start_on_ray(Adder)
    monkeypatch.setattr(health, "probe_nodes", lambda ids: dict.fromkeys(ids, "silent"))
    monkeypatch.setattr(health, "_failing", {})
    assert ray_backend.dead(group._ranks.handles) == []
    group.shutdown()
    deadline = time.monotonic() + 30
    while len(ray_backend.dead(group._ranks.handles)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Lost:
    """A backend that finds a death at its fourth look."""

    def __init__(self) -> None:
        self.looks = 0

    def dead(self, handles):
        self.looks += 1
        if self.looks < 4:
            raise RuntimeError("the control store does not respond")
        return [None]

    def death(self, ranks, handle):
        return WorkerDiedError("a rank died")


def test_a_watch_goes_on_after_an_error_of_its_own(caplog):
    """It is logged once, and the death that comes later is still found."""
    ranks = backend.RankSet(Lost(), [], {})
    watch = backend.Watch(ranks, 0.01)
    try:
        deadline = time.monotonic() + 20
        while id(ranks) not in backend.broken_groups and time.monotonic() < deadline:
            time.sleep(0.01)
        assert str(backend.broken_groups[id(ranks)]) == "a rank died"
        logged = [r.getMessage() for r in caplog.records]
        assert len(logged) == 1 and "RuntimeError: the control store" in logged[0]
    finally:
        watch.stop()
        backend.forget(ranks)
