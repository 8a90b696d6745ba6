"""The built-in modes, meshes and backends satisfy the laws of the kit; faulty ones do not."""

from __future__ import annotations

import pytest
from mode_laws import MODE_LAWS, ModeUnderTest, SimulatedGroup, check_mode

from quadriga.backends import get_backend
from quadriga.backends.local import LocalBackend, LocalPending
from quadriga.protocol import DataProto, pad_dataproto_to_divisor
from quadriga.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    uneven_dispatch_mode,
)
from quadriga.single_controller.modes import DispatchMode, inline_dispatch_mode
from quadriga.testing import (
    BACKEND_LAWS,
    BackendUnderTest,
    LawBroken,
    backends,
    check_all,
    check_backend,
)


def plain(name, carries, **options):
    return ModeUnderTest(Dispatch[name], SimulatedGroup(4), carries, **options)


UNEVEN = DispatchMode("UNEVEN", **uneven_dispatch_mode())
SUBJECTS = [
    plain("ONE_TO_ALL", "same"),
    plain("RANK_ZERO", "same"),
    plain("ALL_TO_ALL", "list"),
    plain("DP_COMPUTE", "list"),
    plain("DP_COMPUTE_PROTO", "batch"),
    plain("DP_COMPUTE_METRIC", "metric"),
    ModeUnderTest(UNEVEN, SimulatedGroup(4), uneven=True),
]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: s.mode.name)
def test_modes(subject):
    check_all(MODE_LAWS, subject, subject.mode.name)


def test_a_mesh():
    """Ranks 0 and 1 share a part, and one of them returns it; the parts are in another order."""
    mode = inline_dispatch_mode(make_nd_compute_dataproto_dispatch_fn("mesh"))
    meshes = {"mesh": ([1, 1, 0, 0], [True, False, True, False])}
    check_mode(mode, parts=2, meshes=meshes)
    with pytest.raises(LawBroken):
        check_mode(DispatchMode("X", mode.dispatch_fn, in_rank_order), parts=2, meshes=meshes)


def in_rank_order(group, outputs):
    chosen = zip(outputs, group.collect_info("mesh"), strict=True)
    return DataProto.concat([output for output, collects in chosen if collects])


@pytest.fixture(scope="module", params=["local", "ray"])
def subject(request):
    backend = get_backend(request.param)
    backend.start(num_cpus=8, object_store_memory=200 * 2**20)
    with BackendUnderTest(backend) as started:
        yield started
    backend.shutdown()


@pytest.fixture
def short_deadlines(monkeypatch):
    """Late calls take 0.4 s: the local backend reports an exceeded deadline at once."""
    monkeypatch.setattr(backends, "LATE_S", 0.4)


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=lambda law: law.__name__)
def test_backends(subject, law, request):
    if subject.backend.name == "local":
        request.getfixturevalue("short_deadlines")
    law(subject)


# The kit must find faults: modes, meshes and backends with one fault each.


def faulty(name, dispatch_fn=None, collect_fn=None):
    good = Dispatch["DP_COMPUTE_PROTO"]
    return DispatchMode(name, dispatch_fn or good.dispatch_fn, collect_fn or good.collect_fn)


def reversed_parts(group, data):
    pieces = data.chunk(group.world_size)
    return (pieces[::-1],), {}


def in_place(group, data):
    data.batch["row"] += 1
    return (data.chunk(group.world_size),), {}


def keeps_padding(group, outputs):
    return DataProto.concat(outputs)


@pytest.mark.parametrize(
    ("mode", "law"),
    [
        (faulty("REVERSED", dispatch_fn=reversed_parts), "identity"),
        (faulty("POSITIONAL", dispatch_fn=reversed_parts), "keywords"),
        (faulty("IN_PLACE", dispatch_fn=in_place), "untouched"),
        (faulty("PADDED", collect_fn=keeps_padding), "padding"),
        (faulty("TO_ALL", dispatch_fn=Dispatch["ONE_TO_ALL"].dispatch_fn), "equal_parts"),
        (faulty("TO_ALL", dispatch_fn=Dispatch["ONE_TO_ALL"].dispatch_fn), "refusal"),
    ],
)
def test_the_kit_finds_faulty_modes(mode, law):
    with pytest.raises(LawBroken) as caught:
        check_mode(mode)
    assert law in caught.value.laws


