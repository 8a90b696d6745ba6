"""Keepers: the last two complete entries, written into memory or sent in calls."""

import os

import pytest

from quadriga.single_controller import keepers


@pytest.mark.parametrize("here", [True, False])
def test_a_keeper_has_the_last_two_complete_entries(monkeypatch, here):
    places, sizes = set(), []

    class Kept(keepers.KeptValues):
        def begin(self, key, step):
            places.add(place := super().begin(key, step))
            return place if here else (os.devnull, "of another machine")

        def write(self, key, data):
            sizes.append(len(data))
            super().write(key, data)

    monkeypatch.setattr(keepers, "PART_BYTES", 10)
    write = os.write  # may write a part
    monkeypatch.setattr(os, "write", lambda number, data: write(number, data[:3]))
    keeper, entries = Kept(), {s: [bytes([s]) * n for n in (1, 25, 0, 7)] for s in range(5)}
    for step, values in entries.items():
        keepers.keep(keeper, "rank", step, values)
    assert [keeper.read("rank", s, 0, 33) for s in (3, 4)] == [b"".join(entries[s]) for s in (3, 4)]
    assert len(places) == 2 and max(sizes, default=10) == 10 and here == (not sizes)
    keeper.begin("rank", 4)  # step 4 is done again, and its snapshot is cut
    assert keeper.steps("rank") == [3]
