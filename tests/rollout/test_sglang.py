"""`SGLangRollout` over a program that answers as SGLang does, with faults that it injects.

tests/real_engines runs the same engine over SGLang itself.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
from fake_sglang import Fake, http_server

from processes import children, gone
from quadriga.config.schema import ModelConfig
from quadriga.data.loader import pad_rows
from quadriga.errors import (
    ModelError,
    RolloutAbilityError,
    RolloutDiedError,
    RolloutError,
    RolloutInputError,
    RolloutOutputError,
    RolloutTimeoutError,
)
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams, tensor_digest
from quadriga.rollout.sglang.client import remove_leftovers
from quadriga.rollout.sglang.options import TESTED_VERSION

SAMPLING = SamplingParams(max_new_tokens=3, eos_token_ids=(2,), pad_token_id=0)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """An interpreter that runs the fake program in place of the host of SGLang."""
    script = tmp_path_factory.mktemp("fake") / "python"
    fake = Path(__file__).with_name("fake_sglang.py")
    version = f'[ "$2" = -c ] && echo {TESTED_VERSION} && exit 0'
    program = f'#!/bin/sh\n{version}\nexec {sys.executable} {fake} "$@"\n'
    script.write_text(program, encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def engine(interpreter, model_folder):
    """One engine for all tests whose faults do not end it."""
    engine = built(interpreter, model_folder)
    yield engine
    engine.close()


@pytest.fixture
def faulty(engine):
    """Set the faults of the shared engine."""
    yield lambda faults: engine._call("/faults", faults)
    engine._call("/faults", {})


@pytest.fixture
def start(interpreter, model_folder):
    engines = []

    def start(*, faults=None, **options):
        engines.append(built(interpreter, model_folder, faults, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def built(interpreter, model_folder, faults=None, **options):
    given = {"python": interpreter, "server_args": {"faults": faults or {}}, **options}
    model = ModelConfig(path=model_folder)
    return build_rollout("sglang", model, request_rows=2, start_timeout_s=150, **given)


def batch(*rows):
    return pad_rows(rows, 0, max(map(len, rows)) + 1, "left")


ROWS = batch((5, 6), (7,), (8, 9, 10), (11, 2), (12,))


def generate(engine, sampling=SAMPLING, rows=ROWS):
    return engine.generate(*rows, sampling, torch.arange(len(rows[0])))


def noise(engine, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = engine._shapes
    return {name: torch.rand(shape, generator=random) for name, shape in shapes.items()}


def test_weights_go_by_handles_where_the_setting_asks_for_it(start):
    engine = start(weight_handles=True)
    engine.update_weights(noise(engine).items(), 4)
    assert {*engine.moved} == {"handles"}


def test_requests_weights_and_memory(start):
    before = children()
    engine = start()
    out = generate(engine)
    assert out.response_ids.tolist() == [[6] * 3, [7] * 3, [10] * 3, [2, 0, 0], [12] * 3]
    assert out.response_mask.tolist()[3] == [1, 0, 0]
    assert out.finish_reason == ("length", "length", "length", "stop", "length")
    assert out.weight_versions.tolist() == [-1] * 5
    new = noise(engine)
    engine.update_weights(new.items(), 4)
    assert engine.version == 4 and {*engine.moved} == {"pipe"}
    shift = float(new[NORM].mean())
    assert generate(engine).rollout_log_probs[0].tolist() == pytest.approx(
        [-1 + shift, -2 + shift, -3 + shift]
    )
    scores = engine.score(*ROWS)
    assert scores[2].tolist() == pytest.approx([0, 0, -0.5 + shift, -0.5 + shift])
    assert engine.weights_digest() == {name: tensor_digest(w) for name, w in new.items()}
    assert set(engine.weight_dtypes().values()) == {torch.float32}
    engine.release()
    with pytest.raises(RolloutError, match="call resume"):
        generate(engine)
    engine.resume()
    folder = engine._transport.folder
    engine.close()
    assert not folder.exists()
    assert gone(children() - before)


@pytest.mark.parametrize(
    ("faults", "fault"),
    [
        ({"version": "3"}, "weight version"),
        ({"missing row": True}, "rows"),
        ({"info": {"output_token_logprobs": [[-1.0, 5, None]]}}, "log-probabilities"),
        ({"info": {"finish_reason": {"type": "stop", "matched": 9}}}, "finish reason"),
    ],
)
def test_wrong_answers_are_refused(engine, faulty, faults, fault):
    faulty(faults)
    engine.update_weights([(NORM, torch.ones(32))], 4)
    with pytest.raises(RolloutOutputError) as caught:
        generate(engine)
    assert caught.value.fault == fault


def test_bad_input_never_reaches_sglang(engine):
    engine.update_weights([], 4)
    vocabulary = engine.abilities.vocabulary
    with pytest.raises(RolloutInputError, match="outside the vocabulary"):
        generate(engine, rows=batch((5, vocabulary)))
    with pytest.raises(RolloutInputError, match="outside the vocabulary"):
        engine.score(*batch((5, -1)))
    with pytest.raises(RolloutAbilityError, match="min_new_tokens"):
        generate(engine, replace(SAMPLING, min_new_tokens=2))
    with pytest.raises(RolloutAbilityError, match="'sampled' log-probabilities; request policy"):
        generate(engine, replace(SAMPLING, log_probs="sampled"))
    for name, weight in (("no.such", torch.ones(3)), (NORM, torch.ones(3))):
        with pytest.raises(ModelError, match=name):
            engine.update_weights([(name, weight)], 5)
    assert generate(engine).weight_versions.tolist() == [4] * 5
    engine.update_weights(noise(engine).items(), 5)


def test_a_failed_update_must_be_repeated(engine, faulty):
    faulty({"refuse weight": "lm_head.weight"})
    with pytest.raises(RolloutError, match="no space"):
        engine.update_weights(noise(engine).items(), 1)
    with pytest.raises(RolloutError, match="an update of its weights broke off"):
        generate(engine)
    faulty({})
    rest = [(name, w) for name, w in noise(engine).items() if name != "lm_head.weight"]
    engine.update_weights(rest, 2)
    with pytest.raises(RolloutError, match=r"'lm_head\.weight' was not sent since"):
        generate(engine)
    engine.update_weights([("lm_head.weight", noise(engine)["lm_head.weight"])], 2)
    assert generate(engine).weight_versions.tolist() == [2] * 5


def test_a_server_that_runs_already(model_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(Path(model_folder) / "model.safetensors")
    args = {"weight_version": "6", "model_path": str(folder)}
    fake = Fake(args)
    with http_server(fake, "right") as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        build = partial(
            build_rollout, "sglang", ModelConfig(path=model_folder), url=url, request_rows=2
        )
        with pytest.raises(RolloutError, match="right key"):
            build(api_key="wrong")
        engine = build(api_key="right")
        assert engine.version == 6 and not engine.abilities.exposes_weights
        assert generate(engine).weight_versions.tolist() == [6] * 5
        engine.update_weights([(NORM, torch.zeros(32))], 7)
        assert generate(engine).weight_versions.tolist() == [7] * 5
        assert engine.received_digests() == {NORM: tensor_digest(torch.zeros(32))}
        fake.version = "8"
        with pytest.raises(RolloutOutputError, match="does another program update"):
            generate(engine)
        engine.close()
        server.shutdown()
        thread.join()
    with pytest.raises(RolloutDiedError, match="cannot be reached"):
        build(api_key="right")


# An SGLang that ends or stops


def test_an_end_is_a_typed_error_with_the_log(start):
    before = children()
    engine = start(faults={"die at request": 2})
    with pytest.raises(RolloutDiedError, match="hit an exception: no memory") as caught:
        generate(engine)
    assert (caught.value.engine, caught.value.rank) == ("sglang", 0)
    assert gone(children() - before)
    with pytest.raises(RolloutError, match="it is failed; restart the worker"):
        generate(engine)


def test_close_ends_a_call_that_waits(start):
    engine = start(faults={"wait at request": 1})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, engine)
        while not engine._transport._answers.futures:
            time.sleep(0.01)
        engine.close()
        with pytest.raises(RolloutDiedError):
            waiting.result(60)


@pytest.mark.parametrize("closed", [True, False])
def test_what_killed_processes_leave_is_removed(start, tmp_path, closed):
    """By the rank, or by the next start if the rank was killed with them."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("this system has no /dev/shm")
    other, engine = start(), start(faults={"shared memory": str(tmp_path / "names")})
    left = [shm / name for name in (tmp_path / "names").read_text().split()]
    left.append(engine._transport.folder)
    remove_leftovers()
    assert [path.exists() for path in left] == [True] * 3
    os.killpg(engine._transport._process.pid, signal.SIGKILL)
    engine._transport._process.wait()
    engine.close() if closed else remove_leftovers()
    assert [path.exists() for path in left] == [False] * 3
    assert generate(other).response_mask.any()


