"""Row maps against a plain list of (shard, row) pairs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from quadriga.protocol import Origin
from quadriga.protocol.rows import RowIndices, RowMap, RowRange, Shard, concat, row_map_of

WRITER = Origin("actor", 0, "make")


def take(rows, selection):
    return rows.take([selection], {})[0]


def map_of(uid: int, rows: int) -> RowMap:
    return RowMap.of_shard(Shard(uid, rows, WRITER))


def pairs(rows: RowMap) -> list[tuple[int, int]]:
    """Return (uid of the shard, row) of every batch row."""
    return [
        (rows.shards[s].uid, r)
        for s, start, stop in rows.segments.tolist()
        for r in range(start, stop)
    ]


def test_concat_of_shards_has_one_segment_each():
    joined, sources = concat([map_of(1, 3), map_of(2, 0), map_of(3, 2)])
    assert joined.segments.tolist() == [[0, 0, 3], [1, 0, 2]]
    assert sources == [(0, 0), (2, 0)] and len(joined) == 5


def test_a_range_shortens_the_outer_segments_and_drops_unused_shards():
    joined, _ = concat([map_of(1, 4), map_of(2, 4), map_of(3, 4)])
    part, kept = take(joined, RowRange(3, 6))
    assert part.segments.tolist() == [[0, 3, 4], [1, 0, 2]]
    assert kept == (0, 1) and [s.uid for s in part.shards] == [1, 2]
    inside, kept = take(joined, RowRange(9, 11))
    assert inside.segments.tolist() == [[0, 1, 3]] and kept == (2,)


def test_the_example_of_the_module():
    joined, _ = concat([map_of(1, 3), map_of(2, 3)])
    assert joined.segments.tolist() == [[0, 0, 3], [1, 0, 3]]
    assert take(joined, RowRange(2, 5))[0].segments.tolist() == [[0, 2, 3], [1, 0, 2]]
    taken, kept = take(joined, RowIndices(np.array([5, 0, 1])))
    assert taken.segments.tolist() == [[1, 2, 3], [0, 0, 2]] and kept == (0, 1)
    again, _ = concat([take(joined, RowRange(0, 2))[0], take(joined, RowRange(2, 6))[0]])
    assert again.segments.tolist() == [[0, 0, 3], [1, 0, 3]]


def test_the_range_of_all_rows_returns_the_same_map():
    joined, _ = concat([map_of(1, 4), map_of(2, 4)])
    assert take(joined, RowRange(0, 8)) == (joined, (0, 1))


def test_chunk_then_concat_gives_the_same_segments():
    whole, _ = concat([map_of(1, 5), map_of(2, 5)])
    parts = [take(whole, RowRange(a, a + 2))[0] for a in range(0, 10, 2)]
    again, sources = concat(parts)
    assert again.segments.tolist() == [[0, 0, 5], [1, 0, 5]]
    assert [s.uid for s in again.shards] == [1, 2] and sources == [(0, 0), (2, 1)]
    unshared, sources = concat(parts, share=False)
    assert len(unshared.shards) == 6 and pairs(unshared) == pairs(again)


def test_consecutive_rows_become_one_segment():
    whole, _ = concat([map_of(1, 4), map_of(2, 4)])
    taken, _ = take(whole, RowIndices(np.array([2, 3, 4, 5, 0, 1, 1])))
    assert taken.segments.tolist() == [[0, 2, 4], [1, 0, 2], [0, 0, 2], [0, 1, 2]]


@given(st.data())
def test_any_sequence_of_selections_agrees_with_a_list(data):
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    rows, _ = concat([map_of(uid, n) for uid, n in enumerate(sizes)])
    expected = [(uid, r) for uid, n in enumerate(sizes) for r in range(n)]
    for _ in range(data.draw(st.integers(1, 4))):
        n = len(expected)
        if data.draw(st.booleans()):
            a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            rows, expected = take(rows, RowRange(a, b))[0], expected[a:b]
        else:
            index = data.draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []
            rows = take(rows, RowIndices(np.array(index, dtype=np.int64)))[0]
            expected = [expected[i] for i in index]
        assert pairs(rows) == expected
        assert len(rows) == len(expected)
        assert {s.uid for s in rows.shards} == {uid for uid, _ in expected}
        shards, numbers = rows.expand()
        found = zip(shards.tolist(), numbers.tolist(), strict=True)
        assert [(rows.shards[s].uid, r) for s, r in found] == expected


@pytest.mark.parametrize("ranks", [8, 64])
def test_a_chunk_of_a_large_batch_is_one_segment(ranks):
    """The work of a split does not grow with the number of rows: a million per rank here."""
    whole, _ = concat([map_of(uid, 10**6) for uid in range(ranks)])
    for r in range(ranks):
        part, kept = take(whole, RowRange(r * 10**6, (r + 1) * 10**6))
        assert kept == (r,) and part.segments.tolist() == [[0, 0, 10**6]]


@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_a_map_are_its_ranges(seed):
    draw = np.random.default_rng(seed)
    shards = tuple(Shard.new(5, WRITER) for _ in range(30))
    one_each = RowMap(shards, np.array([[i, 0, 5] for i in range(30)], dtype=np.int64))
    mixed = take(one_each, RowIndices(draw.integers(0, 150, 150)))[0] if seed % 2 else one_each
    inner = np.sort(draw.integers(0, 151, 11)).tolist()  # equal bounds: empty chunks
    bounds = [0, *inner, 150]
    plans = {}
    for whole in (mixed, RowMap(mixed.shards[::-1], mixed.segments)):  # the second uses the plans
        for (chunk, kept), start, stop in zip(
            whole.take([RowRange(*pair) for pair in pairwise(bounds)], plans),
            bounds[:-1],
            bounds[1:],
            strict=True,
        ):
            row_map, expected = take(whole, RowRange(start, stop))
            assert (chunk.shards, kept) == (row_map.shards, expected)
            assert chunk.segments.tolist() == row_map.segments.tolist()
            assert len(chunk) == stop - start
            again = row_map_of(*chunk.flat())
            assert again.shards == chunk.shards and again.content == chunk.content
