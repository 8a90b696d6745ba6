"""Loading models and tokenizers: the tiny model, value heads, invalid folders."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from quadriga import models
from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.models.folder import end_token_ids

TEXTS = ["Tom has 3 apples. He buys 4 more.", "3+4=7\n#### 7", "Ann gives 12 pens to Zoe?"] * 4
SHAPE = models.TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    models.write_tiny_model(path, TEXTS, SHAPE, seed=3)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, [3, 4]),
        (None, {"eos_token_id": [5, 6]}, [5, 6]),
        ({}, {"eos_token_id": 5}, [5]),
        (None, {"text_config": {"eos_token_id": 5}}, [5]),
        (None, {}, []),
    ],
)
def test_end_tokens_are_those_of_the_generation_settings_else_of_the_config(
    copy, generation, config, ends
):
    tokenizer = models.load_tokenizer(copy)
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    (copy / "config.json").write_text(json.dumps(config))
    assert end_token_ids(copy, tokenizer) == tuple(sorted({tokenizer.eos_token_id, *ends}))


def test_equal_seeds_give_equal_weights_and_keep_the_random_state(folder, tmp_path):
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    count = models.write_tiny_model(tmp_path / "same", TEXTS, SHAPE, seed=3)
    assert torch.rand(3).equal(expected)
    models.write_tiny_model(tmp_path / "other", TEXTS, SHAPE, seed=4)
    weights = models.load_causal_lm(folder).state_dict()
    assert count == sum(tensor.numel() for tensor in weights.values())
    same = models.load_causal_lm(tmp_path / "same").state_dict()
    other = models.load_causal_lm(tmp_path / "other").state_dict()
    assert all(weights[name].equal(same[name]) for name in weights)
    assert not weights["lm_head.weight"].equal(other["lm_head.weight"])


def test_tokenizer_decodes_what_it_encodes_and_splits_digits(folder):
    tokenizer = models.load_tokenizer(folder)
    for text in (*TEXTS, "Ünknown wörds, 日本, tabs\tand  spaces\n\n", "1234567890"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("34+128=162\n#### 162")]
    assert pieces == [*"34+128=162\n", "####", *" 162"]
    assert tokenizer.padding_side == "left"


def test_tiny_model_sizes_are_checked():
    with pytest.raises(ModelError, match="multiple of num_heads"):
        models.TinyModel(hidden_size=100, num_heads=3)


def test_value_model_has_a_zero_head_on_the_policy_backbone(folder):
    values = models.load_value_model(folder)
    policy = models.load_causal_lm(folder)
    ids = torch.tensor([[3, 5, 7, 9]])
    with torch.no_grad():
        found = values(input_ids=ids).logits
        assert found.tolist() == [[[0.0]] * 4]
        assert not found._is_view()  # of which FSDP would warn
        values.score.weight.fill_(1.0)
        hidden = policy.model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(values(input_ids=ids).logits[..., 0], hidden.sum(-1))


@pytest.mark.parametrize("reward", [False, True])
def test_the_head_of_a_value_model_or_a_reward_model_is_loaded(folder, tmp_path, reward):
    model = models.load_value_model(folder)
    if reward:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    assert (model.score.bias is None) is reward
    with torch.no_grad():
        model.score.weight.normal_()
        if not reward:
            model.score.bias.fill_(0.5)
    model.save_pretrained(tmp_path)
    again = models.load_value_model(tmp_path)
    assert again.score.weight.equal(model.score.weight)
    assert again.score.bias.item() == (0 if reward else 0.5)
    assert again.model.embed_tokens.weight.equal(model.model.embed_tokens.weight)


@pytest.mark.parametrize("load", [models.load_causal_lm, models.load_value_model])
def test_dtype_and_attention_settings_are_used_and_nothing_is_printed(folder, load, capfd):
    model = load(ModelConfig(path=str(folder), attn_implementation="eager"), dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config._attn_implementation == "eager"
    assert capfd.readouterr() == ("", "")


def test_unknown_dtype_is_rejected(folder):
    with pytest.raises(ModelError, match="float8"):
        models.load_causal_lm(folder, dtype="float8")


def test_tokenizer_without_padding_token_or_end_token(copy):
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    tokenizer = models.load_tokenizer(copy)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None
    del settings["eos_token"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="has no end token"):
        models.load_tokenizer(copy)


def _config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = [
    (lambda f: shutil.rmtree(f), "does not exist"),
    (lambda f: (f / "config.json").unlink(), "is not a model folder: it has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object, got list"),
    (lambda f: (f / "config.json").write_text("{}"), "has no model_type"),
    (lambda f: _config(f, model_type="nonesuch"), "model_type 'nonesuch'"),
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "its pickled weights are not loaded",
    ),
    (
        lambda f: (
            (f / "model.safetensors").rename(f / "one.safetensors")
            and (f / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
            )
        ),
        "1 of 2 weight files are missing from model folder .*; the first is two.safetensors",
    ),
    (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_error_names_the_damaged_folder(copy, damage, message):
    models.check_model_folder(copy)
    damage(copy)
    with pytest.raises(ModelError, match=message) as caught:
        models.check_model_folder(copy)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_weights_raise_model_error(copy):
    _config(copy, num_hidden_layers=2)
    with pytest.raises(ModelError, match="lack 9 tensors"):
        models.load_causal_lm(copy)
    with pytest.raises(ModelError, match=r"lack 9 tensors of the backbone"):
        models.load_value_model(copy)


def test_file_or_empty_path_is_rejected(folder):
    with pytest.raises(ModelError, match="is a file, not a folder"):
        models.check_model_folder(folder / "config.json")
    with pytest.raises(ModelError, match="the path of the model folder is empty"):
        models.check_model_folder("")
