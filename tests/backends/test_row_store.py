"""Rows of another node: cut out there, or whole shards. And the choice between the two."""

import logging
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from worker_cases import Reader, prompts as rows

from group_fixtures import Starter
from quadriga.backends import get_backend
from quadriga.backends.ray import store as row_store
from quadriga.backends.ray.store import RayStore, make_store, servers
from quadriga.errors import ConfigError


@pytest.fixture(scope="module")
def near(ray_backend):
    """A group on one node whose reads all go through the row server."""
    start = Starter(get_backend("ray", store=RayStore(math.inf, near=True)))
    yield start(Reader, 2, timeout=60)
    start.backend.shutdown()


@pytest.mark.nightly
def test_ranks_that_read_each_others_rows_at_the_same_time_do_not_wait_for_each_other(near):
    data = near.make(rows(8))
    data.reorder(np.array([7, 0, 6, 1, 5, 2, 4, 3]))
    found = near.read(data, ["one", "two", "rag"])
    assert [row for first, _ in found for row in first] == [7, 0, 6, 1, 5, 2, 4, 3]
    assert all(cut_bytes > 0 for _, cut_bytes in found)


def test_a_cluster_of_one_node_that_grows_is_noticed(monkeypatch):
    nodes = [SimpleNamespace(alive=True)]
    monkeypatch.setattr(row_store, "cluster_nodes", lambda: nodes)
    monkeypatch.setattr(row_store, "this_node", lambda: "first")
    store = RayStore()
    assert store.node() == ""
    nodes.append(SimpleNamespace(alive=True))
    assert store.node() == ""  # the nodes are not counted at every call
    monkeypatch.setattr(row_store, "LOOK_S", 0.0)
    assert store.node() == "first"


def test_a_row_server_that_does_not_answer_is_waited_for_once(near, monkeypatch, caplog):
    """Then whole objects are fetched."""
    data = near.make(rows(8))
    monkeypatch.setattr(row_store, "ANSWER_S", 0.2)
    never = ray.remote(num_cpus=0)(Silent).remote()
    monkeypatch.setattr(servers, "of", lambda node: never)
    monkeypatch.setattr(servers, "_missing", {})  # what the test notes there ends with it
    with caplog.at_level(logging.WARNING, "quadriga.data"):
        assert data[5:].batch["one"][:, 0].tolist() == [5, 6, 7]
    assert "did not send rows (GetTimeoutError); whole objects are fetched" in caplog.text
    ray.kill(never)


class Silent:
    def cut(self, refs, cuts):
        time.sleep(30)


def test_without_a_row_server_whole_objects_are_fetched(near, monkeypatch):
    data = near.make(rows(8))
    monkeypatch.setattr(servers, "_known", {})
    monkeypatch.setattr(row_store, "_name", lambda node: "no actor has this name")
    assert data[5:].batch["one"][:, 0].tolist() == [5, 6, 7]
    looked_up = []
    monkeypatch.setattr(row_store.ray, "get_actor", lambda *a, **k: looked_up.append(a))
    assert data[:1].batch["two"][:, 0].tolist() == [0]
    assert not looked_up, "a missing row server is looked up once in a while"


@pytest.mark.parametrize(
    ("share", "readers", "cuts"),
    [(1 / 8, 1, True), (1 / 7, 1, False), (1 / 64, 8, True), (1 / 63, 8, False)],
)
def test_the_parts_of_all_ranks_of_a_node_count(share, readers, cuts):
    """16 nodes of 8 ranks: each needs 1/128 of a shard, each node 1/16."""
    store = make_store("auto")
    store._node, store.readers = "mine", readers
    assert store.cuts("other", share) == cuts
    assert not store.cuts("mine", share) and not store.cuts("", share)


def test_the_stores_of_the_setting():
    assert type(make_store("shards")) is RayStore
    assert make_store("rows").share == math.inf and make_store("auto").share == 1 / 8
    with pytest.raises(ConfigError, match=r"store='row': expected \"auto\", \"rows\" or"):
        get_backend("ray", store="row")


def test_a_row_server_that_failed_is_not_asked_for_a_while(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(row_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        row_store.ray, "get_actor", lambda name, namespace: asked.append(name) or "server"
    )
    known = row_store.Servers()
    assert known.of("a") == "server" and len(asked) == 1
    known.forget("a")
    assert known.of("a") is None and len(asked) == 1
    now[0] = row_store.LOOK_UP_AGAIN_S + 1
    assert known.of("a") == "server" and len(asked) == 2
