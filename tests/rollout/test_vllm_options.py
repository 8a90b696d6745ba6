"""What can be checked of the vLLM engine where vLLM is not installed."""

import gc
import os
import random
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import HrmTextConfig, LlamaConfig

from quadriga.config.loading import load_config
from quadriga.config.schema import (
    ModelConfig,
    RolloutConfig,
    RolloutEngineConfig,
    SamplingConfig,
    TrainConfig,
)
from quadriga.errors import (
    ConfigError,
    ModelError,
    RolloutAbilityError,
    RolloutError,
    UnknownSettingError,
)
from quadriga.parallel.distributed import local_device
from quadriga.rollout import build_rollout, rollout_of
from quadriga.rollout.vllm import options, weights
from quadriga.rollout.vllm.engine import (
    Isolation,
    VLLMRollout,
    launcher_variables,
    seed_from,
    seed_of_call,
    spread_seed,
)
from quadriga.trainer.preflight import check_engines


def vllm(given=None):
    return rollout_of(RolloutEngineConfig(name="vllm", options=given or {}))


def install(monkeypatch, version):
    monkeypatch.setattr(options, "installed_version", lambda: version)


def test_a_missing_installation_names_the_script_and_the_setting(monkeypatch):
    install(monkeypatch, None)
    build = partial(build_rollout, "vllm", ModelConfig(path="/nowhere"))
    for check in (lambda: vllm().check(None), build):
        with pytest.raises(ConfigError, match=r"make engines ENGINES=vllm") as raised:
            check()
        assert raised.value.key == "actor_rollout_ref.rollout.name"
        assert "\n" not in str(raised.value)


