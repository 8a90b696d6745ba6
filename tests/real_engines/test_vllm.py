"""vLLM itself behind `VLLMRollout`. `scripts/engines.sh vllm` makes the environment."""

import os
import random
import sys
from unittest import mock

import agreement
import pytest
import torch
from agreement import GREEDY, MODELS, check_agreement, needs, requests, write_model

from quadriga.config.schema import ModelConfig
from quadriga.errors import ConfigError, ModelError, RolloutAbilityError, RolloutError, WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams, tensor_digest
from quadriga.rollout.guard import compare_digests
from quadriga.testing import write_reference_model
from rollout_laws import ROLLOUT_LAWS, RolloutUnderTest

pytestmark = [needs("vllm"), pytest.mark.timeout(900)]

# Each of these draws thousands of tokens, which takes minutes on a busy CPU.
DRAWING = {"temperature", "filters", "ends"}
SLOW = [pytest.param(name, marks=pytest.mark.nightly) for name in list(MODELS)[1:]]


def vllm(folder, **options):
    options = {"kv_cache_mb": 64, **options}
    return build_rollout("vllm", ModelConfig(path=folder), dtype="float32", **options)


def noise(engine, seed):
    """Return new weights for every name, equal for the names of a tied weight."""
    drawn = {}
    for name, tensor in engine.module.state_dict().items():
        random_numbers = torch.Generator().manual_seed(seed + tensor.data_ptr() % 1000)
        drawn[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=random_numbers)
    return drawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(folder)
    return folder


class TestLaws:
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, folder):
        with RolloutUnderTest(vllm, folder) as subject:
            yield subject

    @pytest.mark.parametrize(
        "law",
        [
            pytest.param(law, marks=[pytest.mark.nightly] * (law.__name__ in DRAWING))
            for law in ROLLOUT_LAWS
        ],
    )
    def test_vllm_satisfies_the_law(self, subject, law):
        law(subject)


@pytest.fixture(
    scope="class", params=[next(iter(MODELS)), *SLOW]
)  # no engine is left when `TestProcess` starts
def engines(request, tmp_path_factory):
    """vLLM and hf on one model."""
    folder = write_model(request.param, tmp_path_factory.mktemp("model") / "model")
    ours = vllm(folder, engine_args={"block_size": 32})
    hf = build_rollout("hf", ModelConfig(path=folder), dtype="float32")
    yield ours, hf
    ours.close()
    hf.close()


class TestModels:
    def test_greedy_ids_and_log_probabilities_equal_those_of_hf_before_and_after_updates(
        self, engines
    ):
        ours, hf = engines
        check_agreement(ours, hf)
        before = ours.score(*requests()[:2])
        for version in (1, 2):
            weights = noise(hf, version)
            for engine in engines:
                engine.update_weights(weights.items(), version)
            check_agreement(ours, hf)
            assert ours.version == version
        assert (ours.score(*requests()[:2]) - before).abs().max() > 0.1

    def test_a_slice_finds_its_prefix_in_the_cache_until_an_update(self, engines):
        ours, hf = engines
        cached, step = [], ours._engine.step

        def recorded():
            outputs = step()
            cached.extend(output.num_cached_tokens for output in outputs if output.finished)
            return outputs

        with mock.patch.object(ours._engine, "step", recorded):
            agreement.check_prefix_cache(ours, noise(hf, 3), cached, page=32)

    def test_the_engine_goes_on_after_a_request_that_it_refuses(self, engines):
        agreement.check_refusal(engines[0])

    def test_every_fault_of_a_sync_is_named(self, engines):
        ours, hf = engines
        right = noise(hf, 5)
        old = {name: ours._weights.read(name).clone() for name in right}
        q, k, v = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
        up = "model.layers.0.mlp.up_proj.weight"
        digests = {name: tensor_digest(tensor) for name, tensor in right.items()}
        for named, sent in (
            (k, [(name, tensor) for name, tensor in right.items() if name != k]),
            (up, (right | {up: old[up]}).items()),  # stale
            (k, (right | {k: right[v], v: right[k]}).items()),
            (q, (right | {q: right[q].T.contiguous()}).items()),
            (up, [*right.items(), (up, old[up])]),
        ):
            ours.update_weights(sent, 7)
            with pytest.raises(WorkerError, match=named) as raised:
                compare_digests(digests, ours.weights_digest(), 7)
            assert raised.value.tensor == named
            ours.update_weights(old.items(), 8)
        ours.update_weights(right.items(), 9)
        compare_digests(digests, ours.weights_digest(), 9)