def test_what_another_user_has_left_is_not_touched(tmp_path, monkeypatch):
    """Its name may be a pattern, which finds shared memory of runs of this user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    log = tmp_path / "quadriga-sglang-**" / "log"
    log.parent.mkdir()
    log.touch()
    remove_leftovers()
    assert log.exists()


def test_a_late_answer_is_a_typed_error(start):
    before = children()
    engine = start(faults={"stop at request": 1}, generate_timeout_s=1)
    with pytest.raises(RolloutTimeoutError, match="generate_timeout_s"):
        generate(engine)
    assert gone(children() - before)  # also a process that was stopped


def test_a_start_that_fails_names_the_log(start):
    before = children()
    log = "RuntimeError: CUDA out of memory; the last lines of its log: a warning"
    with pytest.raises(RolloutDiedError, match=log):
        start(faults={"start": True})
    assert gone(children() - before)


@pytest.mark.nightly
def test_a_killed_rank_leaves_no_process(interpreter, model_folder, tmp_path):
    arguments = {"model_path": str(tmp_path / "model"), "weight_version": "-1"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").symlink_to(Path(model_folder) / "model.safetensors")
    (tmp_path / "own").mkdir()
    program = (
        "import pathlib, time\n"
        "from quadriga.rollout.sglang.client import HostTransport\n"
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
