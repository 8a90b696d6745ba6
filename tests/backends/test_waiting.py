"""A wait ends with the first failure of anything that it waits for, and pulls results once."""

import pickle
import time

import pytest
from ray.exceptions import GetTimeoutError
from worker_cases import Cases, prompts

from group_fixtures import Starter
from quadriga.backends.ray import calls, health, store
from quadriga.backends.ray.calls import RayBatch, RayPending
from quadriga.errors import CallTimeoutError, WorkerDiedError, WorkerMethodError
from quadriga.protocol import DataProtoFuture, as_completed
from quadriga.single_controller.backend import RankFacts, RankHandle, forget, report

SOON_S = 50
"""Less than the ranks wait that do not fail."""


@pytest.fixture(scope="module")
def late_groups(ray_backend):
    """Two groups; one runs while the other fails."""
    start = Starter(ray_backend)
    yield [start(Cases, 2, role="late") for _ in range(2)]
    start.end()


@pytest.fixture
def late(late_groups, sign):
    """The first of the two groups, idle after the test."""
    yield late_groups[0]
    open(sign, "w").close()
    for group in late_groups:
        group.take(0)


@pytest.fixture
def running(late, sign):
    return late.make_late.submit(prompts(4), sign)


@pytest.fixture
def failing(late_groups, running, sign):
    """The second result, whose rank 0 fails while rank 1 waits."""
    return late_groups[1].make_late.submit(prompts(4), sign, fails=0)


def raised_soon(call, match: str) -> WorkerMethodError:
    began = time.monotonic()
    with pytest.raises(WorkerMethodError, match=match) as caught:
        call()
    assert time.monotonic() - began < SOON_S
    return caught.value


def test_a_failed_rank_ends_the_wait_of_the_rank_that_receives_its_future(ray_cases, late, sign):
    """Rank 0 does not return, so a wait for one result after the other would never end."""
    future = late.make_late.submit(prompts(4), sign, fails=1)
    error = raised_soon(lambda: ray_cases.take(future), r"KeyError in late\.make_late, rank 1 of 2")
    assert error.role == "critic" and error.__cause__.rank == 1


@pytest.mark.parametrize("kind", ["keywords", "list", "split"])
def test_a_failed_future_ends_the_wait_for_another_argument(
    ray_cases, running, failing, kind, monkeypatch
):
    take = ray_cases.take
    made = {
        "keywords": lambda: take(value=running, other=failing),
        "list": lambda: take([running, failing]),
        "split": lambda: take(failing, running),
    }
    if kind == "split":
        monkeypatch.setattr(calls, "MANY", 0)
    raised_soon(made[kind], r"KeyError in late\.make_late, rank 0 of 2")


def test_a_failed_future_ends_the_wait_for_a_joined_future(running, failing):
    joined = DataProtoFuture.concat([running, failing])
    raised_soon(joined.get, r"KeyError in late\.make_late, rank 0 of 2")
    again = DataProtoFuture.concat([joined, running])
    raised_soon(again.chunk(2)[0].get, r"KeyError in late\.make_late, rank 0 of 2")


def test_the_deadline_of_a_call_also_ends_the_wait_of_the_rank_that_receives_it(
    ray_cases, late, sign
):
    future = late.make_late.options(timeout=1).submit(prompts(4), sign)
    error = raised_soon(
        lambda: ray_cases.take(future),
        r"result of late\.make_late, rank \d on .*exceeded its deadline",
    )
    assert isinstance(error.__cause__, CallTimeoutError)


class FakeRay:
    """Stand in for `ray`: one result exists and is local, another is so after two requests."""

    def __init__(self) -> None:
        self.remote, self.log = {"far"}, []

    def get(self, refs, timeout=None):
        self.log.append(("get", refs, timeout))
        if self.remote & set(refs):
            raise GetTimeoutError
        return [f"value of {ref}" for ref in refs]

    def wait(self, refs, num_returns, timeout):
        self.log.append(("wait", refs))
        if len(self.log) > 3:
            self.remote.clear()
        return [r for r in refs if r not in self.remote], [r for r in refs if r in self.remote]


def test_a_remote_result_is_pulled_by_waiting_and_read_once(monkeypatch):
    """A `ray.get` that times out cancels its pull; a `ray.wait` does not."""
    fake = FakeRay()
    for module in (store, calls):
        monkeypatch.setattr(module, "ray", fake)
    both = ["near", "far"]
    facts = RankFacts(0, 1, "node", 0, "", "")
    values = RayBatch(both, [RankHandle(None, "", facts)] * 2, "role.method").gather()
    assert values == ["value of near", "value of far"]
    assert fake.log == [
        ("get", both, calls.FIRST_WAIT_S),
        ("wait", both), ("get", ["near"], 0), ("wait", ["far"]), ("get", ["far"], 0),
    ]  # fmt: skip


def test_a_wait_for_a_rank_ends_when_its_node_is_silent(ray_backend, monkeypatch):
    handle = RankHandle(None, "a", RankFacts(3, 4, "node-1", 0, "", "", node_id="silent"))
    waiting = RayBatch(["ref"], [handle], "actor.make")
    monkeypatch.setattr(RayBatch, "_unfinished", lambda self: [0])
    monkeypatch.setattr(health, "probe_nodes", lambda ids: dict.fromkeys(ids, "silent"))
    monkeypatch.setattr(health, "_failing", {"silent": (time.monotonic() - 60, 9)})
    with pytest.raises(WorkerDiedError, match="make was in flight: its node does not respond"):
        waiting.look(time.monotonic() + calls.PROBE_S)


def test_a_sent_result_keeps_the_rest_of_its_deadline():
    handle = RankHandle(None, "a", RankFacts(3, 4, "node-1", 0, "", ""))
    pending = RayPending(RayBatch(["ref"], [handle], "actor.make", timeout=50), 0)
    sent = pickle.loads(pickle.dumps(pending))
    assert sent.batch.label == "actor.make, rank 3 on node-1"
    assert 40 < sent.batch.expires - time.monotonic() <= 50


def test_a_future_is_done_when_one_of_its_ranks_has_failed(late, sign):
    future = late.make_late.submit(prompts(4), sign, fails=1)
    assert next(as_completed([future], timeout=SOON_S)) is future
    raised_soon(future.get, "reward_model")


def test_a_future_is_done_at_the_deadline_of_its_call(late, sign):
    future = late.make_late.options(timeout=0.3).submit(prompts(4), sign)
    assert next(as_completed([future], timeout=SOON_S)) is future
    with pytest.raises(CallTimeoutError, match=r"exceeded its deadline of 0\.3 s"):
        future.get()
    assert future.cancel()


def test_a_future_is_done_when_a_watched_group_is_broken(running):
    owner = Cases
    assert not running.done()
    report(owner, WorkerDiedError("rank 3 of another group has ended"))
    try:
        assert running.done()
        with pytest.raises(WorkerDiedError, match="rank 3 of another group"):
            running.get()
    finally:
        forget(owner)
    assert not running.done()
