"""The backends satisfy the laws of the kit, and those with a fault do not."""

import pytest

from quadriga.backends import get_backend
from quadriga.backends.local import LocalBackend, LocalPending
from quadriga.testing import BACKEND_LAWS, BackendUnderTest, LawBroken, backends, check_backend


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


# The kit must find faults: local backends with one fault each.


class Faulty(LocalBackend):
    def submit_with(self, run, ranks, targets, calls):
        """Use `run(rank, call)` as the result of each rank."""
        return [
            LocalPending(run(ranks.handles[t].native, call))
            for t, call in zip(targets, calls, strict=True)
        ]


class WrongRank(Faulty):
    def worker_group(self, pool, cls, **options):
        group = LocalBackend.worker_group(self, pool, cls, **options)
        for handle in group._ranks.handles:
            handle.native.variables["RANK"] = "7"
        return group


class SwapsRanks(Faulty):
    def submit(self, ranks, targets, calls, timeout):
        return LocalBackend.submit(self, ranks, targets, list(calls)[::-1], timeout)


class KeepsPadding(Faulty):
    def submit(self, ranks, targets, calls, timeout):
        def unless_padded(rank, call):
            value = rank.invoke(call, timeout)
            padded = call.method == "double" and len(value) == 3
            return value.repeat(2) if padded and rank.host.place.rank else value

        return self.submit_with(unless_padded, ranks, targets, calls)


class SharesMemory(Faulty):
    def submit(self, ranks, targets, calls, timeout):
        return self.submit_with(
            lambda rank, call: getattr(rank.host.workers[call.role], call.method)(
                *call.args, **call.kwargs
            ),
            ranks, targets, calls,
        )  # fmt: skip


class NeverEndsStreams(Faulty):
    """Generators that are dropped stay open."""

    def submit(self, ranks, targets, calls, timeout):
        def unless_it_ends(rank, call):
            closes = call.step is not None and call.step.action == "close"
            return None if closes else rank.invoke(call, timeout)

        return self.submit_with(unless_it_ends, ranks, targets, calls)


class NoSiblings(Faulty):
    def worker_group(self, pool, cls, **options):
        group = LocalBackend.worker_group(self, pool, cls, **options)
        for handle in group._ranks.handles:
            for worker in handle.native.host.workers.values():
                worker._siblings = {}
        return group


class UntypedErrors(Faulty):
    def submit(self, ranks, targets, calls, timeout):
        def untyped(rank, call):
            if call.method == "fail":
                raise RuntimeError("something went wrong")
            return rank.invoke(call, timeout)

        return self.submit_with(untyped, ranks, targets, calls)


class NoDeadlines(Faulty):
    def submit(self, ranks, targets, calls, timeout):
        return LocalBackend.submit(self, ranks, targets, calls, None)


class NeverEnds(Faulty):
    def kill(self, handle):
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