def test_another_version_is_refused_unless_it_is_accepted(monkeypatch, caplog):
    install(monkeypatch, "0.33.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.1 .*untested_version=true"):
        vllm().check(None)
    vllm({"untested_version": True}).check(None)
    assert "vLLM 0.33.1 is installed" in caplog.text
    caplog.clear()
    install(monkeypatch, f"{options.TESTED_VERSION}+cpu")
    vllm().check(None)
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"kv_cache_mb": 0}, "kv_cache_mb must be at least 1, got 0"),
        ({"engine_args": {"dtype": "half"}}, "engine_args sets dtype"),
        ({"sleep_level": 3}, "sleep_level must be .*, got 3"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_worker_starts(monkeypatch, given, words):
    install(monkeypatch, options.TESTED_VERSION)
    with pytest.raises((ConfigError, UnknownSettingError), match=words):
        vllm(given).check(None)


def test_a_temperature_that_vllm_would_raise_is_refused_before_a_worker_starts():
    for temperature in (0.0, 0.01, 1.0):
        vllm().check_sampling(SamplingConfig(temperature=temperature))
    for temperature in (0.005, 2.5):
        with pytest.raises(RolloutAbilityError, match=f"temperature {temperature}") as raised:
            vllm().check_sampling(SamplingConfig(temperature=temperature))
        assert (raised.value.engine, raised.value.setting) == ("vllm", "temperature")


def test_an_engine_goes_on_after_a_request_that_vllm_refuses():
    rollout = VLLMRollout.__new__(VLLMRollout)
    rollout._engine, rollout._isolation, rollout._weights = Mock(), Isolation(), Mock(adapters={})
    rollout._engine.add_request.side_effect = ValueError("top_k must be 0")
    with pytest.raises(RolloutError, match=r"vLLM refuses row 0: top_k"), rollout._inside("x"):
        rollout._run([[1], [2]], [None, None], None)
    rollout._engine.abort_request.assert_called_once_with(["0", "1"])
    assert rollout._state == "ready"


def test_every_bit_of_a_seed_changes_the_32_bits_that_torch_uses():
    seeds = [0, 1, -1, 2**32, 2**62, -(2**63), 2**63 - 1, *(2**bit for bit in range(33, 62))]
    spread = [spread_seed(seed) for seed in seeds]
    assert len({number & 0xFFFFFFFF for number in spread}) == len(seeds)
    assert all(0 <= number < 2**63 for number in spread)
    assert spread_seed(7) == spread_seed(7) == seed_from(7, 0)
    drawn = {seed_from(seed, position) for seed in seeds for position in range(9)}
    assert len(drawn) == 9 * len(seeds)
    calls = [seeds, seeds[::-1], seeds[1:], [*seeds, 5], [2**40, *seeds[1:]]]
    assert len({seed_of_call(seeds) for seeds in calls}) == len(calls)


def test_what_the_engine_changes_is_seen_inside_only(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("REMOVED", "1")
    isolation = Isolation()
    environment, threads, set_threads = dict(os.environ), torch.get_num_threads(), _set_threads()
    states = (random.getstate(), torch.get_rng_state())
    with isolation.inside():
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        os.environ["ADDED"] = "2"
        del os.environ["REMOVED"]
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = replaced = lambda count: None
        torch.manual_seed(3)
        random.seed(3)
        gc.freeze()
    assert dict(os.environ) == environment
    assert (torch.get_num_threads(), _set_threads()) == (threads, set_threads)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert gc.get_freeze_count() == 0
    with isolation.inside():
        assert (os.environ["ADDED"], os.environ.get("REMOVED")) == ("2", None)
        assert _set_threads() is replaced
    assert dict(os.environ) == environment
    with pytest.raises(KeyError), isolation.inside():
        os.environ["ADDED"] = "3"
        raise KeyError
    assert dict(os.environ) == environment


def test_a_class_of_transformers_is_changed_inside_only():
    class Model(torch.nn.Module):
        forward = torch.nn.Module.forward

    class Compiled:
        pass

    isolation, own = Isolation([Model]), Model.__init__
    with isolation.inside():
        Model.__init__ = changed = lambda self: None
        Model.__call__ = changed
        Model.__bases__ = (torch.nn.Module, Compiled)
    assert (Model.__init__, Model.__call__) == (own, torch.nn.Module.__call__)
    assert Model.__bases__ == (torch.nn.Module,)
    with isolation.inside():
        assert (Model.__init__, Model.__call__) == (changed, changed)
        assert Compiled in Model.__bases__


def test_a_model_without_a_way_back_to_its_files_is_refused_before_the_start(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    HrmTextConfig(**sizes, vocab_size=9, architectures=["HrmTextForCausalLM"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"transformers computes '.*'.*ref\.rollout\.name=hf"):
        vllm().check_model(ModelConfig(path=str(tmp_path)), None)
    LlamaConfig(hidden_size=48, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"have 24 elements, and vLLM computes 32, 64, .*CPU"):
        vllm().check_model(ModelConfig(path=str(tmp_path)), "cpu")
    vllm().check_model(ModelConfig(path=str(tmp_path)), "cuda")
    replays = options.VLLM(RolloutConfig(name="vllm", replay_routes=True))
    with pytest.raises(ConfigError, match=r"enforce_eager.*must be true for .*replay_routes=true"):
        replays.check_model(ModelConfig(path=str(tmp_path)), "cuda")


def _set_threads():
    return torch.set_num_threads


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(0, 1, 0), (1, 1, 0), (3, 1, 0), (0, 4, 0), (3, 4, 3), (3, 2, 1)],
)
def test_vllm_computes_on_the_device_of_the_rank(local_rank, visible, index, monkeypatch):
    """Ray shows a process one device, also by a UUID or a part of a device (MIG); with a NOSET flag
    and outside Ray a process sees all."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))  # as the worker group numbers the ranks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    found = launcher_variables(local_device("cuda"))
    assert found == {"RANK": "0", "LOCAL_RANK": str(index)}
    assert int(found["LOCAL_RANK"]) < visible  # what vLLM asserts


def test_ranks_that_are_no_multiple_of_a_copy_are_refused_before_a_worker_starts(monkeypatch):
    install(monkeypatch, options.TESTED_VERSION)
    given = ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=3"]
    check_engines(load_config(TrainConfig, given))
    given.append("actor_rollout_ref.rollout.options.tensor_parallel_size=2")
    with pytest.raises(ConfigError, match="is 2, and the rollout has 3 ranks"):
        check_engines(load_config(TrainConfig, given))
    check_engines(load_config(TrainConfig, [*given, "placement={actor: [0], rollout: [1,2]}"]))


@pytest.mark.parametrize(
    ("shape", "local", "ranks", "expected"),
    [
        ((4, 6), (2, 6), 4, (0, 2)),  # two key-value heads on four ranks
        ((6, 8), (6, 2), 4, (1, 4)),
        ((8, 6), (3, 6), 4, None),
        ((6, 2), (2, 2), 2, None),  # 3 slices do not divide 2 ranks
    ],
)
def test_the_slices_of_a_weight_by_hand(shape, local, ranks, expected):
    place = weights._Place(torch.nn.Module(), "weight", 0, local[0])
    place.module.weight = torch.nn.Parameter(torch.zeros(local))
    assert weights._slices(place, torch.Size(shape), ranks) == expected
