"""Runs that lose processes at random moments of all phases go on by themselves.

`RESTART_VICTIMS` is a list of what is killed (`SETTINGS`), `RESTART_KILLS` the number of kills for
each, `RESTART_SEED` another choice of moments. Each kill is printed as JSON, with the seconds until
the run went on.
"""

import json
import os
import random
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import psutil
import pytest
from restart_program import PARTS, PHASES, below
from run_cases import check_equal, two_steps
from run_process import started_run

from quadriga.checkpoint.remote import RemoteRun
from quadriga.config.stores import MARKER
from quadriga.observability.jsonl import read_jsonl

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
KILLS = int(os.environ.get("RESTART_KILLS", "10"))
SEED = int(os.environ.get("RESTART_SEED", "1"))
PROGRAM = str(Path(__file__).parent / "restart_program.py")
COMMON = (
    "trainer.total_training_steps=12", "trainer.save_freq=2", "trainer.test_freq=2",
    "data.shuffle=true", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive", "trainer.num_cpus=2", "trainer.n_gpus_per_node=2",
    "placement.actor=[0]", "placement.rollout=[1]", "trainer.samples_per_step=99",
    "trainer.max_restarts=99",
)  # fmt: skip
RAY = ("trainer.backend=ray",)
TOGETHER = ("placement.actor=null", "placement.rollout=null")
NODES = (*RAY, *TOGETHER, "trainer.n_gpus_per_node=1", "trainer.nnodes=2", "trainer.num_cpus=null")
SETTINGS = {
    "controller": ("--supervise",),
    "controller of a stream": (
        "--supervise", "trainer.max_staleness=2", "actor_rollout_ref.rollout.slice_tokens=3",
        "data.max_response_length=40", "trainer.n_gpus_per_node=1", *TOGETHER,
        f"actor_rollout_ref.rollout.sampling.stop_token_ids={list(range(3, 40))}",
    ),
    "controller on ray": (*RAY, "--supervise"),
    "controller beside s3": ("--supervise",),
    "reward": ("reward.num_processes=2",),
    "rank": RAY,
    "rank beside s3": RAY,
    "rank keeper ranks beside snapshots": (
        *RAY, "trainer.snapshot_freq=1", "trainer.save_freq=3",
    ),
    "raylet": RAY,
    "gcs": (*RAY, "--supervise"),  # for its end while Ray starts
    "node": (*NODES, "trainer.restart_wait_s=60"),
}  # fmt: skip
"""Victims (words) → the settings of the run."""
VICTIMS = os.environ.get("RESTART_VICTIMS", ",".join(SETTINGS)).split(",")
WHOLE: dict[tuple[str, ...], Path] = {}
"""Settings → the run without kills."""
FIRST = [("start", 0), ("save", 1), ("load", 0), ("restart", 0)]
"""The kills with which a run begins: to load, it needs a checkpoint and a kill."""


def plans(victim, clock):
    """Yield the kills of each run."""
    first = [] if victim == "reward" else FIRST  # a run that loses one does not restart
    victims = [word for word in victim.split() if word in SETTINGS or word in PARTS]
    others, left = cycle([p for p in PHASES if p not in ("start", "load", "restart")]), KILLS
    while left > 0:
        more = [(p, clock.randint(0, 1)) for p in islice(others, 10 - len(first))]
        each = [*[victims[0]] * len(first), *islice(cycle(victims), len(more))]
        yield (chosen := [(*one, each.pop(0)) for one in [*first, *more]])
        left -= len(chosen)


