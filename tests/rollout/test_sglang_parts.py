"""Parts of the engine `sglang` that need no other process: options, buckets, layouts, windows."""

import pickle
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Olmo3Config, Qwen2Config

from processes import run_python
from quadriga.config.schema import ModelConfig, RolloutEngineConfig, SamplingConfig
from quadriga.errors import ConfigError, ModelError, RolloutAbilityError
from quadriga.models.loading import load_causal_lm
from quadriga.rollout import rollout_of
from quadriga.rollout.sglang import client
from quadriga.rollout.sglang.client import Launch
from quadriga.rollout.sglang.engine import check_numbers, probe_length
from quadriga.rollout.sglang.weights import buckets, locate


def engine(options):
    return rollout_of(RolloutEngineConfig(name="sglang", options=options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"request_row": 2}, "did you mean request_rows"),
        ({"bucket_mb": 0}, "at least 1"),
        ({"api_key": "x"}, "set url too"),
        ({"url": "https://a"}, "of the form"),
        ({"url": "http://a:1", "server_args": {"tp_size": 1}}, "runs already"),
        ({"server_args": {"port": 1}}, "port is decided by Quadriga; remove it"),
        ({"server_args": {"enable_lora": True}}, "enable_lora is decided by Quadriga"),
        ({"python": "/no/such/python"}, "an interpreter"),
        ({"tensor_parallel": 2}, "each of the 2 ranks would start an SGLang on 2 devices"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_start(options, text):
    with pytest.raises(ConfigError, match=text):
        engine(options).check(2)


def test_another_version_of_sglang_is_refused_unless_it_is_accepted(tmp_path, caplog):
    python = tmp_path / "python"  # answers as an environment with this version
    python.write_text("#!/bin/sh\necho 0.5.18\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.18, .*untested_version=true"):
        engine({"python": str(python)}).check(1)
    engine({"python": str(python), "untested_version": True}).check(1)
    assert "has SGLang 0.5.18" in caplog.text


@pytest.mark.parametrize(
    ("index", "visible", "parts", "enough"),
    [
        (0, "0,1", 2, True), (0, "GPU-8f3a", 1, True), (0, "MIG-1b2c", 2, False),
        (1, "0,1", 2, False),
    ],
)  # fmt: skip
def test_sglang_starts_only_where_it_sees_its_devices(index, visible, parts, enough, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = engine({"tensor_parallel": parts}).options
    launch = Launch(ModelConfig("/x"), given, torch.device("cuda", index), torch.bfloat16, None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    monkeypatch.setattr(client, "local_folder", lambda _: pytest.fail("it starts"))
    with pytest.raises(BaseException, match="it starts" if enough else f"={visible}.; Ray shows"):
        launch.start()


@pytest.mark.parametrize(
    ("options", "sampling", "setting"),
    [({}, {"min_new_tokens": 2}, "min_new_tokens"), ({"seeds": True}, {"min_p": 0.1}, "min_p")],
)
def test_sampling_settings_are_checked_before_the_start(options, sampling, setting):
    with pytest.raises(RolloutAbilityError) as caught:
        engine(options).check_sampling(SamplingConfig(**sampling))
    assert caught.value.setting == setting
    engine({}).check_sampling(SamplingConfig(temperature=0.7, top_k=5, min_p=0.1))


def test_restarts_are_a_setting_of_every_engine():
    with pytest.raises(ConfigError, match=r"restarts .*; set actor_.*rollout\.replicas\.restarts"):
        engine({"restarts": 1})


def test_an_interpreter_without_sglang_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho sglang >&2\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="does not find sglang; run `make engines") as e:
        engine({"python": str(python)}).check(None)
    assert "\n" not in str(e.value)


def test_buckets_are_bounded_and_hold_each_weight_once():
    weights = {"a": torch.arange(10.0), "b": torch.arange(4.0), "c": torch.arange(20.0)}
    parts = list(buckets(weights.items(), 64))
    assert [tuple(part.digests) for part in parts] == [("a", "b"), ("c",)]
    found = [pickle.loads(part.pickles[0]) for part in parts]
    assert [[(e.name, e.start_idx, e.end_idx) for e in b["metadata"]] for b in found] == [
        [("a", 0, 40), ("b", 48, 64)],
        [("c", 0, 80)],
    ]
    for bucket in found:
        for entry in bucket["metadata"]:
            part = bucket["flattened_tensor"][entry.start_idx : entry.end_idx].view(entry.dtype)
            assert torch.equal(part.view(entry.shape), weights[entry.name])


def test_a_bucket_with_handles_has_no_bytes_and_is_mapped_by_each_process():
    (part,) = buckets([("a", torch.arange(40_000.0))], 1, handles=2)
    assert len(part.pickles) == 2 and max(map(len, part.pickles)) < 2000
    read = "import pickle, sys, torch.multiprocessing\nprint(float(pickle.loads(bytes.fromhex("
    read += "sys.argv[1]))['flattened_tensor'].view(torch.float32).double().sum()))"
    for payload in part.pickles:
        assert run_python("-c", read, payload.hex()).stdout == f"{sum(range(40_000))}.0\n"
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


def test_parts_of_fused_and_padded_parameters_are_located():
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.q_proj.weight": (4, 3),
        f"{layer}self_attn.k_proj.weight": (2, 3),
        f"{layer}self_attn.v_proj.weight": (2, 3),
        "model.embed_tokens.weight": (5, 3),
        "lm_head.weight": (5, 3),
        "model.norm.weight": (3,),
    }
    whole = torch.arange(24.0).view(8, 3)
    held = {
        f"{layer}self_attn.qkv_proj.weight": whole,
        "model.embed_tokens.weight": whole,
        "model.norm.weight": torch.ones(4),
    }
    assert torch.equal(locate(held, f"{layer}self_attn.k_proj.weight", shapes), whole[4:6])
    assert torch.equal(locate(held, f"{layer}self_attn.v_proj.weight", shapes), whole[6:])
    assert torch.equal(locate(held, "lm_head.weight", shapes), whole[:5])  # tied
    names = [f"model.experts.1.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    shapes |= dict(zip(names, [(2, 3), (2, 3), (3, 2)], strict=True))
    gates, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    held |= {"model.experts.w13_weight": gates, "model.experts.w2_weight": down}
    found = [locate(held, name, shapes) for name in names]
    expected = gates[1, :2], gates[1, 2:], down[1]
    assert all(map(torch.equal, found, expected))
    held["model.experts.w13_weight"] = gates[:, :2]  # one of two GPUs
    assert locate(held, names[0], shapes) is None
    assert locate(held, "model.norm.weight", shapes) is None
    assert locate(held, "model.other.weight", shapes) is None
    # Split over two GPUs, the parameter has half of the rows.
    held[f"{layer}self_attn.qkv_proj.weight"] = whole[:4]
    assert locate(held, f"{layer}self_attn.k_proj.weight", shapes) is None


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (LlamaConfig(), None),
        (Qwen2Config(use_sliding_window=False, sliding_window=8), None),
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0), 56),
        (MistralConfig(sliding_window=8), 56),
        (MistralConfig(sliding_window=None), 48),  # not tested
        (MistralConfig(sliding_window=4096), 48),  # not shorter than a sequence
        (Olmo3Config(sliding_window=4090), 4096),  # no longer than a sequence
    ],
)
def test_models_that_were_not_tested_are_compared_behind_their_window(config, tokens):
    assert probe_length(config, 4096) == tokens


