"""Runs on Ray whose ranks are killed at random moments of all phases go on by themselves.

`RESTART_KILLS` is the number of kills, `RESTART_PHASES` a list of phases instead of all,
`RESTART_SEED` another choice of moments, `RESTART_SETTINGS` more settings. A summary is printed as
JSON.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pytest
from restart_program import PHASES
from run_cases import check_equal, two_steps
from run_process import started_run

from quadriga.observability.jsonl import read_jsonl

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
KILLS = int(os.environ.get("RESTART_KILLS", "20"))
SEED = int(os.environ.get("RESTART_SEED", "1"))
PER_RUN = 4
CHOSEN = [p for p in PHASES if p in os.environ.get("RESTART_PHASES", ",".join(PHASES)).split(",")]
PROGRAM = str(Path(__file__).parent / "restart_program.py")
SETTINGS = (
    "trainer.total_training_steps=6", "trainer.save_freq=2", "trainer.test_freq=3",
    "data.shuffle=true", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive", "trainer.backend=ray", "trainer.num_cpus=2",
    "trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]",
    "trainer.samples_per_step=99", "trainer.max_restarts=99",
    *os.environ.get("RESTART_SETTINGS", "").split(),
)  # fmt: skip


def run_with(kills, task, rule, folder, seed=0) -> list[dict[str, object]]:
    """Run with these kills to its end. Return what was killed."""
    folder.mkdir(exist_ok=True)
    before, log = {*os.listdir("/dev/shm")}, folder / "kills.jsonl"
    plan = json.dumps({"kills": kills, "seed": seed, "log": str(log)})
    overrides = [*two_steps(task, folder), *SETTINGS, rule]
    with started_run(overrides, folder / "out", (PROGRAM, plan)) as run:
        code = run.popen.wait(600)
        assert code == 0, run.output.read_text()[-5000:]
        run.seconds_until_empty(timeout_s=20)
    assert not {*os.listdir("/dev/shm")} - before
    left = {path.name for path in (folder / "run").rglob("*")}
    assert not {n for n in left if n.endswith((".partial", ".lock", ".replaced", ".set_aside"))}
    return list(read_jsonl(log)) if log.exists() else []


@pytest.fixture(scope="module")
def whole(tiny_task, rule, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_with([], tiny_task, rule, folder)
    return folder


def test_runs_that_lose_ranks_at_any_moment_equal_one_that_does_not(
    tiny_task, rule, whole, tmp_path
):
    clock, killed, told = random.Random(SEED), [], []
    phases = list(islice(cycle(CHOSEN), KILLS))
    clock.shuffle(phases)
    most = {"start": 1, "load": 1, "restart": 2, "save": 3, "validation": 3}
    for number in range(0, KILLS, PER_RUN):
        chosen = phases[number : number + PER_RUN]
        kills = [(phase, clock.randint(1, most.get(phase, 5))) for phase in chosen]
        folder = tmp_path / f"{number}"
        killed += run_with(kills, tiny_task, rule, folder, seed=SEED + number)
        print("kills:", kills)
        told += check_equal(folder / "run", whole / "run")
    seconds = sorted(row["restarts/seconds"] for row in told)
    summary = {
        "kills": len(killed),
        "by_phase": Counter(kill["phase"] for kill in killed),
        "restarts": len(told),
        "seconds": {"median": seconds[len(seconds) // 2], "most": seconds[-1]},
        "lost_steps": sum(row["restarts/lost_steps"] for row in told),
    }
    print(json.dumps(summary))
