"""Which values the store of the Ray backend puts into one object, and when Ray frees objects."""

import numpy as np
import pytest
import torch

from quadriga.backends.ray import cluster, store as ray_store
from quadriga.errors import LostObjectError
from quadriga.protocol.columns import RemoteColumn, encode, fetch
from quadriga.protocol.storage import Origin, RowMap, Shard, fetch_many

MB = 2**20


@pytest.mark.parametrize(
    ("sizes", "alone", "bundles"),
    [
        ([], 16, []),
        ([1], 16, [[0]]),
        ([16, 1, 40, 2], 16, [[2], [0], [1, 3]]),
        ([16, 1, 40, 2], 64, [[0, 1, 2, 3]]),
        ([15] * 5, 16, [[0, 1, 2, 3], [4]]),
        ([20, 30], 16, [[1], [0]]),
        ([64, 1], 64, [[0], [1]]),
    ],
)
def test_bundles(sizes, alone, bundles):
    assert ray_store._bundles([size * MB for size in sizes], alone * MB) == bundles


FREES, NICE = "RAY_free_objects_period_milliseconds", "RAY_worker_niceness"


@pytest.mark.parametrize(
    ("name", "mine", "found"), [(FREES, None, "10"), (FREES, "500", "500"), (NICE, None, "0")]
)
def test_a_cluster_started_by_quadriga_has_settings_of_its_own(monkeypatch, name, mine, found):
    """A value that the user has set is kept."""
    seen = []
    own = {"RAY_AUTH_MODE": "disabled"}  # no token in the home folder
    monkeypatch.setattr(cluster.os, "environ", own if mine is None else {**own, name: mine})
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: seen.append(cluster.os.environ[name]))
    cluster.ensure_ray()
    assert seen == [found]


def test_handles_of_one_object_return_their_own_values(monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(ray_store.ray, "put", lambda value: kept.append(value) or len(kept) - 1)
    monkeypatch.setattr(ray_store, "alone_bytes", lambda: 16 * MB)
    monkeypatch.setattr(ray_store.ray, "get", lambda refs, timeout: [kept[ref] for ref in refs])
    store = ray_store.RayStore(share=0.0)  # asks no cluster for its nodes
    handles = store.put_many([("a", 1), (np.zeros(1), 16 * MB), ("b", 2), ("c", 3)])
    assert len(kept) == 2 and [h.nbytes for h in handles] == [1, 16 * MB, 2, 3]
    assert fetch_many([handles[3], handles[0], handles[2]]) == ["c", "a", "b"]
    assert handles[1].fetch() is kept[0]


class Reference(str):
    """Stand in for a reference of Ray."""

    def hex(self) -> str:
        return self


def test_a_value_that_does_not_arrive_is_an_error_after_a_deadline(monkeypatch):
    waits = []

    def get(refs, timeout):
        waits.append(timeout)
        raise ray_store.ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray_store.ray, "get", get)
    monkeypatch.setattr(ray_store.ray, "wait", lambda refs, **options: (refs[:1], refs[1:]))
    monkeypatch.setattr(ray_store, "FETCH_S", 0.5)
    here, late = (ray_store.RayHandle(ray_store.Location(Reference(name)), 1) for name in "ab")
    with pytest.raises(LostObjectError, match=r"1 object\(s\) .* did not arrive within 0\.5 s"):
        here.fetch()
    assert waits == [0.5]
    # A batch names the field, and does not wait for it a second time.
    shards = [RowMap.of_shard(Shard(r, 2, Origin("actor", r, "make", "node"))) for r in (0, 1)]
    columns = [
        (name, RemoteColumn(encode(torch.zeros(2), name)[0], row_map, (handle,)))
        for name, row_map, handle in zip("xy", shards, (here, late), strict=True)
    ]
    with pytest.raises(LostObjectError, match=r"field 'y' .* rank 1 in make .* arrive within 0\.5"):
        fetch(columns)
    assert waits == [0.5, 0.5]
