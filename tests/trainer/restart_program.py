"""`quadriga train` with ranks that are killed in phases: `restart_program.py PLAN KEY=VALUE…`.

PLAN is a JSON object: `kills` has pairs of a phase and its number, counted from 1 over the whole
program, `seed` decides on the moments within the phases and on the ranks, and `log` is a file to
which each kill is written.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter

import psutil

SPANS = {
    "rollout": "rollout", "evaluate": "passes", "advantages": "advantages",
    "update_critic": "updates", "update_actor": "updates", "sync_weights": "sync",
    "validate": "validation", "save": "save",
}  # fmt: skip
OTHERS = {"ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Processes of Ray itself. With an agent, the raylet of the node ends."""
PHASES = ("start", "restart", "load", "reward", *dict.fromkeys(SPANS.values()))


def ranks() -> list[psutil.Process]:
    """The processes of ranks, also of those that are being started."""
    found = psutil.Process().children(recursive=True)
    named = [(p, " ".join(p.cmdline())) for p in found if p.is_running()]
    return [p for p, name in named if name.startswith("ray::") and not OTHERS & set(name.split())]


class Plan:
    def __init__(self, kills, seed, log):
        self.kills = {(phase, number) for phase, number in kills}
        self.random, self.log = random.Random(seed), log
        self.entered: Counter[str] = Counter()
        self.took: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name):
        self.entered[name] += 1
        timer = None
        if (name, self.entered[name]) in self.kills:
            delay = self.random.uniform(0.0, self.took.get(name, 0.3))
            timer = threading.Timer(delay, self.kill, (name, delay))
            timer.daemon = True
            timer.start()
        began = time.monotonic()
        try:
            yield
        finally:
            self.took[name] = time.monotonic() - began

    def kill(self, phase, delay):
        while not (found := ranks()):  # they are being started
            time.sleep(0.05)
        victim = self.random.choice(found)
        with contextlib.suppress(psutil.Error), open(self.log, "a") as file:
            name = " ".join(victim.cmdline())[:80].strip()
            row = {"phase": phase, "delay": round(delay, 3), "victim": name}
            victim.kill()
            file.write(json.dumps(row) + "\n")


def wrap(plan, owner, name, phase):
    original = getattr(owner, name)

    def within(owner, *args):
        with plan.phase(phase(owner)):
            return original(owner, *args)

    setattr(owner, name, within)


def install(plan):
    from quadriga.observability.metrics import Timer
    from quadriga.trainer import ppo
    from quadriga.trainer.worker_groups import PPOGroups

    span = Timer.__call__

    @contextlib.contextmanager
    def spans(self, name):
        phase = plan.phase(SPANS[name]) if name in SPANS else contextlib.nullcontext()
        with phase, span(self, name):
            yield

    Timer.__call__ = spans
    trainer = ppo.RayPPOTrainer
    wrap(plan, trainer, "init_workers", lambda it: "restart" if it.restarts.count else "start")
    wrap(plan, PPOGroups, "load", lambda _: "load")
    wrap(plan, trainer, "score_and_mask", lambda _: "reward")


if __name__ == "__main__":
    from quadriga.cli.main import main

    install(Plan(**json.loads(sys.argv[1])))
    sys.exit(main(["train", *sys.argv[2:]]))
