"""Row maps against a plain list of (shard, row) pairs."""

import numpy as np
from hypothesis import given, strategies as st

from quadriga.protocol import Origin
from quadriga.protocol.storage import RowMap, Shard, concat_maps, row_map_of

WRITER = Origin("actor", 0, "make")


def take(rows, selection):
    plan = rows.plan(selection)
    return rows.take(plan), plan[1]


def map_of(uid: int, rows: int) -> RowMap:
    return RowMap.of_shard(Shard(uid, rows, WRITER))


def pairs(rows: RowMap) -> list[tuple[int, int]]:
    """Return (uid of the shard, row) of every batch row."""
    return [
        (rows.shards[s].uid, r)
        for s, start, stop in rows.segments.tolist()
        for r in range(start, stop)
    ]


def test_the_example_of_the_module():
    joined, _ = concat_maps([map_of(1, 3), map_of(2, 3)])
    assert joined.segments.tolist() == [[0, 0, 3], [1, 0, 3]]
    assert take(joined, range(2, 5))[0].segments.tolist() == [[0, 2, 3], [1, 0, 2]]
    taken, kept = take(joined, np.array([5, 0, 1]))
    assert taken.segments.tolist() == [[1, 2, 3], [0, 0, 2]] and kept == (0, 1)
    again, _ = concat_maps([take(joined, range(0, 2))[0], take(joined, range(2, 6))[0]])
    assert again.segments.tolist() == [[0, 0, 3], [1, 0, 3]]


def test_chunk_then_concat_gives_the_same_segments():
    whole, _ = concat_maps([map_of(1, 5), map_of(2, 5)])
    parts = [take(whole, range(a, a + 2))[0] for a in range(0, 10, 2)]
    again, sources = concat_maps(parts)
    assert again.segments.tolist() == [[0, 0, 5], [1, 0, 5]]
    assert [s.uid for s in again.shards] == [1, 2] and sources == [(0, 0), (2, 1)]
    unshared, sources = concat_maps(parts, share=False)
    assert len(unshared.shards) == 6 and pairs(unshared) == pairs(again)


@given(st.data())
def test_any_sequence_of_selections_agrees_with_a_list(data):
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    rows, _ = concat_maps([map_of(uid, n) for uid, n in enumerate(sizes)])
    expected = [(uid, r) for uid, n in enumerate(sizes) for r in range(n)]
    for _ in range(data.draw(st.integers(1, 4))):
        n = len(expected)
        if data.draw(st.booleans()):
            a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            rows, expected = take(rows, range(a, b))[0], expected[a:b]
        else:
            index = data.draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []
            rows = take(rows, np.array(index, dtype=np.int64))[0]
            expected = [expected[i] for i in index]
        assert pairs(rows) == expected
        assert len(rows) == len(expected)
        assert {s.uid for s in rows.shards} == {uid for uid, _ in expected}
        shards, numbers = rows.expand()
        found = zip(shards.tolist(), numbers.tolist(), strict=True)
        assert [(rows.shards[s].uid, r) for s, r in found] == expected
        again = row_map_of(*rows.flat())
        assert again.shards == rows.shards and again.content == rows.content
