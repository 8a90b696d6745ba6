"""SGLang itself behind `SGLangRollout`. `scripts/engines.sh sglang` makes the environment."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import agreement
import psutil
import pytest
import torch
from agreement import GREEDY, OF_SGLANG, check_agreement, needs, requests, write_model

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import ModelError, RolloutDiedError, WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine
from quadriga.rollout.sglang.engine import read_sample
from quadriga.testing import write_reference_model
from quadriga.weight_sync.sync import WeightSync
from rollout_laws import ROLLOUT_LAWS, RolloutUnderTest
from training_step import train_once

pytestmark = [needs("sglang"), pytest.mark.timeout(900)]

# Each of these draws thousands of tokens, which takes minutes on a CPU.
DRAWING = {"temperature", "filters", "log_probabilities", "ends", "end_of_the_model"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More threads than cores make a small model slower."""
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        yield


def sglang(folder, **options):
    return build_rollout(
        "sglang", ModelConfig(path=str(folder)), dtype="float32", request_rows=32, **options
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(path)
    return path


def marked(laws):
    slow = pytest.mark.nightly
    return [
        pytest.param(law, marks=[slow] if law.__name__ in DRAWING else [], id=law.__name__)
        for law in laws
    ]


STARTS = [{}, pytest.param({"seeds": True}, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module", params=STARTS, ids=["plain", "seeds"])
def subject(reference, request):
    with RolloutUnderTest(lambda folder: sglang(folder, **request.param), reference) as subject:
        yield subject


@pytest.mark.parametrize("law", marked(ROLLOUT_LAWS))
def test_sglang_satisfies_the_law(subject, law):
    law(subject)


OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in OF_SGLANG[1:]]


@pytest.mark.parametrize("name", [OF_SGLANG[0], *OTHERS])
def test_greedy_responses_equal_those_of_hf_before_and_after_updates(tmp_path, name):
    folder = write_model(name, tmp_path / "model")
    hf = build_rollout("hf", ModelConfig(path=folder), dtype="float32")
    engine = sglang(folder, weight_handles=True)  # the tests of the laws send bytes
    try:
        check_agreement(engine, hf)
        for version in (1, 2):
            random = torch.Generator().manual_seed(version)
            weights = {
                n: w + 0.3 * w.std() * torch.randn(w.shape, generator=random) for n, w in state(hf)
            }
            if hf.module.config.tie_word_embeddings:
                weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
            for target in (hf, engine):
                target.update_weights(weights.items(), version)
            check_agreement(engine, hf)
        assert {*engine.moved} == {"handles"}
        cached, read = [], read_sample

        def recorded(entry, *args, **more):
            cached.append(entry["meta_info"]["cached_tokens"])
            return read(entry, *args, **more)

        with mock.patch("quadriga.rollout.sglang.engine.read_sample", recorded):
            agreement.check_prefix_cache(engine, weights, cached, page=1)
        agreement.check_refusal(engine)
    finally:
        engine.close()


@pytest.mark.nightly
def test_a_sliding_window_that_sglang_ignores_is_refused(tmp_path):
    folder = write_model("mistral, window of 8", tmp_path / "model")
    with pytest.raises(ModelError, match="window of 8 tokens"):
        sglang(folder)


class Between(RolloutEngine):
    """The engine, and a fault between the trainer and it."""

    name, generate, score = "between", None, None

    def __init__(self, engine, fault):
        self._engine, self._fault = engine, fault
        self.abilities, self.weights_digest = engine.abilities, engine.weights_digest
        self.weight_dtypes = engine.weight_dtypes

    @property
    def version(self):
        return self._engine.version

    def update_weights(self, stream, version):
        self._engine.update_weights(self._fault(stream), version)


SQUARE = "model.layers.1.self_attn.q_proj.weight"


def left_out(stream):
    return ((name, w) for name, w in stream if name != SQUARE)


def transposed(stream):
    return ((name, w.t().contiguous() if name == SQUARE else w) for name, w in stream)


def test_a_sync_shows_every_fault_between_trainer_and_sglang(reference):
    from quadriga.engines.fsdp import FSDPEngine

    engine = sglang(reference)
    try:
        trainer = FSDPEngine(ModelConfig(path=reference), EngineConfig())
        WeightSync(trainer, engine).run(1)
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        for version, fault in enumerate((left_out, transposed), start=2):
            with pytest.raises(WorkerError, match=SQUARE.replace(".", r"\.")):
                WeightSync(trainer, Between(engine, fault)).run(version)
        WeightSync(trainer, engine).run(9)
        assert engine.version == 9
    finally:
        engine.close()


@pytest.mark.nightly
def test_a_model_is_trained_on_a_server_whose_weights_cannot_be_read_back(tmp_path):
    """SGLang skips a tied output layer."""
    folder = write_model("qwen2, tied", tmp_path / "model")
    config = ModelConfig(path=folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        f"--model-path={folder}", f"--port={port}", "--host=127.0.0.1", "--api-key=right",
        "--skip-tokenizer-init", "--weight-version=-1", "--dtype=float32", "--device=cpu",
        "--attention-backend=torch_native", "--sampling-backend=pytorch", "--disable-cuda-graph",
        "--max-total-tokens=4096", "--skip-server-warmup", "--grammar-backend=none",
    ]  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    server = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.5)
    trainer = build_engine(config, EngineConfig(), OptimConfig(lr=0.01))
    ours = sglang(folder, url=f"http://127.0.0.1:{port}", api_key="right")
    hf = build_rollout("hf", config, dtype="float32")
    try:
        assert not ours.abilities.exposes_weights
        syncs = [WeightSync(trainer, target) for target in (ours, hf)]
        ids, mask, seeds = requests()
        for version in (1, 2):
            for sync in syncs:
                sync.run(version)
            found, expected = (each.generate(ids, mask, GREEDY, seeds) for each in (ours, hf))
            assert torch.equal(found.response_ids, expected.response_ids)
            assert found.weight_versions.tolist() == [version] * len(ids)
            train_once(trainer, tokens=20)
    finally:
        ours.close()
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_killed_scheduler_is_a_typed_error(reference):
    engine = sglang(reference)
    try:
        host = psutil.Process(engine._transport._process.pid)
        for process in host.children():  # the scheduler, and what serves it
            process.kill()
        with pytest.raises(RolloutDiedError, match="process ended before it answered"):
            engine.generate(*requests()[:2], replace(GREEDY, max_new_tokens=50), torch.arange(3))
    finally:
        engine.close()
    assert not host.is_running()


def listening(process):
    """Return (name of a process, address) of each socket that a process or one below it listens."""
    return {
        (below.name(), connection.laddr.ip)
        for below in [process, *process.children(recursive=True)]
        for connection in below.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.nightly
def test_nothing_listens_outside_this_machine(reference):
    engine = sglang(reference)
    try:
        engine.generate(*requests((5, 9))[:2], GREEDY, torch.arange(2))
        found = listening(psutil.Process(engine._transport._process.pid))
        assert {address for _, address in found} <= {"127.0.0.1", "::1"}, found
    finally:
        engine.close()


def state(hf):
    return [(name, weight.clone()) for name, weight in hf.module.state_dict().items()]
