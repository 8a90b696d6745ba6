"""`quadriga` with processes that are killed in phases: `restart_program.py PLAN train …`.

PLAN is a JSON object: `kills` has triples of a phase, how many of its beginnings after the kill
before are left alone, and a victim. `seed` decides on the moments within the phases. `folder` holds
how far the kills are, also for the next controller; each is written to `kills.jsonl`, and so is
each step after which the run goes on. `raylets.json` there names the raylets of a cluster.
"""

import contextlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

SPANS = {
    "rollout": "rollout", "evaluate": "passes", "advantages": "advantages",
    "update_critic": "updates", "update_actor": "updates", "sync_weights": "sync",
    "validate": "validation", "save": "save",
}  # fmt: skip
OTHERS = {"ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Processes of Ray itself. With an agent, the raylet of the node ends."""
PHASES = ("start", "restart", "load", "reward", "upload", *dict.fromkeys(SPANS.values()))
PARTS = {"rank": "ray::", "reward": "rewards.pool_worker", "raylet": "/raylet/raylet ",
         "gcs": "/gcs/gcs_server ", "keeper": "ray::KeptValues", "ranks": "ray::"}  # fmt: skip
"""Victim → what its command line has. `ranks`: all ranks and keepers at once."""


def below(process: psutil.Process, victim: str) -> list[psutil.Process]:
    """The processes below this one that are such a victim."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(each.cmdline())
            others = OTHERS | {PARTS["keeper"]} if victim == "rank" else OTHERS
            if PARTS[victim] in line and not any(other in line for other in others):
                found.append(each)
    return found


class Plan:
    def __init__(self, kills, seed, folder):
        self.kills, self.folder, self.lock = kills, Path(folder), threading.Lock()
        self.file, self.done, self.entered, self.starts = self.folder / "plan.json", 0, 0, 0
        if self.file.exists():
            self.done, self.entered, self.starts = json.loads(self.file.read_text())
        self.random, self.took = random.Random(seed + self.starts), dict[str, float]()
        self.starts += 1

    @contextlib.contextmanager
    def phase(self, name):
        with self.lock:
            ours = self.done < len(self.kills) and self.kills[self.done][0] == name
            due = ours and self.entered >= self.kills[self.done][1]
            self.entered += ours
            self.store()
        began, ended = time.monotonic(), threading.Event()
        delay = self.random.uniform(0.0, self.took.get(name, 0.2))
        thread = threading.Thread(target=self.strike, args=(self.done, delay, ended), daemon=True)
        if due:
            thread.start()
        try:
            yield
        finally:
            self.took[name] = time.monotonic() - began
            ended.set()
            if due:
                thread.join()

    def strike(self, number, delay, ended):
        """Kill after a delay, at the end of the phase at the latest. Without a process to kill, the
        kill stays due."""
        ended.wait(delay)
        phase, _, victim = self.kills[number]
        while not (chosen := self.victims(victim)) and not ended.wait(0.05):
            pass
        if not chosen:
            return
        with self.lock:
            self.done, self.entered = number + 1, 0
            self.store()
            self.write(phase=phase, victim=victim)
            for process in chosen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def victims(self, victim):
        this = psutil.Process()
        if victim == "node":
            pid = json.loads((self.folder / "raylets.json").read_text())[-1]
            raylets = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
            return [p for raylet in raylets for p in (raylet, *raylet.children(recursive=True))]
        found = [this] if victim == "controller" else below(this, victim)
        return found if victim == "ranks" else found and [self.random.choice(found)]

    def write(self, **row):
        with (self.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps({**row, "at": time.time()}) + "\n")

    def store(self):
        part = self.file.with_suffix(".partial")
        part.write_text(json.dumps([self.done, self.entered, self.starts]))
        part.replace(self.file)


def wrap(plan, owner, name, phase):
    original = getattr(owner, name)

    def within(owner, *args):
        with plan.phase(phase(owner)):
            return original(owner, *args)

    setattr(owner, name, within)


def install(plan):
    from quadriga.checkpoint.remote import Uploads
    from quadriga.observability.metrics import Timer
    from quadriga.trainer import ppo
    from quadriga.trainer.restarts import Restarts
    from quadriga.trainer.worker_groups import PPOGroups

    span, go_on = Timer.__call__, Restarts._go_on

    @contextlib.contextmanager
    def spans(self, name):
        phase = plan.phase(SPANS[name]) if name in SPANS else contextlib.nullcontext()
        with phase, span(self, name):
            yield

    def goes_on(self, record, step):
        plan.write(goes_on=step)
        go_on(self, record, step)

    Timer.__call__, Restarts._go_on = spans, goes_on
    trainer = ppo.RayPPOTrainer
    again = lambda it: it.restarts.count or plan.starts > 1  # noqa: E731
    wrap(plan, trainer, "init_workers", lambda it: "restart" if again(it) else "start")
    wrap(plan, PPOGroups, "load", lambda _: "load")
    wrap(plan, trainer, "score", lambda _: "reward")
    wrap(plan, Uploads, "_upload", lambda _: "upload")


class Forked:
    """In place of a new Python, which takes longer to import its modules than to go on."""

    def __init__(self, words, start_new_session, preexec_fn):
        if not (pid := os.fork()):
            os.setsid()
            preexec_fn()
            install(Plan(**json.loads(sys.argv[1])))
            code = main.main(words)
            sys.stdout.flush()
            os._exit(code)
        self.pid = pid


if __name__ == "__main__":
    from quadriga.cli import main, supervise

    if "--supervise" in sys.argv:
        from transformers import LlamaForCausalLM  # noqa: F401

        import quadriga.engines.fsdp
        import quadriga.rollout.hf.engine
        import quadriga.trainer.ppo  # noqa: F401  # a controller that is forked has the modules

        supervise.command = lambda words: words
        supervise.subprocess = SimpleNamespace(Popen=Forked)
    else:
        install(Plan(**json.loads(sys.argv[1])))
    sys.exit(main.main(sys.argv[2:]))
