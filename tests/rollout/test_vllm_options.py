"""What can be checked of the vLLM engine where vLLM is not installed."""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch

from quadriga.config.schema import ModelConfig
from quadriga.errors import ConfigError, UnknownSettingError
from quadriga.rollout import build_rollout, check_rollout
from quadriga.rollout.vllm import options
from quadriga.rollout.vllm.isolation import Isolation
from quadriga.rollout.vllm.requests import spread_seed


def install(monkeypatch, version):
    monkeypatch.setattr(options, "installed_version", lambda: version)


def test_a_missing_installation_names_the_script_and_the_setting(monkeypatch):
    install(monkeypatch, None)
    for check in (
        lambda: check_rollout("vllm", {}),
        lambda: build_rollout("vllm", ModelConfig(path="/nowhere")),
    ):
        with pytest.raises(ConfigError, match=r"scripts/engines\.sh vllm") as raised:
            check()
        assert raised.value.key == "actor_rollout_ref.rollout.name"
        assert "\n" not in str(raised.value)


def test_another_version_is_refused_unless_it_is_accepted(monkeypatch, caplog):
    install(monkeypatch, "0.33.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.1 .*untested_version=true"):
        check_rollout("vllm", {})
    check_rollout("vllm", {"untested_version": True})
    assert "vLLM 0.33.1 is installed" in caplog.text
    caplog.clear()
    install(monkeypatch, f"{options.TESTED_VERSION}+cpu")
    check_rollout("vllm", {})
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"kv_cache_mb": 0}, "kv_cache_mb must be at least 1, got 0"),
        ({"kv_cache_mb": "much"}, "kv_cache_mb"),
        ({"gpu_memory_utilization": 1.5}, "at most 1, got 1.5"),
        ({"call_timeout_s": 0.0}, "call_timeout_s must be above 0"),
        ({"engine_args": {"dtype": "half"}}, "engine_args sets dtype"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_worker_starts(monkeypatch, given, words):
    install(monkeypatch, options.TESTED_VERSION)
    with pytest.raises((ConfigError, UnknownSettingError), match=words):
        check_rollout("vllm", given)


def test_options_reach_the_engine_as_they_are():
    parsed = options.parse_options({"kv_cache_mb": 64, "engine_args": {"block_size": 32}})
    assert (parsed.kv_cache_mb, parsed.engine_args) == (64, {"block_size": 32})
    assert parsed.max_model_len is None


def test_every_bit_of_a_seed_changes_the_32_bits_that_torch_uses():
    seeds = [0, 1, -1, 2**32, 2**62, -(2**63), 2**63 - 1, *(2**bit for bit in range(33, 62))]
    spread = [spread_seed(seed) for seed in seeds]
    assert len({number & 0xFFFFFFFF for number in spread}) == len(seeds)
    assert all(0 <= number < 2**63 for number in spread)
    assert spread_seed(7) == spread_seed(7)


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


def test_a_log_level_of_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    with Isolation().inside():
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def _set_threads():
    return torch.set_num_threads