def test_the_kit_finds_a_mode_that_pads_instead_of_splitting_unevenly():
    def padded(group, data):
        whole, _ = pad_dataproto_to_divisor(data, group.world_size)
        return (whole.chunk(group.world_size),), {}

    with pytest.raises(LawBroken) as caught:
        check_mode(DispatchMode("PADS", padded, UNEVEN.collect_fn), uneven=True)
    assert "refusal" in caught.value.laws


# Local backends with one fault each.


class Faulty(LocalBackend):
    def __init__(self):
        super().__init__()
        for method in ("submit", "gather", "worker_group", "kill"):
            tampered = getattr(self, "faulty_" + method, None)
            if tampered is not None:
                setattr(self, method, tampered)

    def submit_with(self, run, ranks, targets, calls):
        """Use `run(rank, call)` as the result of each rank."""
        return [
            LocalPending(run(ranks.handles[t].native, call))
            for t, call in zip(targets, calls, strict=True)
        ]


class WrongRank(Faulty):
    def faulty_worker_group(self, pool, cls, **options):
        group = LocalBackend.worker_group(self, pool, cls, **options)
        for handle in group._ranks.handles:
            handle.native.variables["RANK"] = "7"
        return group


class SwapsRanks(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        return LocalBackend.submit(self, ranks, targets, list(calls)[::-1], timeout)


class KeepsPadding(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        def unless_padded(rank, call):
            value = rank.invoke(call, timeout)
            padded = call.method == "double" and len(value) == 3
            return value.repeat(2) if padded and rank.host.place.rank else value

        return self.submit_with(unless_padded, ranks, targets, calls)


class SharesMemory(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        return self.submit_with(
            lambda rank, call: getattr(rank.host.workers[call.role], call.method)(
                *call.args, **call.kwargs
            ),
            ranks, targets, calls,
        )  # fmt: skip


class NeverEndsStreams(Faulty):
    """Generators that are dropped stay open."""

    def faulty_submit(self, ranks, targets, calls, timeout):
        def unless_it_ends(rank, call):
            closes = call.step is not None and call.step.action == "close"
            return None if closes else rank.invoke(call, timeout)

        return self.submit_with(unless_it_ends, ranks, targets, calls)


class NoSiblings(Faulty):
    def faulty_worker_group(self, pool, cls, **options):
        group = LocalBackend.worker_group(self, pool, cls, **options)
        for handle in group._ranks.handles:
            for worker in handle.native.host.workers.values():
                worker._siblings = {}
        return group


class UntypedErrors(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        def untyped(rank, call):
            if call.method == "fail":
                raise RuntimeError("something went wrong")
            return rank.invoke(call, timeout)

        return self.submit_with(untyped, ranks, targets, calls)


class NoDeadlines(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        return LocalBackend.submit(self, ranks, targets, calls, None)


class NeverEnds(Faulty):
    def faulty_kill(self, handle):
        pass


FAULTS = {
    "places": WrongRank,
    "modes": KeepsPadding,
    "mutation": SharesMemory,
    "streams": NeverEndsStreams,
    "roles": NoSiblings,
    "errors": UntypedErrors,
    "deadlines": NoDeadlines,
    "end": NeverEnds,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_kit_finds_faulty_backends(name, monkeypatch, short_deadlines):
    from quadriga.single_controller import WorkerGroup

    # Without this, the law "end" waits 60 s for ranks that do not end.
    monkeypatch.setattr(WorkerGroup.wait_until_ended, "__defaults__", (0.2,))
    (law,) = [law for law in BACKEND_LAWS if law.__name__ == name]
    with BackendUnderTest(FAULTS[name]()) as subject:
        with pytest.raises(Exception):  # noqa: B017 - a faulty backend may raise any error
            law(subject)
        assert subject.probe.first() == 0  # the fault breaks this law only


def test_the_report_names_every_broken_law(short_deadlines):
    with pytest.raises(LawBroken, match="The backend 'local' breaks") as caught:
        check_backend(SwapsRanks())
    assert "modes" in caught.value.laws and "protocol" not in caught.value.laws
