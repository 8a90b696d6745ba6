"""Model folders that would run code, load other files, or ask for memory without bounds.

A folder that is not refused in time exceeds the deadline of its test.
"""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.integrations import hub_kernels

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.models import (
    check_context_window,
    check_model_folder,
    load_causal_lm,
    load_tokenizer,
    load_value_model,
)
from quadriga.models.limits import LongestSequence

pytestmark = pytest.mark.timeout(60)

LOADERS = pytest.mark.parametrize("load", [load_causal_lm, load_value_model])


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(load, folder, match, **settings):
    """Check that `load` raises a `ModelError` of one line, and return its text."""
    with pytest.raises(ModelError, match=match) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class WritesFile:
    """Unpickling this writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def name_weights(folder, name):
    """Let the index of the folder name `name` for every tensor."""
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@LOADERS
def test_pickled_weights_named_in_the_index_are_refused(folder, load):
    torch.save(name_weights(folder, "pytorch_model.bin"), folder / "pytorch_model.bin")
    refused(load, folder, r"'pytorch_model.bin'; only safetensors files .* a pickle can run code")


def test_pickle_named_in_the_index_runs_no_code(folder, tmp_path):
    name_weights(folder, "evil.bin")
    (folder / "evil.bin").write_bytes(pickle.dumps(WritesFile(tmp_path / "ran")))
    refused(load_causal_lm, folder, r"'evil.bin'")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\b.safetensors",
     "x.safetensors.bin", ".safetensors", "", None, 7, ["x"]],
)  # fmt: skip
def test_index_names_files_of_the_folder_only(folder, name):
    tensors = name_weights(folder, name)
    other = folder.parent / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    refused(check_model_folder, folder, "only safetensors files in the folder itself are loaded")


@pytest.mark.parametrize(
    "file", ["adapter_config.json", "shard-00000-model-00001-of-00001.safetensors"]
)
def test_files_that_replace_the_weights_are_refused(folder, file):
    (folder / file).write_text('{"base_model_name_or_path": "someone/else"}')
    refused(load_causal_lm, folder, "would be loaded in place of model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'quantization_config' asks for"),
        ({"text_config": {"quantization_config": {}}}, "'quantization_config' asks for"),
        ({"transformers_weights": "adapter_model.bin"}, "'transformers_weights' names"),
        ({"fusion_config": {"patch_embeddings": True}}, "'fusion_config' replaces parts"),
        ({"distributed_config": {"tp_size": 2}}, "'distributed_config' changes how"),
    ],
)
@pytest.mark.parametrize("load", [load_causal_lm, load_value_model, check_model_folder])
def test_keys_of_config_that_reach_other_loaders_are_refused(folder, load, changes, message):
    change_config(folder, **changes)
    refused(load, folder, message)


def test_keys_without_a_value_are_not_refused(folder):
    change_config(folder, quantization_config=None, use_kernels=True, kernel_config={"RMSNorm": 1})
    assert not load_causal_lm(folder).use_kernels


@pytest.mark.parametrize("load", [load_tokenizer, load_causal_lm, load_value_model])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_the_folder_needs_trust_remote_code(folder, tmp_path, load, file):
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForTokenClassification")
    auto_map = dict.fromkeys(names, "code.Any") | {"AutoTokenizer": ["code.Any", "code.Any"]}
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))
    load(folder)
    assert not (tmp_path / "ran").exists()


def test_context_window_is_read_from_a_checked_folder_only(folder, tmp_path):
    def window(path):
        check_context_window(path, LongestSequence(8, "4 + 4 is 8 tokens", "lower both"))

    window(folder)
    change_config(folder, num_hidden_layers=10**9)
    refused(window, folder, "num_hidden_layers is 1000000000; at most 10000")


KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal",
        "experts_implementation", "_experts_implementation")  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    """Record the kernels that transformers would download, as if their library were installed."""
    asked: list[str] = []

    def download(name, **_):
        asked.append(name)
        raise ValueError("no network")

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", download, raising=False)
    return asked


@LOADERS
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["kernels-community/flash-attn2", "eager"])
@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_settings_choose_the_attention_and_config_json_does_not(
    folder, load, key, value, wanted, kernels
):
    change_config(folder, **{key: value})
    model = load(ModelConfig(path=str(folder), attn_implementation=wanted))
    assert model.config._attn_implementation == wanted
    assert kernels == []


@LOADERS
def test_kernel_of_the_hub_needs_trust_remote_code(folder, load, kernels):
    name = "kernels-community/flash-attn2"
    model = ModelConfig(path=str(folder), attn_implementation=name)
    refused(load, model, "is code of the hub; set trust_remote_code")
    assert kernels == []
    refused(load, replace(model, trust_remote_code=True), "no network")
    assert kernels == [name]


def test_library_may_not_load_kernels_by_itself(folder, kernels, monkeypatch):
    """Some models ask for kernels while they are built, and flash attention falls back to one."""
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    build = LlamaForCausalLM.__init__

    def build_with_kernel(self, config):
        assert hub_kernels.lazy_load_kernel("causal-conv1d", {}) is None
        with pytest.raises(ImportError, match="trust_remote_code is false"):
            hub_kernels.get_kernel("kernels-community/flash-attn2")
        build(self, config)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", build_with_kernel)
    load_causal_lm(folder)
    assert kernels == []
    assert hub_kernels._kernels_enabled


@LOADERS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_that_are_not_finite_are_named(folder, load, dtype):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:3] = torch.tensor([float("nan"), float("nan"), -float("inf")])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = refused(load, folder, "are not finite", dtype=dtype)
    assert text.endswith("model.norm.weight has 2 NaN and 1 infinite values of 32")


SIZES = [
    ({"vocab_size": 10**12}, "vocab_size 1000000000000 × hidden_size 32 = 32000000000000"),
    ({"hidden_size": 10**9}, "vocab_size .* × hidden_size 1000000000"),
    ({"num_attention_heads": 10**9}, "num_attention_heads 1000000000"),
    ({"num_experts": 10**12}, "num_experts 1000000000000 = "),
    ({"hidden_size": 10**400}, r"hidden_size about 10\^400"),
    ({"num_hidden_layers": 5000}, "describes 5000 layers .* hold 21 tensors"),
    ({"num_labels": 10**12}, "num_labels is 1000000000000; at most 1000000"),
    ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
    ({"hidden_size": 1e30}, "hidden_size must be an integer of at least 1, got 1e[+]30"),
    ({"hidden_size": "32"}, "hidden_size must be an integer of at least 1, got '32'"),
    ({"text_config": {"vocab_size": 10**12, "hidden_size": 99}}, "vocab_size 1000000000000 × "),
    ({"rope_parameters": 5}, "cannot be loaded"),
    ({"tie_word_embeddings": "x"}, "cannot be loaded: .* expected bool, got str"),
]


@LOADERS
@pytest.mark.parametrize(("changes", "message"), SIZES, ids=[str(c)[:40] for c, _ in SIZES])
def test_absurd_sizes_are_refused_by_arithmetic(folder, load, changes, message):
    change_config(folder, **changes)
    refused(load, folder, message)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"num_labels": 10**12}])
def test_tokenizer_of_an_absurd_model_is_refused_too(folder, changes):
    change_config(folder, **changes)
    refused(load_tokenizer, folder, "at most")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 10**6, "is nested too deeply"),
        (b'{"model_type": ' + b"9" * 10**4 + b"}", "is not JSON"),
        ("{}".encode("utf-16"), "is not JSON"),
        (b" " * (64 * 2**20 + 1), "has 67108865 bytes; at most 67108864 are read"),
        (b"\xff\xfe\x00", "is not JSON"),
    ],
    ids=["depth", "digits", "encoding", "size", "bytes"],
)
def test_config_that_is_no_json_is_refused_in_one_line(folder, content, message):
    (folder / "config.json").write_bytes(content)
    refused(check_model_folder, folder, message)


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b"{",
     (16).to_bytes(8, "little") + b'{"a": {"b": [1]}', (10).to_bytes(8, "little") + b'{"a": null',
     (27).to_bytes(8, "little") + b'{"a": {"shape": [1e99999]}}'],
)  # fmt: skip
def test_weights_with_a_wrong_header_are_refused(folder, header):
    (folder / "model.safetensors").write_bytes(header)
    refused(check_model_folder, folder, "model.safetensors is not a safetensors file")


NORM = "model.norm.weight"


def overlapping(header):
    header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def with_a_gap(header):
    del header["model.layers.0.input_layernorm.weight"]


def with_a_fraction(header):
    header[NORM]["shape"] = [32.9]


def with_another_shape(header):
    header[NORM]["shape"] = [33]


def unchanged(header):
    pass


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        (overlapping, b"", "invalid offset"),
        (with_a_gap, b"", "invalid offset"),
        (with_another_shape, b"", "invalid shape"),
        (with_a_fraction, b"", "invalid JSON"),
        (unchanged, b"1234", "not fully covered"),
        (unchanged, None, "not fully covered"),
    ],
)
def test_weights_whose_bytes_are_not_as_the_header_says_are_refused(folder, change, more, message):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    data = content[8 + length : -4] if more is None else content[8 + length :] + more
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(SafetensorError):
        load_file(path)
    refused(check_model_folder, folder, f"is not a safetensors file: .*{message}")
