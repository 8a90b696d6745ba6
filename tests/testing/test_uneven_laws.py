"""The laws of modes that split any number of rows without padding."""

from __future__ import annotations

import pytest

from quadriga.protocol import pad_dataproto_to_divisor
from quadriga.single_controller import uneven_dispatch_mode
from quadriga.single_controller.dispatch.modes import DispatchMode
from quadriga.testing import MODE_LAWS, LawBroken, ModeUnderTest, SimulatedGroup, check_mode

UNEVEN = DispatchMode("UNEVEN", **uneven_dispatch_mode())


@pytest.mark.parametrize("law", MODE_LAWS, ids=str)
def test_the_mode_satisfies_every_law(law):
    law.check(ModeUnderTest(UNEVEN, SimulatedGroup(4), uneven=True))


def test_the_kit_finds_a_mode_that_pads_instead_of_splitting_unevenly():
    def padded(group, data):
        whole, _ = pad_dataproto_to_divisor(data, group.world_size)
        return (whole.chunk(group.world_size),), {}

    with pytest.raises(LawBroken) as caught:
        check_mode(DispatchMode("PADS", padded, UNEVEN.collect_fn), uneven=True)
    assert "uneven parts" in caught.value.laws
