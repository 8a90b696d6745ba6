"""Runs in virtual time, against times computed by hand."""

from itertools import pairwise

import numpy as np
import pytest

from quadriga.streams.simulation import Costs, Division, Simulation


def simulated(lengths, costs, *, trainers=1, copies=1, apart=True, groups=1, prompt=0, **more):
    given = {"staleness": 0, "slice_tokens": 100, **more}
    division = Division(trainers, copies, apart, groups, **given)
    return Simulation(division, costs, np.array(lengths), prompt).run()


BY_HAND = [
    # Replica 0 has rows of 1 and 4 tokens, replica 1 has 3: slices end at 2, 2 and at 4, 3. Eight
    # tokens train in 2 s, and the weights take 1 s.
    ([[1], [3], [4]], {"copies": 2, "groups": 3, "slice_tokens": 2}, {}, [4 + 2 + 1]),
    # 0.5 s more for each row and step: replica 0 takes 4 + 2.5.
    ([[1], [3], [4]], {"copies": 2, "groups": 3}, {"decode_row": 0.5}, [6.5 + 2 + 1]),
    # Each call takes 1 s more, and each prompt token and each begun one after a sync 0.1 s.
    ([[3], [3]], {"slice_tokens": 2, "prompt": 5}, {"call": 1, "prefill": 0.1},
     [3 + 2 + 0.5 + 2 + 1, 2 * 8.5]),
    # Tokens 0, 1 and 2 attend to 2, 3 and 4 tokens.
    ([[3]], {"prompt": 2}, {"decode_context": 1}, [3 + 9 + 1.25 + 1]),
    # In turns, two copies have half of the rows each, and both ranks train.
    ([[1], [3], [4], [2]], {"copies": 2, "trainers": 2, "groups": 4, "apart": False}, {},
     [4 + 1.25 + 1]),
    # Both groups begin at 0. The third one begins at 2.5, when the second one trains, and the
    # weight sync waits for it until 5.5.
    ([[2], [2], [3]], {"staleness": 1}, {"sync": 0}, [2.5, 5.5, 6.25]),
    # In turns, the row of 9 tokens has one slice in step 1, and two more in step 2, which must
    # train it. The third group is complete meanwhile.
    ([[3], [9], [1]], {"apart": False, "staleness": 1, "slice_tokens": 3}, {"train": 0},
     [4, 11, 12]),
]  # fmt: skip


@pytest.mark.parametrize(("lengths", "more", "costs", "ends"), BY_HAND)
def test_times_computed_by_hand(lengths, more, costs, ends):
    found = simulated(lengths, Costs(1.0, **{"train": 0.25, "sync": 1.0, **costs}), **more)
    assert found.ends == pytest.approx(ends)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_without_staleness_a_step_takes_the_time_of_its_parts(apart, copies):
    lengths = np.random.default_rng(copies).integers(1, 50, (12, 2))
    costs = Costs(0.1, 0.01, train=0.02, step=0.3, sync=0.4)
    found = simulated(lengths, costs, trainers=2, copies=copies, apart=apart, groups=6)
    for step, own in enumerate(lengths.reshape(2, 6, 2)):
        # In turns, a copy has neighbouring rows; on ranks of their own, replicas take turns.
        of_copy = [
            own.reshape(copies, -1)[i] if not apart else own[i::copies] for i in range(copies)
        ]
        generation = max(0.1 * rows.max() + 0.01 * rows.sum() for rows in of_copy)
        seconds = generation + 0.3 + 0.02 * own.sum() / 2 + 0.4
        assert found.ends[step] - (found.ends[step - 1] if step else 0) == pytest.approx(seconds)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("more", [{"apart": False, "copies": 2}, {"copies": 3, "rows": 4},
                                  {"copies": 2, "on_the_way": 5, "slice_tokens": 64}])  # fmt: skip
def test_every_group_is_trained_once_and_in_time(staleness, more):
    lengths = np.random.default_rng(0).lognormal(2, 1, (40, 2)).astype(int).clip(1, 60)
    given = {"slice_tokens": 8, "groups": 4, "staleness": staleness, **more}
    costs = Costs(0.01, 0.001, train=0.001, sync=0.1)
    found = simulated(lengths, costs, **given)
    assert sorted(found.numbers.ravel()) == list(range(40))
    assert found.ages.max() <= staleness and found.tokens.sum() == lengths.sum()
    assert (simulated(lengths, costs, **given).ends == found.ends).all()
    tracks = {span.track for span in found.spans}
    for track in tracks:
        own = [span for span in found.spans if span.track == track]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own)), "one thing at a time"
    assert 0 < found.share("trainer") <= 1 and 0 < found.share("replica") <= 1
    assert all(span.end >= span.start for span in found.spans)


@pytest.mark.parametrize(("train", "age"), [(1.0, 1), (0.05, 4)])
def test_groups_become_old_only_where_the_trainer_waits(train, age):
    """A group decodes in 20 s. It trains in 80 s, or in 4 s."""
    costs, more = Costs(0.5, train=train), {"slice_tokens": 4, "staleness": 4}
    found = simulated([[40, 40]] * 40, costs, **more)
    assert (found.ages[10:-4] == age).all()