def test_other_numbers_than_those_of_transformers_are_refused(model_folder):
    model = load_causal_lm(model_folder)
    config = model.config

    def score(ids, mask, wrong_from=None):
        log_probs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        scores = torch.nn.functional.pad(log_probs.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))
        if wrong_from is not None:
            scores[:, wrong_from:] -= 0.1
        return scores.detach()

    arguments = (ModelConfig(path=model_folder), config, torch.float32, 40)
    check_numbers(score, *arguments)
    with pytest.raises(ModelError, match=r"probe differs by 0\.1 nats"):
        check_numbers(partial(score, wrong_from=30), *arguments)


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("options", "ranks", "take_turns", "said"),
    [
        ({"url": URL}, 2, False, "is one server, but 2 ranks"),
        ({"url": URL}, 1, True, r"cannot be kept with .*url=http"),
        ({"tensor_parallel": 2}, 1, True, r"cannot be kept with .*tensor_parallel=2"),
    ],
)
def test_weights_that_cannot_be_updated_are_refused(options, ranks, take_turns, said):
    with pytest.raises(ConfigError, match=said):
        engine(options).check_updates(ranks, take_turns=take_turns)
    engine({}).check_updates(ranks, take_turns=take_turns)
    engine(options).check_updates(1, take_turns=False)
