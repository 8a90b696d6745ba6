"""A call whose `.remote()` raises for one rank when other ranks have received it."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from worker_cases import wait_for

from group_fixtures import group_on_ray
from quadriga.backends.ray import calls
from quadriga.errors import WorkerDiedError, WorkerError, WorkerMethodError
from quadriga.single_controller import Dispatch, Worker, register

QUEUE = 3
"""How many calls Ray accepts for one rank."""


class Gated(Worker):
    def __init__(self):
        super().__init__()
        self.ran = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for(self, path):
        assert wait_for(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def record(self, value, more=None):
        self.ran.append(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self):
        ran, self.ran = self.ran, []
        return ran

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def items(self, value):
        try:
            self.ran.append(value)
            yield value
        finally:
            self.ran.append("closed")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self):
        """Start a process group of all ranks."""
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self):
        import torch.distributed as dist

        dist.barrier()


class GatedCoroutines(Gated):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self):
        return self.rank


gated = group_on_ray(Gated, 3, timeout=60)


@pytest.fixture
def group(gated):
    """Three ranks that have recorded nothing."""
    gated.recorded()
    return gated


def refuse_rank(monkeypatch, group, rank):
    """Let `.remote()` of one rank raise."""
    send = calls.RayMethod.send
    native = group._ranks.handles[rank].native

    def refuse(method, *arguments):
        if method._actor is native:
            raise RuntimeError("planted")
        return send(method, *arguments)

    monkeypatch.setattr(calls.RayMethod, "send", refuse)


def test_a_full_queue_of_one_rank_is_its_failure_and_the_others_run_the_call(
    start_on_ray, tmp_path
):
    group = start_on_ray(Gated, 3, actor={"max_pending_calls": QUEUE}, timeout=60)
    gate = tmp_path / "gate"
    waiting = [group.workers[2].wait_for.remote(str(gate)) for _ in range(QUEUE)]
    with pytest.raises(WorkerError, match=r"(?s)Gated.record could not be sent to rank 2 on .*"
                       r"PendingCallsLimit.*that received the call: 0, 1\.") as raised:  # fmt: skip
        group.record("half")
    error = raised.value
    assert (error.role, error.rank, error.method) == ("Gated", 2, "record")
    gate.touch()
    ray.get(waiting)
    group.record("after")
    assert group.recorded() == [["half", "after"], ["half", "after"], ["after"]]


@pytest.mark.nightly
def test_ranks_that_wait_for_it_in_a_collective_are_killed(start_on_ray, monkeypatch):
    """The rule for every rank that fails. Nothing is left that waits."""
    group = start_on_ray(Gated, 3, timeout=60)
    group.join()
    with monkeypatch.context() as patched:
        refuse_rank(patched, group, 2)
        with pytest.raises(WorkerError, match=r"(?s)to rank 2 .*collective and killed: .* 0, 1"):
            group.meet()
    with pytest.raises(WorkerDiedError, match=r"recorded cannot be called: .*0, 1 were killed"):
        group.recorded()


@pytest.mark.nightly
def test_a_rank_without_the_call_has_no_ticket_for_it(start_on_ray, monkeypatch):
    """Its next call would wait for the missing one."""
    group = start_on_ray(GatedCoroutines, 3, timeout=60)
    group.record("first")
    with monkeypatch.context() as patched:
        refuse_rank(patched, group, 1)
        with pytest.raises(WorkerError, match=r"sent to rank 1 .*RuntimeError: planted"):
            group.record("half")
    group.record("last")
    assert group.recorded() == [["first", "half", "last"], ["first", "last"], ["first", "last"]]


def test_a_generator_is_ended_if_a_later_rank_cannot_be_called(group, monkeypatch):
    with monkeypatch.context() as patched:
        refuse_rank(patched, group, 2)
        stream = group.items.stream("item")
        with pytest.raises(WorkerError, match="rank 2"):
            next(stream)
    assert group.recorded() == [["item", "closed"], ["item", "closed"], []]


def test_a_call_that_is_cancelled_at_once_leaves_no_gap(group, tmp_path, monkeypatch):
    """Ray would refuse the next call of each rank, after half a minute, if it was asked to cancel a
    call that is not sent yet. The cancelled call is run: ranks without coroutine methods cannot
    drop it."""
    monkeypatch.setattr(ray, "cancel", lambda ref: pytest.fail("the call may not be sent yet"))
    gate = tmp_path / "gate"
    first = group.wait_for(str(gate))
    for _ in range(30):
        cancelled = group.record.submit("cancelled")
        assert cancelled.cancel()
    gate.touch()
    first.get()
    group.record.options(timeout=20)("after")
    assert [seen[-1] for seen in group.recorded()] == ["after"] * 3
    assert cancelled.done()
    with pytest.raises(WorkerMethodError, match=r"record, rank 0 on .*, was cancelled"):
        cancelled.get(timeout=20)
    with pytest.raises(WorkerMethodError, match="was cancelled"):
        group.record("argument", cancelled)


def test_a_wait_ends_when_another_thread_cancels_the_call(group, tmp_path):
    gate = tmp_path / "gate"
    waiting = group.wait_for(str(gate))
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(waiting.get, 30)
        time.sleep(0.3)
        assert waiting.cancel()
        with pytest.raises(WorkerMethodError, match="was cancelled"):
            ended.result(timeout=20)
    gate.touch()
    assert group.recorded() == [[]] * 3