@pytest.mark.nightly
class TestProcess:
    """The engine in a process that goes on after it."""

    def test_nothing_of_the_engine_is_left_in_the_process(self, folder):
        torch.manual_seed(5)
        random.seed(5)
        expected = torch.rand(3), random.random()
        functions = (torch.set_num_threads, torch.accelerator.synchronize)
        environment, threads = dict(os.environ), torch.get_num_threads()
        torch.manual_seed(5)
        random.seed(5)
        group = torch.distributed.is_initialized()
        engine = vllm(folder)
        ids, mask, seeds = requests((5, 9))
        engine.generate(ids, mask, GREEDY, seeds)
        assert dict(os.environ) == environment
        assert torch.get_num_threads() == threads
        assert (torch.set_num_threads, torch.accelerator.synchronize) == functions
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]
        engine.close()
        assert torch.distributed.is_initialized() == group
        assert dict(os.environ) == environment

    def test_a_call_has_one_seed_where_rows_have_none(self, folder):
        engine = vllm(folder, seeds=False)
        ids, mask, seeds = requests((5, 5, 9))
        ids[1] = ids[0]
        sampling = SamplingParams(max_new_tokens=12, eos_token_ids=(), pad_token_id=0)
        drawn = [
            engine.generate(ids, mask, sampling, each).response_ids
            for each in (seeds, seeds, seeds + torch.tensor([0, 0, 1]))
        ]
        assert drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2])
        assert not drawn[0][0].equal(drawn[0][1])
        assert engine.abilities.seeded and not engine.abilities.batch_invariant
        engine.close()

    def test_an_engine_that_fails_in_the_middle_is_named_and_not_used_again(self, folder):
        engine = vllm(folder)
        ids, mask, seeds = requests((5, 9))
        runner = engine._engine.model_executor.driver_worker.model_runner
        with (
            mock.patch.object(runner, "execute_model", side_effect=RuntimeError("no memory")),
            pytest.raises(RolloutError, match=r"rank 0 cannot generate: .*no memory") as raised,
        ):
            engine.generate(ids, mask, GREEDY, seeds)
        assert (raised.value.engine, raised.value.rank) == ("vllm", 0)
        with pytest.raises(RolloutError, match="cannot generate: it is failed"):
            engine.generate(ids, mask, GREEDY, seeds)
        engine.close()

    def test_what_vllm_cannot_do_is_refused(self, folder):
        with pytest.raises(ConfigError, match=r"max_model_len=500 is above .* 128 tokens"):
            vllm(folder, max_model_len=500)
        with pytest.raises(ConfigError, match="size is 2, and the rollout has 1 rank, "):
            vllm(folder, tensor_parallel_size=2)
        with pytest.raises(RolloutError, match=r"did not start .*block_size"):
            vllm(folder, engine_args={"block_size": -3})
        engine = vllm(folder, max_model_len=64)
        ids, mask, seeds = requests((5,))
        refusal = mock.patch("vllm.sampling_params.SamplingParams", side_effect=ValueError("no"))
        with refusal, pytest.raises(RolloutError, match="vLLM refuses the settings: no"):
            engine.generate(ids, mask, GREEDY, seeds)
        cold = SamplingParams(max_new_tokens=2, eos_token_ids=(), pad_token_id=0, temperature=0.001)
        with pytest.raises(RolloutAbilityError, match=r"temperature 0\.001"):
            engine.generate(ids, mask, cold, seeds)
        assert engine.abilities.window == 64
        assert not engine.score(*requests((64,))[:2])[0, 1:].eq(0).any()
        engine.close()

    def test_weights_whose_place_is_not_known_are_refused_at_the_start(self, folder, monkeypatch):
        from vllm.model_executor.models.llama import LlamaForCausalLM as VLLMLlama

        wrong = {**VLLMLlama.packed_modules_mapping, "qkv_proj": ["q_proj", "v_proj", "k_proj"]}
        monkeypatch.setattr(VLLMLlama, "packed_modules_mapping", wrong)
        with pytest.raises(ModelError, match=r"k_proj.* differs from the file after loading"):
            vllm(folder)
        assert "vllm" in sys.modules
