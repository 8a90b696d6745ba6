"""The built-in modes, meshes and backends satisfy the laws of the kit; faulty ones do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from quadriga.backends import get_backend
from quadriga.backends.local import LocalBackend, LocalWorkerGroup
from quadriga.backends.local.calls import LocalPending
from quadriga.errors import WorkerInitError
from quadriga.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn
from quadriga.single_controller.dispatch.modes import DispatchMode
from quadriga.testing import (
    BACKEND_LAWS,
    MODE_LAWS,
    BackendUnderTest,
    LawBroken,
    ModeUnderTest,
    SimulatedGroup,
    backend_laws,
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


def test_every_mode_except_the_reserved_one_is_checked():
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


@pytest.fixture
def short_deadlines(monkeypatch):
    """Late calls take 0.4 s: the local backend reports an exceeded deadline at once."""
    monkeypatch.setattr(backend_laws, "LATE_S", 0.4)


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=str)
def test_backends(subject, law, request):
    if subject.backend.name == "local":
        request.getfixturevalue("short_deadlines")
    law.check(subject)


# The kit must find faults: modes, meshes and backends with one fault each.


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


def mesh_mode(dispatch_fn=None, collect_fn=None):
    good = make_nd_compute_dataproto_dispatch_fn("mesh")
    return DispatchMode(
        "MINE", dispatch_fn or good["dispatch_fn"], collect_fn or good["collect_fn"]
    )


def a_copy_for_each_rank(group, data):
    info = group.dispatch_info("mesh")
    pieces = data.chunk(max(info) + 1)
    return ([pieces[part][:] for part in info],), {}


def in_rank_order(group, outputs):
    from quadriga.protocol import DataProto

    chosen = zip(outputs, group.collect_info("mesh"), strict=True)
    return DataProto.concat([output for output, collects in chosen if collects])


@pytest.mark.parametrize(
    ("mode", "law"),
    [
        (mesh_mode(a_copy_for_each_rank), "one object per part"),
        (mesh_mode(collect_fn=in_rank_order), "order"),
        (mesh_mode(collect_fn=in_rank_order), "as a mode"),
    ],
)
def test_the_kit_finds_faulty_modes_of_meshes(mode, law):
    dp_ranks, collects = [1, 1, 0, 0], [True, False, True, False]
    check_mesh(dp_ranks, collects)
    with pytest.raises(LawBroken) as caught:
        check_mesh(dp_ranks, collects, mode)
    assert law in caught.value.laws


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


class Incomplete(Faulty):
    share = None


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


class LosesFutures(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        return [Lost(p) for p in LocalBackend.submit(self, ranks, targets, calls, timeout)]

    def faulty_gather(self, pendings):
        return [lost.pending.result() for lost in pendings]


@dataclass
class Lost:
    pending: LocalPending

    def result(self):
        return None


class NeverEndsStreams(Faulty):
    """Generators that are dropped stay open."""

    def faulty_submit(self, ranks, targets, calls, timeout):
        def unless_it_ends(rank, call):
            closes = call.step is not None and call.step.action == "close"
            return None if closes else rank.invoke(call, timeout)

        return self.submit_with(unless_it_ends, ranks, targets, calls)


class SwapsItems(Faulty):
    """The second item comes before the first."""

    def faulty_submit(self, ranks, targets, calls, timeout):
        def swapped(rank, call):
            if call.step is None or call.method != "row_by_row" or call.step.action == "close":
                return rank.invoke(call, timeout)
            if call.step.action == "open":
                first = rank.invoke(call, timeout)
                self.held[rank] = first
                return rank.invoke(replace(call, step=replace(call.step, action="next")), timeout)
            return self.held.pop(rank, None) or rank.invoke(call, timeout)

        self.held = getattr(self, "held", Held())
        return self.submit_with(swapped, ranks, targets, calls)


class Held(dict):
    """Items by rank, which cannot be hashed."""

    def __setitem__(self, rank, item):
        super().__setitem__(id(rank), item)

    def pop(self, rank, default=None):
        return super().pop(id(rank), default)


class NeverAwaits(Faulty):
    def faulty_submit(self, ranks, targets, calls, timeout):
        def started(rank, call):
            if call.method == "later":
                return "a coroutine that was not awaited"
            return rank.invoke(call, timeout)

        return self.submit_with(started, ranks, targets, calls)


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


class UntypedStart(Faulty):
    def faulty_worker_group(self, pool, cls, **options):
        try:
            return LocalBackend.worker_group(self, pool, cls, **options)
        except WorkerInitError as error:
            raise RuntimeError("could not start") from error


class NoNames(Faulty):
    def faulty_worker_group(self, pool, cls, **options):
        class Group(LocalWorkerGroup):
            def __getattr__(self, name):
                raise AttributeError(name)

        return Group(pool, cls, backend=self, **options)


class NeverEnds(Faulty):
    def faulty_kill(self, handle):
        pass


FAULTS = {
    "protocol": Incomplete,
    "places": WrongRank,
    "modes": SwapsRanks,
    "padding": KeepsPadding,
    "mutation": SharesMemory,
    "futures": LosesFutures,
    "streams": NeverEndsStreams,
    "coroutines": NeverAwaits,
    "roles": NoSiblings,
    "errors": UntypedErrors,
    "deadlines": NoDeadlines,
    "failed start": UntypedStart,
    "names": NoNames,
    "end": NeverEnds,
}


def test_the_kit_finds_a_backend_that_swaps_items_of_a_stream():
    with BackendUnderTest(SwapsItems()) as subject, pytest.raises(LawBroken, match="item i is"):
        backend_laws.streams.check(subject)


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=str)
def test_the_kit_finds_faulty_backends(law, monkeypatch, short_deadlines):
    from quadriga.single_controller import WorkerGroup

    # Without this, the law "end" waits 60 s for ranks that do not end.
    monkeypatch.setattr(WorkerGroup.wait_until_ended, "__defaults__", (0.2,))
    laws = {one.name: one for one in BACKEND_LAWS}
    with BackendUnderTest(FAULTS[law.name]()) as subject:
        with pytest.raises(Exception):  # noqa: B017 - a faulty backend may raise any error
            law.check(subject)
        # The fault breaks this law only; another law still holds.
        laws["names" if law.name in ("coroutines", "mutation") else "coroutines"].check(subject)


def test_the_report_names_every_broken_law(short_deadlines):
    with pytest.raises(LawBroken, match="The backend 'local' breaks") as caught:
        check_backend(SwapsRanks())
    assert "modes" in caught.value.laws
    assert "coroutines" not in caught.value.laws