def run_with(kills, settings, task, rule, folder, nodes=None, seed=0) -> list[dict[str, object]]:
    """Run with these kills to its end. Return the kills, each with the seconds that it cost."""
    folder.mkdir()
    before = {*os.listdir("/dev/shm")}
    plan = json.dumps({"kills": kills, "seed": seed, "folder": str(folder)})
    words = ["train", *two_steps(task, folder), *COMMON, *settings, rule]
    own = TemporaryDirectory(prefix="sweep-")  # a short path, for the sockets in it
    with (
        own as temporary,
        patch.dict(os.environ, TMPDIR=temporary),
        started_run(words, folder / "out", (PROGRAM, plan)) as run,
    ):
        while nodes is not None and run.popen.poll() is None:
            nodes.replace_lost(folder)
        assert run.popen.wait(2000) == 0, run.output.read_text()[-5000:]
        run.seconds_until_empty(timeout_s=20)
        # The folder of a session of Ray stays until the next one, for its logs.
        assert {name[:13] for name in os.listdir(temporary)} <= {"quadriga-ray-"}
    if nodes is None:
        assert not {*os.listdir("/dev/shm")} - before
    else:
        nodes.check_empty()
    left = {path.name for path in (folder / "run").rglob("*")}
    assert not {n for n in left if n.endswith((".partial", ".lock", ".replaced", ".set_aside"))}
    rows = list(read_jsonl(folder / "kills.jsonl"))
    for number, row in enumerate(rows):
        row["seconds"] = next((b["at"] - row["at"] for b in rows[number:] if "goes_on" in b), 0.0)
    return [row for row in rows if "victim" in row]


class Nodes:
    """A cluster of a head without ranks and two nodes, of which a lost one comes back."""

    returns = True

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.store = {"object_store_memory": 100 * 2**20}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self.store})
        self.nodes = [self.cluster.add_node(num_cpus=1, **self.store) for _ in range(2)]

    def raylets(self):
        return [psutil.Process(n.all_processes["raylet"][0].process.pid) for n in self.nodes]

    def replace_lost(self, folder):
        for number, raylet in enumerate(self.raylets()):
            if self.returns and raylet.status() == psutil.STATUS_ZOMBIE:
                self.cluster.remove_node(self.nodes.pop(number), allow_graceful=False)
                self.nodes.append(self.cluster.add_node(num_cpus=1, **self.store))
        (folder / "new").write_text(json.dumps([raylet.pid for raylet in self.raylets()]))
        (folder / "new").replace(folder / "raylets.json")

    def check_empty(self):
        left = [rank for raylet in self.raylets() for rank in below(raylet, "rank")]
        assert not psutil.wait_procs(left, 20)[1]


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as in a Ray that a run starts
    nodes = Nodes()
    monkeypatch.setenv("RAY_ADDRESS", nodes.cluster.address)
    yield nodes
    nodes.cluster.shutdown()


@pytest.mark.parametrize("victim", VICTIMS)
def test_runs_that_lose_processes_at_any_moment_equal_one_that_does_not(
    tiny_task, rule, victim, tmp_path, request
):
    settings, clock, killed = SETTINGS[victim], random.Random(f"{victim} {SEED}"), 0
    own = request.getfixturevalue("nodes") if victim == "node" else None
    if "s3" in victim:
        request.getfixturevalue("s3")
    plain = [setting for setting in settings if setting != "--supervise"]
    if (whole := WHOLE.setdefault((*plain,), tmp_path / "whole")).parent == tmp_path:
        run_with([], plain, tiny_task, rule, whole, own)
    for number, kills in enumerate(plans(victim, clock)):
        folder = tmp_path / f"{number}"
        url = f"s3://bucket/{number}" if "s3" in victim else f"{tmp_path}/remote{number}"
        more = (*settings, f"trainer.remote_dir={url}")
        found = run_with(kills, more, tiny_task, rule, folder, own, seed=SEED + number)
        check_equal(run := folder / "run", whole / "run", 12)
        store, files = RemoteRun(url).store, {*filter(Path.is_file, run.rglob("*"))}
        copied = {str(file.relative_to(run)): file.read_bytes() for file in files}
        assert {*store.files()} == {*copied, f"model/{MARKER}", "checkpoints/steps.json"}
        assert [name for name in copied if store.read(name) != copied[name]] == []
        killed += len(found)
        print("", *(json.dumps(row | {"run": victim}) for row in found), sep="\n", flush=True)
    assert killed >= KILLS // 2


def test_a_run_whose_node_does_not_come_back_goes_on_with_the_other(
    tiny_task, rule, tmp_path, nodes
):
    nodes.returns, folder = False, tmp_path / "lost"
    settings = (*NODES, "trainer.restart_wait_s=3")
    assert run_with([("updates", 2, "node")], settings, tiny_task, rule, folder, nodes)
    assert [row["step"] for row in read_jsonl(folder / "run/metrics.jsonl")] == [*range(13)]
    assert "going on with 1 of 2 nodes" in (folder / "out").read_text()
