"""SGLang itself behind `SGLangRollout`. `scripts/engines.sh sglang` makes the environment."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch
from agreement import GREEDY, OF_SGLANG, check_agreement, requests, write_model

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import ModelError, WorkerError
from quadriga.rollout import build_rollout
from quadriga.testing import ROLLOUT_LAWS, RolloutUnderTest, write_reference_model
from quadriga.weight_sync import WeightSync
from training_step import train_once

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; `scripts/engines.sh sglang` makes an environment",
    ),
    pytest.mark.timeout(900),
]

# Each of these draws thousands of tokens, which takes minutes on a CPU.
DRAWING = {"temperature", "top-k", "top-p", "min-p", "filter order", "log-probabilities"}


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
        pytest.param(law, marks=[slow] if str(law) in DRAWING else [], id=str(law)) for law in laws
    ]


@pytest.fixture(scope="module")
def over_pipe(reference):
    with RolloutUnderTest(sglang, reference) as subject:
        yield subject


@pytest.mark.parametrize("law", marked(ROLLOUT_LAWS))
def test_sglang_engine_satisfies_the_law(over_pipe, law):
    law.check(over_pipe)


@pytest.fixture(scope="module")
def over_http(reference):
    def build(folder):
        return sglang(folder, transport="server", seeds=True, log_probs="temperature_1")

    with RolloutUnderTest(build, reference) as subject:
        yield subject


@pytest.mark.parametrize("law", marked(ROLLOUT_LAWS))
def test_sglang_server_with_seeds_satisfies_the_law(over_http, law):
    law.check(over_http)


@pytest.mark.parametrize("name", OF_SGLANG)
def test_greedy_responses_equal_those_of_hf_before_and_after_updates(tmp_path, name):
    folder = write_model(name, tmp_path / "model")
    hf = build_rollout("hf", ModelConfig(path=folder), dtype="float32")
    engine = sglang(folder)
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
    finally:
        engine.close()


def test_a_sliding_window_that_sglang_ignores_is_refused(tmp_path):
    folder = write_model("mistral, window of 8", tmp_path / "model")
    with pytest.raises(ModelError, match="window of 8 tokens"):
        sglang(folder)


class Between:
    """The engine, and a fault between the trainer and it."""

    def __init__(self, engine, fault):
        self._engine, self._fault = engine, fault

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def update_weights(self, stream, version):
        self._engine.update_weights(self._fault(stream), version)


SQUARE = "model.layers.1.self_attn.q_proj.weight"


def left_out(stream):
    return ((name, w) for name, w in stream if name != SQUARE)


def transposed(stream):
    return ((name, w.t().contiguous() if name == SQUARE else w) for name, w in stream)


def exchanged(stream):
    held = list(stream)
    weights = dict(held)
    other = SQUARE.replace("layers.1", "layers.0")
    swap = {SQUARE: weights[other], other: weights[SQUARE]}
    return [(name, swap.get(name, w)) for name, w in held]


def test_a_sync_shows_every_fault_between_trainer_and_sglang(reference):
    from quadriga.engines.fsdp import FSDPEngine

    engine = sglang(reference)
    try:
        trainer = FSDPEngine(ModelConfig(path=reference), EngineConfig())
        WeightSync(trainer, engine).run(1)
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        for version, fault in enumerate((left_out, transposed, exchanged), start=2):
            with pytest.raises(WorkerError, match=SQUARE.replace(".", r"\.")):
                WeightSync(trainer, Between(engine, fault)).run(version)
        WeightSync(trainer, engine).run(9)
        assert engine.version == 9
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen2, tied", "llama, grouped queries"])
def test_a_model_is_trained_on_a_server_whose_weights_cannot_be_read_back(tmp_path, name):
    """The first sync proves that each weight has an effect. SGLang skips a tied output layer."""
    folder = write_model(name, tmp_path / "model")
    config = ModelConfig(path=folder)
    server = sglang(folder, transport="server")
    transport = server._client._instance.transport
    url = "http://{}:{}".format(*transport._address)
    key = transport._headers["Authorization"].removeprefix("Bearer ")
    trainer = build_engine(config, EngineConfig(), OptimConfig(lr=0.01))
    ours, hf = sglang(folder, url=url, api_key=key), build_rollout("hf", config, dtype="float32")
    try:
        assert not ours.abilities.exposes_weights
        syncs = [WeightSync(trainer, target) for target in (ours, hf)]
        ids, mask, seeds = requests()
        ends = replace(GREEDY, eos_token_ids=tuple(ours._own_ends))
        for version in (1, 2):
            for sync in syncs:
                sync.run(version)
            found, expected = (each.generate(ids, mask, ends, seeds) for each in (ours, hf))
            assert torch.equal(found.response_ids, expected.response_ids)
            assert found.weight_versions.tolist() == [version] * len(ids)
            train_once(trainer, tokens=20)
    finally:
        ours.close()
        server.close()
        hf.close()


@pytest.mark.parametrize("transport", ["engine", "server"])
def test_a_killed_scheduler_is_replaced_with_the_right_weights(reference, transport):
    engine = sglang(reference, transport=transport, restarts=1)
    try:
        ids, mask, seeds = requests()
        sampling = replace(GREEDY, max_new_tokens=50)
        names = engine.weight_dtypes()
        hf = build_rollout("hf", ModelConfig(path=reference), dtype="float32")
        random = torch.Generator().manual_seed(1)
        new = {
            n: w + 0.1 * torch.rand(w.shape, generator=random) for n, w in state(hf) if n in names
        }
        for target in (hf, engine):
            target.update_weights(new.items(), 5)
        guard = psutil.Process(engine._client._transport.host.pid)
        host = guard.children()[0]
        for process in host.children():  # the scheduler, and what serves it
            process.kill()
        found = engine.generate(ids, mask, sampling, seeds)
        assert engine.restarts == 1
        assert torch.equal(found.response_ids, hf.generate(ids, mask, sampling, seeds).response_ids)
        assert found.weight_versions.tolist() == [5] * 3
    finally:
        engine.close()
    assert not guard.is_running()


def listening(process):
    """Return (name of a process, address) of each socket that listens below a process."""
    return {
        (below.name(), connection.laddr.ip)
        for below in process.children(recursive=True)
        for connection in below.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("transport", ["engine", "server"])
def test_nothing_listens_outside_this_machine(reference, transport):
    engine = sglang(reference, transport=transport)
    try:
        engine.generate(*requests((5, 9))[:2], GREEDY, torch.arange(2))
        found = listening(psutil.Process(engine._client._transport.host.pid))
        assert {address for _, address in found} <= {"127.0.0.1", "::1"}, found
        assert found or transport == "engine"
    finally:
        engine.close()


def state(hf):
    return [(name, weight.clone()) for name, weight in hf.module.state_dict().items()]
