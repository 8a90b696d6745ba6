"""Row arithmetic of references against a plain list of (block, row) pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.protocol import Origin
from quadriga.protocol.values.row_map import Block, Rows, concat
from quadriga.protocol.values.row_selection import Span, Take

SOMEONE = Origin("actor", 0, "make")


def block(uid: int, rows: int) -> Rows:
    return Rows.whole(Block(uid, rows, SOMEONE))


def pairs(rows: Rows) -> list[tuple[int, int]]:
    """(block uid, row) of every batch row."""
    return [
        (rows.blocks[b].uid, r)
        for b, start, stop in rows.segments.tolist()
        for r in range(start, stop)
    ]


def test_joining_blocks_gives_one_segment_each():
    joined, sources = concat([block(1, 3), block(2, 0), block(3, 2)])
    assert joined.segments.tolist() == [[0, 0, 3], [1, 0, 2]]
    assert sources == [(0, 0), (2, 0)] and len(joined) == 5


def test_a_span_cuts_the_segments_at_its_ends_and_drops_unused_blocks():
    joined, _ = concat([block(1, 4), block(2, 4), block(3, 4)])
    part, kept = joined.take(Span(3, 6))
    assert part.segments.tolist() == [[0, 3, 4], [1, 0, 2]]
    assert kept == (0, 1) and [b.uid for b in part.blocks] == [1, 2]
    inside, kept = joined.take(Span(9, 11))
    assert inside.segments.tolist() == [[0, 1, 3]] and kept == (2,)


def test_the_whole_is_itself():
    joined, _ = concat([block(1, 4), block(2, 4)])
    assert joined.take(Span(0, 8)) == (joined, (0, 1))


def test_chunk_then_concat_gives_back_the_same_segments():
    whole, _ = concat([block(1, 5), block(2, 5)])
    parts = [whole.take(Span(a, a + 2))[0] for a in range(0, 10, 2)]
    again, sources = concat(parts)
    assert again.segments.tolist() == [[0, 0, 5], [1, 0, 5]]
    assert [b.uid for b in again.blocks] == [1, 2] and sources == [(0, 0), (2, 1)]
    unshared, sources = concat(parts, share=False)
    assert len(unshared.blocks) == 6 and pairs(unshared) == pairs(again)


def test_contiguous_rows_become_runs():
    whole, _ = concat([block(1, 4), block(2, 4)])
    taken, _ = whole.take(Take(np.array([2, 3, 4, 5, 0, 1, 1])))
    assert taken.segments.tolist() == [[0, 2, 4], [1, 0, 2], [0, 0, 2], [0, 1, 2]]


@given(st.data())
def test_any_sequence_of_takes_agrees_with_a_list(data):
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    rows, _ = concat([block(uid, n) for uid, n in enumerate(sizes)])
    expected = [(uid, r) for uid, n in enumerate(sizes) for r in range(n)]
    for _ in range(data.draw(st.integers(1, 4))):
        n = len(expected)
        if data.draw(st.booleans()):
            a, b = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            rows, expected = rows.take(Span(a, b))[0], expected[a:b]
        else:
            index = data.draw(st.lists(st.integers(0, n - 1), max_size=8)) if n else []
            rows = rows.take(Take(np.array(index, dtype=np.int64)))[0]
            expected = [expected[i] for i in index]
        assert pairs(rows) == expected
        assert len(rows) == len(expected)
        assert {b.uid for b in rows.blocks} == {uid for uid, _ in expected}
        blocks, numbers = rows.expand()
        found = zip(blocks.tolist(), numbers.tolist(), strict=True)
        assert [(rows.blocks[b].uid, r) for b, r in found] == expected


@pytest.mark.parametrize("ranks", [8, 64])
def test_work_of_a_split_does_not_grow_with_the_rows(ranks):
    """A part of a batch of a million rows a rank is one segment over one block."""
    whole, _ = concat([block(uid, 10**6) for uid in range(ranks)])
    for r in range(ranks):
        part, kept = whole.take(Span(r * 10**6, (r + 1) * 10**6))
        assert kept == (r,) and part.segments.tolist() == [[0, 0, 10**6]]
