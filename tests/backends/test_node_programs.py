"""What lives on nodes of a Ray cluster: keepers, and programs, which host environments as the
processes of this node do."""

import os
import signal
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from quadriga.agents.environments import Action, EnvironmentRef
from quadriga.agents.pool import EpisodePool
from quadriga.backends.ray import processes
from quadriga.backends.ray.keepers import keepers_of
from quadriga.config.schema import RewardConfig
from quadriga.errors import LostObjectError
from quadriga.rewards import RewardManager
from quadriga.rewards.functions import Sample
from quadriga.single_controller.keepers import keep
from quadriga.streams.playing import start_of

ENVIRONMENT = """
import os, signal, time

class Environment:
    def reset(self, row):
        self.row = row

    def step(self, action):
        if self.row.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100 if self.row.get("hangs") else 0)
        return str(os.getpid())
"""


@pytest.fixture
def ref(ray_backend, tmp_path):
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    return EnvironmentRef(str(tmp_path / "environment.py"), "Environment", {}).loaded()


@pytest.fixture
def pool(ref):
    with closing(EpisodePool(ref, 2, 2.0, start=processes.start_on_a_node)) as pool:
        yield pool


def play(pool, rows):
    for number, row in enumerate(rows):
        pool.play(number, row, [Action("one", 1)])
    found, until = {}, time.monotonic() + 100
    while len(found) < len(rows) and time.monotonic() < until:
        pool.wait(1.0)
        found |= {answer.episode: answer for answer in pool.answers()}
    return [found[number] for number in range(len(rows))]


def test_environments_are_hosted_and_end(pool):
    answers = play(pool, [{}] * 4)
    hosts = {int(answer.messages[0]["content"]) for answer in answers}
    assert len(hosts) == 2
    (parent,) = {psutil.Process(pid).parent().ppid() for pid in hosts}
    assert "NodePrograms" in " ".join(psutil.Process(parent).cmdline())
    pool.close()
    assert not psutil.wait_procs([psutil.Process(p) for p in hosts if psutil.pid_exists(p)], 10)[1]


def test_a_pool_begins_when_another_one_has_just_ended(ref):
    for _ in range(3):
        with closing(EpisodePool(ref, 1, 20.0, start=processes.start_on_a_node)) as pool:
            assert play(pool, [{}])[0].status == "observed"


def test_a_call_that_hangs_or_dies_costs_its_episode(pool):
    answers = play(pool, [{}, {"dies": True}, {"hangs": True}, {}])
    assert [answer.status for answer in answers] == ["observed", "crashed", "timed_out", "observed"]


REWARD = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0 if solution_str == "die" and os._exit(3) else float(os.getppid())
"""


def test_rewards_are_computed_on_nodes(ray_backend, tmp_path):
    (tmp_path / "rule.py").write_text(REWARD)
    settings = RewardConfig(path=str(tmp_path / "rule.py"), num_processes=2, spread=True)
    with closing(RewardManager.from_settings(settings, None, start=start_of(True))) as manager:
        samples = [Sample(manager.parts[0].function, "a", text, "", None) for text in "abc"]
        outcomes = manager._pool.run(samples)
        supervisors = [psutil.Process(int(one.score)) for one in outcomes]
        (parent,) = {one.ppid() for one in supervisors}
        assert "NodePrograms" in " ".join(psutil.Process(parent).cmdline())
        died = manager._pool.run([replace(samples[0], solution_str="die"), samples[1]])
        assert [one.status for one in died] == ["crashed", "scored"]


def test_the_programs_of_a_pool_outlive_those_of_an_earlier_one(pool, ref):
    assert play(pool, [{}])
    with closing(EpisodePool(ref, 2, 2.0, start=processes.start_on_a_node)) as later:
        before = play(later, [{}] * 2)
        pool.close()
        time.sleep(1.0)  # Ray ends an actor some tenths of a second after its handle
        after = play(later, [{}] * 2)
    assert {a.messages[0]["content"] for a in before} == {a.messages[0]["content"] for a in after}


def test_a_connection_without_the_token_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        strangers = [socket.create_connection(server.getsockname()) for _ in range(2)]
        strangers[0].sendall(b"t" * 8)
        strangers[1].close()
        own = socket.create_connection(server.getsockname())
        threading.Timer(0.1, own.sendall, [b"token678"]).start()
        with processes._accepted(server, b"token678") as found, own:
            found.send_bytes(b"hello")
            assert own.recv(9)[-5:] == b"hello"
        assert strangers[0].recv(1) == b""
        strangers[0].close()


def test_keepers_are_new_ones_and_live_as_long_as_their_handles(ray_backend):
    (first,), (second,) = keepers_of(["a node"]), keepers_of(["a node"])
    keep(second, "rank", 1, [b"x"])
    process = psutil.Process(int(first.begin("rank", 2)[0].split("/")[2]))
    del first
    process.wait(20)
    assert second.steps("rank") == [1]
    os.kill(int(second.begin("rank", 2)[0].split("/")[2]), signal.SIGKILL)
    with pytest.raises(LostObjectError, match="does not answer"):
        second.read("rank", 1, 0, 1)
    (third,) = keepers_of(["a node"])
    keep(third, "rank", 3, [b"y"])
    assert third.read("rank", 3, 0, 1) == b"y"
