"""Sequences and token ids that a model cannot compute are refused before a worker starts."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, ModelError
from quadriga.trainer.ingredients import load_ingredients
from quadriga.trainer.preflight import check_fine_tuning_config, check_train_config

BUDGET = "max_tokens_per_micro_batch"
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def refused(refused_command):
    """refused("train", "a=b", …) returns the line that a command prints; no worker is built."""
    return refused_command


@pytest.fixture
def model(tiny_task, tmp_path) -> Path:
    """A copy of the tiny model, to be changed."""
    return shutil.copytree(tiny_task.model, tmp_path / "model")


@pytest.fixture(scope="module")
def longest(tiny_task) -> int:
    """Tokens of the longest prompt of the training data."""
    return _ingredients(tiny_task).train_loader.dataset.longest


def _ingredients(tiny_task, *more: str):
    return load_ingredients(
        load_config(
            TrainConfig,
            [f"actor_rollout_ref.model.path={tiny_task.model}", "data.train_batch_size=8",
             f"data.train_files={tiny_task.data('train')}", "data.max_response_length=12", *more],
        )
    )  # fmt: skip


def sft(tiny_task, tmp_path, *more: str) -> list[str]:
    return ["sft", f"model.path={tiny_task.model}", f"data.train_files={tiny_task.data('sft')}",
            "data.train_batch_size=8", "trainer.backend=local",
            f"trainer.default_local_dir={tmp_path / 'sft'}", *more]  # fmt: skip


def rm(tiny_task, tmp_path, *more: str, response: str = "1") -> list[str]:
    """The words of `quadriga rm` with pairs of this chosen response."""
    pair = {"prompt": [{"role": "user", "content": "1?"}], "chosen": response, "rejected": "2"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    return ["rm", f"model.path={tiny_task.model}", f"data.train_files=[{tmp_path}/pairs.jsonl]",
            "data.train_batch_size=4", "trainer.backend=local",
            f"trainer.default_local_dir={tmp_path / 'rm'}", *more]  # fmt: skip


def evaluation(tiny_task, tmp_path, *more: str) -> list[str]:
    return ["eval", f"model.path={tiny_task.model}", f"data_files={tiny_task.data('test')}",
            "trainer.backend=local", f"output={tmp_path / 'eval'}", *more]  # fmt: skip


def widen(model: Path) -> int:
    """Add a token to the tokenizer of a folder, and return its id: one beyond the embedding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<beyond>"], special_tokens=False)
    tokenizer.save_pretrained(model)
    rows = AutoConfig.from_pretrained(model).vocab_size
    beyond = tokenizer.convert_tokens_to_ids("<beyond>")
    # The tokenizer may be smaller than the embedding.
    config = json.loads((model / "config.json").read_text())
    assert beyond <= rows
    if beyond < rows:
        (model / "config.json").write_text(json.dumps({**config, "vocab_size": beyond}))
    return beyond


def test_a_folder_of_weights_needs_no_tokenizer_where_another_folder_has_it(
    tiny_task, model, train_overrides, tmp_path
) -> None:
    for file in model.glob("*token*"):
        file.unlink()
    named = [f"model.path={model}", f"model.tokenizer_path={tiny_task.model}"]
    policy = [f"actor_rollout_ref.{text}" for text in named]
    critic = ["algorithm.adv_estimator=gae", f"critic.model.path={model}"]  # reads no tokenizer
    check_train_config(load_config(TrainConfig, [*train_overrides, *policy, *critic]))
    check_fine_tuning_config(load_config(SFTConfig, [*sft(tiny_task, tmp_path)[2:], *named]))
    with pytest.raises(ModelError, match="has no tokenizer"):
        check_train_config(load_config(TrainConfig, [*train_overrides, policy[0]]))


# Lengths.


def test_the_longest_prompt_and_not_the_setting_counts_against_the_window(
    tiny_task, longest
) -> None:
    """The window has 512 tokens, as many as `data.max_prompt_length` by default."""
    assert longest < 200
    _ingredients(tiny_task, f"data.max_response_length={512 - longest}")
    with pytest.raises(ModelError, match=rf"{longest} \+ data.max_response_length=\d+ is 513 tok"):
        _ingredients(tiny_task, f"data.max_response_length={513 - longest}")


def test_a_response_beyond_the_window_is_refused_by_every_command(
    refused, train_overrides, tiny_task, tmp_path
) -> None:
    line = refused("train", *train_overrides, "data.max_response_length=510")
    assert "computes at most 512 (max_position_embeddings" in line
    assert "lower data.max_response_length" in line
    prompt = [f"model.path={tiny_task.model}", "prompt='1 and 2?'"]
    long = "max_response_length=512"
    for words in (["generate", *prompt, long], evaluation(tiny_task, tmp_path, long)):
        line = refused(*words)
        assert "+ max_response_length=512 is" in line and "computes at most 512" in line
    validated = [f"data.val_files={tiny_task.data('test')}", "trainer.max_response_length=510"]
    line = refused(*sft(tiny_task, tmp_path, *validated))
    assert "trainer.max_response_length=510" in line and "computes at most 512" in line
    line = refused(*rm(tiny_task, tmp_path, response="1" * 600))
    assert "the longest conversation has 6" in line and "computes at most 512" in line


@pytest.fixture
def vllm(monkeypatch) -> list[str]:
    """The rollout settings of vLLM, which counts as installed."""
    from quadriga.rollout.vllm import options

    monkeypatch.setattr(options, "installed_version", lambda: options.TESTED_VERSION)
    monkeypatch.setattr(options, "HEAD_SIZES_ON_CPU", (16,))
    return ["actor_rollout_ref.rollout.name=vllm"]


