"""An SGLang that ends, stops or starts again, with the program that answers as SGLang does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from sglang_cases import SQUARE, generate, interpreter, lives, noise, start

from processes import children, gone
from quadriga.errors import (
    RolloutDiedError,
    RolloutError,
    RolloutTimeoutError,
)
from quadriga.rollout.base import tensor_digest
from quadriga.rollout.sglang.client import Client

__all__ = ["interpreter", "start"]


def test_a_pause_lasts_over_updates_and_restarts(start, monkeypatch):
    paths = []
    call = Client.call

    def recorded(self, path, *rest):
        paths.append(path)
        return call(self, path, *rest)

    monkeypatch.setattr(Client, "call", recorded)
    engine = start(restarts=1)
    engine.pause_generation("in_place")
    engine.update_weights(noise(engine).items(), 1)
    assert "/continue_generation" not in paths
    paths.clear()
    engine._client._transport.close()
    engine.update_weights(noise(engine).items(), 2)  # SGLang is started again
    assert engine.restarts == 1
    assert paths[-1] == "/pause_generation" and "/continue_generation" not in paths
    engine.continue_generation()
    paths.clear()
    engine.update_weights(noise(engine).items(), 3)
    assert paths[-1] == "/continue_generation"


def test_an_end_is_a_typed_error_with_the_log(start):
    before = children()
    engine = start(faults={"die at request": 2})
    with pytest.raises(RolloutDiedError, match="hit an exception: no memory") as caught:
        generate(engine)
    assert (caught.value.engine, caught.value.rank) == ("sglang", 0)
    assert gone(children() - before)
    with pytest.raises(RolloutError, match="failed before"):
        generate(engine)


@pytest.mark.parametrize("fault", ["die at request", "stop at request"])
def test_a_restart_has_the_weights_and_repeats_the_requests(start, tmp_path, fault):
    engine = start(faults={fault: 4}, restarts=1, generate_timeout_s=4, bucket_mb=1)
    new = noise(engine)
    engine.update_weights(new.items(), 7)
    first = generate(engine)  # three requests
    second = generate(engine)
    assert engine.restarts == 1
    assert len(lives(tmp_path)) == 2
    for name in ("response_ids", "rollout_log_probs", "weight_versions"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert second.weight_versions.tolist() == [7] * 5
    assert engine.weights_digest() == {name: tensor_digest(w) for name, w in new.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["leave out", "transpose"])
def test_a_restart_with_wrong_weights_generates_nothing(start, fault):
    faults = {"die at request": 1}
    engine = start(faults=faults, restarts=1)
    engine.update_weights(noise(engine).items(), 7)
    faults |= {fault: SQUARE, "die at request": 0, "lives": 9}  # of the next start
    for _ in range(2):
        with pytest.raises(RolloutError, match=f"1 of 21 weights differ .* '{SQUARE}' first"):
            generate(engine)
    assert engine.restarts == 1


def test_restarts_have_an_end(start, tmp_path):
    engine = start(faults={"die at request": 1, "lives": 9}, restarts=2)
    with pytest.raises(RolloutDiedError):
        generate(engine)
    assert len(lives(tmp_path)) == 3


def test_close_ends_a_call_that_waits(start):
    engine = start(faults={"wait at request": 1}, restarts=3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, engine)
        while not engine._lock.locked():
            time.sleep(0.01)
        engine.close()
        with pytest.raises(RolloutDiedError):
            waiting.result(60)
    assert engine.restarts == 0


def test_shared_memory_of_killed_processes_is_removed(start, tmp_path):
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("this system has no /dev/shm")
    engine = start(faults={"shared memory": True})
    name = folder / f"sglang_loads_{engine._client._transport.pid}"
    semaphore = Path((tmp_path / "semaphore").read_text())
    assert name.exists() and semaphore.exists()
    engine.close()
    assert not name.exists() and not semaphore.exists()


def test_a_late_answer_is_a_typed_error(start):
    before = children()
    engine = start(faults={"stop at request": 1}, generate_timeout_s=1)
    with pytest.raises(RolloutTimeoutError, match="generate_timeout_s"):
        generate(engine)
    assert gone(children() - before)  # also a process that was stopped


def test_a_start_that_fails_names_the_log(start):
    before = children()
    with pytest.raises(RolloutDiedError, match="CUDA out of memory"):
        start(faults={"start": True})
    assert gone(children() - before)


@pytest.mark.nightly
def test_a_killed_rank_leaves_no_process(interpreter, model_folder, tmp_path):
    arguments = {
        "lives": str(tmp_path / "lives"),
        "model_path": str(tmp_path / "model"),
        "weight_version": "-1",
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").symlink_to(Path(model_folder) / "model.safetensors")
    (tmp_path / "own").mkdir()
    program = (
        "import pathlib, time\n"
        "from quadriga.rollout.sglang.transports import HostTransport\n"
        f"folder = pathlib.Path({str(tmp_path / 'own')!r})\n"
        f"host = HostTransport({interpreter!r}, folder, {{}}, {{'args': {arguments!r}}})\n"
        "host.wait_until_ready(60)\n"
        "print(host.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        folder = Path(rank.stdout.readline().strip())
        below = [p.pid for p in psutil.Process(rank.pid).children(recursive=True)]
        assert len(below) >= 2  # host, scheduler
        os.kill(below[-1], signal.SIGSTOP)  # a scheduler that is stuck is ended, too
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    assert gone(below)
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
