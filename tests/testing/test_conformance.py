"""The project's own modes, meshes and backends obey the laws of the kit, and the kit can tell."""

from __future__ import annotations

import pytest

from quadriga.backends import get_backend
from quadriga.single_controller import Dispatch
from quadriga.single_controller.modes import DispatchMode
from quadriga.testing import (
    BACKEND_LAWS,
    MODE_LAWS,
    BackendUnderTest,
    LawBroken,
    ModeUnderTest,
    SimulatedGroup,
    check_backend,
    check_mesh,
    check_mode,
)


def megatron(name, carries, parts):
    group = SimulatedGroup(8, layout=(2, 1, 2, 2))
    return ModeUnderTest(Dispatch[name], group, carries, parts)


def plain(name, carries, **options):
    return ModeUnderTest(Dispatch[name], SimulatedGroup(4), carries, **options)


SUBJECTS = [
    plain("ONE_TO_ALL", "same"),
    plain("RANK_ZERO", "same"),
    plain("ALL_TO_ALL", "list"),
    plain("DP_COMPUTE", "list"),
    plain("DP_COMPUTE_PROTO", "batch"),
    plain("DP_COMPUTE_METRIC", "metric"),
    plain("DP_COMPUTE_PROTO_WITH_FUNC", "batch", functions=(len,)),
    megatron("MEGATRON_COMPUTE", "list", 2),
    megatron("MEGATRON_COMPUTE_PROTO", "batch", 2),
    megatron("MEGATRON_PP_AS_DP", "list", 4),
    megatron("MEGATRON_PP_AS_DP_PROTO", "batch", 4),
    megatron("MEGATRON_PP_ONLY", "same", None),
]


@pytest.mark.parametrize("law", MODE_LAWS, ids=str)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.mode.name)
def test_modes(subject, law):
    law.check(subject)


def test_every_mode_but_the_reserved_one_is_a_subject():
    assert {s.mode.name for s in SUBJECTS} == {m.name for m in Dispatch} - {"DIRECT_ROLLOUT_METHOD"}


@pytest.mark.parametrize(
    ("dp_ranks", "collects"),
    [
        ([0], [True]),
        ([0, 1, 2], [True] * 3),
        ([0, 0, 1, 1, 2, 2, 3, 3], [True, False] * 4),
        ([0, 1, 2, 0, 1, 2], [False] * 3 + [True] * 3),
        ([2, 1, 0], [True] * 3),
        ([0, 0, 0, 1], [False, True, False, True]),
        ([0, 1], [True, False]),
    ],
)
def test_meshes(dp_ranks, collects):
    check_mesh(dp_ranks, collects)


@pytest.mark.parametrize(
    ("dp_ranks", "collects"), [([0, 2], [True, True]), ([0, 0], [True, True]), ([0], [False])]
)
def test_meshes_that_break_laws(dp_ranks, collects):
    with pytest.raises(LawBroken, match="registration"):
        check_mesh(dp_ranks, collects)


@pytest.fixture(scope="module", params=["local", "ray"])
def subject(request):
    backend = get_backend(request.param)
    backend.start(num_cpus=8, object_store_memory=200 * 2**20)
    with BackendUnderTest(backend) as started:
        yield started
    backend.shutdown()


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=str)
def test_backends(subject, law):
    law.check(subject)


# A kit that finds nothing wrong proves nothing: modes and a backend with one fault each.


def faulty(name, dispatch_fn=None, collect_fn=None):
    good = Dispatch["DP_COMPUTE_PROTO"]
    return DispatchMode(name, dispatch_fn or good.dispatch_fn, collect_fn or good.collect_fn)


def reversed_parts(group, data):
    pieces = data.chunk(group.world_size)
    return (pieces[::-1],), {}


def in_place(group, data):
    data.batch["row"] += 1
    data.batch["row"] -= 0
    return (data.chunk(group.world_size),), {}


def keeps_padding(group, outputs):
    from quadriga.protocol import DataProto

    return DataProto.concat(outputs)


@pytest.mark.parametrize(
    ("mode", "law"),
    [
        (faulty("REVERSED", dispatch_fn=reversed_parts), "identity"),
        (faulty("POSITIONAL", dispatch_fn=reversed_parts), "keywords"),
        (faulty("IN_PLACE", dispatch_fn=in_place), "untouched"),
        (faulty("PADDED", collect_fn=keeps_padding), "padding"),
        (faulty("PADDED", collect_fn=keeps_padding), "padding of growing results"),
        (faulty("TO_ALL", dispatch_fn=Dispatch["ONE_TO_ALL"].dispatch_fn), "equal parts"),
        (faulty("TO_ALL", dispatch_fn=Dispatch["ONE_TO_ALL"].dispatch_fn), "refusal"),
    ],
)
def test_the_kit_finds_faulty_modes(mode, law):
    with pytest.raises(LawBroken) as caught:
        check_mode(mode)
    assert law in caught.value.laws


def test_the_kit_finds_a_faulty_backend():
    backend = get_backend("local")
    submit = backend.submit
    backend.submit = lambda ranks, targets, calls, timeout: submit(
        ranks, targets, list(calls)[::-1], timeout
    )
    with pytest.raises(LawBroken, match="The backend 'local' breaks") as caught:
        check_backend(backend)
    assert "modes" in caught.value.laws
    assert "coroutines" not in caught.value.laws