def test_the_window_of_the_rollout_engine_counts_in_every_command(
    refused, vllm, train_overrides, tiny_task, tmp_path, longest
) -> None:
    key = "rollout.options.max_model_len"
    least, prompt = longest + 12, "prompt='1 and 2?'"
    line = refused("train", *train_overrides, *vllm, f"actor_rollout_ref.{key}={least - 1}")
    assert f"is {least} tokens, but actor_rollout_ref.{key}={least - 1}" in line
    assert "lower data.max_response_length" in line and line.endswith("by 1")
    _ingredients(tiny_task, *vllm, f"actor_rollout_ref.{key}={least}")
    for words in (["generate", f"model.path={tiny_task.model}", prompt],
                  evaluation(tiny_task, tmp_path)):  # fmt: skip
        line = refused(*words, "rollout.name=vllm", f"{key}=20", "max_response_length=19")
        assert f"{key}=20" in line and "lower max_response_length" in line


@pytest.mark.parametrize(
    ("key", "more"),
    [
        (f"{ACTOR}.engine", []),
        ("actor_rollout_ref.ref.engine", [f"{ACTOR}.use_kl_loss=true"]),
        ("critic.engine", ["algorithm.adv_estimator=gae"]),
    ],
)
def test_a_token_budget_below_the_longest_sequence_is_refused(
    refused, train_overrides, tiny_task, longest, key, more
) -> None:
    line = refused("train", *train_overrides, *more, f"{key}.{BUDGET}={longest + 11}")
    assert f"{key}.{BUDGET}={longest + 11} is below the longest sequence" in line
    assert f"{longest} + data.max_response_length=12 is {longest + 12} tokens" in line
    assert f"set it to at least {longest + 12}" in line
    _ingredients(tiny_task, *more, f"{key}.{BUDGET}={longest + 12}")
    _ingredients(tiny_task, *more, f"{key}.{BUDGET}=1", f"{key}.use_dynamic_bsz=false")


def test_the_reference_of_adapters_has_the_budget_of_the_actor(tiny_task, longest) -> None:
    lora = ("actor_rollout_ref.model.lora.rank=2", f"{ACTOR}.use_kl_loss=true")
    unread = f"actor_rollout_ref.ref.engine.{BUDGET}=1"
    _ingredients(tiny_task, *lora, unread)
    with pytest.raises(ConfigError, match=rf"ref\.engine\.{BUDGET}=1 is below"):
        _ingredients(tiny_task, *lora[1:], unread)


def test_a_token_budget_below_the_longest_demonstration_is_refused(
    refused, tiny_task, tmp_path
) -> None:
    line = refused(*sft(tiny_task, tmp_path, f"engine.{BUDGET}=8"))
    assert f"engine.{BUDGET}=8 is below the longest sequence: the longest conversation" in line
    assert "lower data.max_length" in line


# Token ids.


def test_a_vocabulary_larger_than_the_embedding_is_refused_by_every_command(
    refused, train_overrides, tiny_task, model, tmp_path
) -> None:
    beyond = widen(model)
    said = f"'<beyond>' of the tokenizer has the id {beyond}, but the embedding of the model in"
    arithmetic = f"has {beyond} rows for the ids 0 to {beyond - 1}"
    for line in (
        refused("train", *train_overrides, f"actor_rollout_ref.model.path={model}"),
        refused(*sft(tiny_task, tmp_path, f"model.path={model}")),
        refused(*rm(tiny_task, tmp_path, f"model.path={model}")),
        refused("generate", f"model.path={model}", "prompt='1 and 2?'", "max_response_length=4"),
        refused(*evaluation(tiny_task, tmp_path, f"model.path={model}", "max_response_length=4")),
    ):
        assert said in line and arithmetic in line, line


def test_the_embedding_of_the_critic_is_checked(refused, train_overrides, tiny_task, model) -> None:
    """The tokenizer belongs to the actor's model; here the critic's embedding is too small."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    critic = ["algorithm.adv_estimator=gae", f"critic.model.path={model}"]
    assert "has 20 rows" in refused("train", *train_overrides, *critic)


def test_the_inputs_of_the_reward_model_are_checked(tiny_task, model, longest) -> None:
    enabled = ("reward_model.enable=true", f"reward_model.model.path={model}")
    _ingredients(tiny_task, *enabled)
    with pytest.raises(ConfigError, match=rf"is {longest + 12} tokens, and one is added; set it"):
        _ingredients(tiny_task, *enabled, f"reward_model.engine.{BUDGET}={longest + 12}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": longest + 12})
    )
    with pytest.raises(ModelError, match=rf"computes at most {longest + 12}"):
        _ingredients(tiny_task, *enabled)
    widen(model)
    with pytest.raises(ModelError, match="'<beyond>' of the tokenizer has the id"):
        _ingredients(tiny_task, *enabled)  # encoded again, so its window is not compared


def test_a_reward_model_writes_each_kind_of_prompt_before_the_start(tiny_task, model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'user' %}{{ raise_exception('no user, please') }}{% endif %}"
    )
    tokenizer.save_pretrained(model)
    enabled = ("reward_model.enable=true", f"reward_model.model.path={model}")
    with pytest.raises(ModelError, match="no user, please"):
        _ingredients(tiny_task, *enabled)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content * 9 }}{% endfor %}"
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    with pytest.raises(ModelError, match=r"a prompt with a response of one digit has \d+ tokens"):
        _ingredients(tiny_task, *enabled)


def test_without_a_padding_token_and_an_end_token_a_model_is_refused(
    refused, train_overrides, model
) -> None:
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"], settings["eos_token"]
    path.write_text(json.dumps(settings))
    line = refused("train", *train_overrides, f"actor_rollout_ref.model.path={model}")
    assert "has no end token" in line and str(model) in line
