"""SGLang itself behind `SGLangRollout`. `scripts/engines.sh sglang` makes the environment."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.errors import ModelError, WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.testing import ROLLOUT_LAWS, RolloutUnderTest, write_reference_model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="SGLang is not installed here; `scripts/engines.sh sglang` makes an environment",
    ),
    pytest.mark.timeout(900),
]

GREEDY = SamplingParams(
    max_new_tokens=24, eos_token_ids=(2,), pad_token_id=0, temperature=0.0, log_probs="policy"
)
# Each of these draws thousands of tokens, which takes minutes on a CPU.
DRAWING = {"temperature", "top-k", "top-p", "min-p", "filter order", "log-probabilities"}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "llama, grouped queries": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
}


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


def batch():
    random = torch.Generator().manual_seed(3)
    ids, mask = torch.zeros(6, 20, dtype=torch.int64), torch.zeros(6, 20, dtype=torch.int64)
    for row, length in enumerate((1, 3, 20, 12, 7, 16)):
        ids[row, 20 - length :] = torch.randint(3, 200, (length,), generator=random)
        mask[row, 20 - length :] = 1
    return ids, mask, torch.arange(6)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_responses_equal_those_of_hf_before_and_after_updates(tmp_path, name):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "model")
    ids, mask, seeds = batch()
    hf = build_rollout("hf", ModelConfig(path=str(tmp_path / "model")), dtype="float32")
    engine = sglang(tmp_path / "model")
    try:
        for version in (-1, 1, 2):
            if version > 0:
                random = torch.Generator().manual_seed(version)
                weights = {
                    n: w + 0.3 * w.std() * torch.randn(w.shape, generator=random)
                    for n, w in model.named_parameters()
                }
                with torch.no_grad():
                    for n, parameter in model.named_parameters():
                        parameter.copy_(weights[n])
                for target in (hf, engine):
                    target.update_weights(model.state_dict().items(), version)
                assert engine.weights_digest() == hf.weights_digest()
            expected = hf.generate(ids, mask, GREEDY, seeds)
            found = engine.generate(ids, mask, GREEDY, seeds)
            assert torch.equal(found.response_ids, expected.response_ids)
            assert found.finish_reason == expected.finish_reason
            difference = found.rollout_log_probs - expected.rollout_log_probs
            assert float(difference.abs().max()) < 1e-4
            whole = torch.cat([ids, expected.response_ids], 1)
            seen = torch.cat([mask, expected.response_mask], 1)
            scores = engine.score(whole, seen) - hf.score(whole, seen)
            assert float(scores.abs().max()) < 1e-4
    finally:
        engine.close()


def test_a_sliding_window_that_sglang_ignores_is_refused(tmp_path):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, head_dim=16, sliding_window=8)
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="window of 8 tokens"):
        sglang(tmp_path / "model")


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
    from quadriga.weight_sync import WeightSync

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


@pytest.mark.parametrize("transport", ["engine", "server"])
def test_a_killed_scheduler_is_replaced_with_the_right_weights(reference, transport):
    engine = sglang(reference, transport=transport, restarts=1)
    try:
        ids, mask, seeds = batch()
        sampling = replace(GREEDY, max_new_tokens=60)
        names = engine.weight_dtypes()
        hf = build_rollout("hf", ModelConfig(path=reference), dtype="float32")
        random = torch.Generator().manual_seed(1)
        new = {
            n: w + 0.1 * torch.rand(w.shape, generator=random) for n, w in state(hf) if n in names
        }
        for target in (hf, engine):
            target.update_weights(new.items(), 5)
        guard = psutil.Process(engine._client._instance.host.pid)
        host = guard.children()[0]
        for process in host.children():  # the scheduler, and what serves it
            process.kill()
        found = engine.generate(ids, mask, sampling, seeds)
        assert engine.restarts == 1
        assert torch.equal(found.response_ids, hf.generate(ids, mask, sampling, seeds).response_ids)
        assert found.weight_versions.tolist() == [5] * 6
    finally:
        engine.close()
    assert not guard.is_running()


def state(hf):
    return [(name, weight.clone()) for name, weight in hf.module.state_dict().items()]
