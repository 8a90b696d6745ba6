"""Scores of a reward model against a plain forward pass of transformers' sequence classifier."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from quadriga.config.schema import EngineConfig, ModelConfig, RewardModelConfig
from quadriga.data.chat import encode_conversations
from quadriga.data.loader import pad_rows, scored_rows
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import LengthError, ModelError
from quadriga.models.loading import check_reward_model, tokenizer_of
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.protocol import DataProto
from quadriga.workers.reward_model import RewardModelWorker, same_tokens

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "num_labels": 1, "initializer_range": 0.3,
}  # fmt: skip
LENGTHS = ((3, 4), (3, 1), (1, 0), (6, 2), (2, 7))
WORDS = ["one two three four five six seven eight nine ten eleven twelve"]


def conversations_of_ids(seed=0):
    random = np.random.default_rng(seed)
    pairs = [([int(t) for t in random.integers(1, 64, p)], r) for p, r in LENGTHS]
    found = [(prompt, [int(t) for t in random.integers(1, 64, r)]) for prompt, r in pairs]
    return [found[0], (found[0][0], found[1][1]), *found[2:]]


def plain_scores(model, rows):
    """One sequence at a time, without padding."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([[*p, *r]])).logits[0, 0] for p, r in rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(**SIZES)).save_pretrained(root / "llama")
    return root


def engine(folder, dtype="float64", **settings):
    config = EngineConfig(dtype=dtype, **settings)
    return FSDPEngine(ModelConfig(path=str(folder)), config, head="score")


@pytest.mark.parametrize("micro", [1, 2, None])
def test_scores_equal_a_plain_forward_pass(folders, micro):
    plain = AutoModelForSequenceClassification.from_pretrained(
        folders / "llama", dtype=torch.float64
    )
    rows = conversations_of_ids()
    outputs = engine(folders / "llama").forward(scored_rows(rows, 0), micro_batch_size=micro)
    scores = outputs["values"].sum(-1)  # float32
    assert torch.allclose(scores.double(), plain_scores(plain, rows), atol=1e-6)
    assert outputs["values"].shape == (5, 8)


def test_rows_are_read_at_the_last_token_that_is_no_padding():
    rows = scored_rows([([5, 6], [7, 8]), ([9], [4, 0, 0])], pad_token_id=0)
    assert rows["input_ids"].tolist() == [[5, 6, 7, 8, 0], [0, 9, 4, 0, 0]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert rows["response_mask"].tolist() == [[0, 0, 1], [0, 1, 0]]
    # A conversation of padding alone keeps one token.
    assert scored_rows([([0], [0])], 0)["response_mask"].tolist() == [[1]]
    with pytest.raises(LengthError, match=r"conversation 0 has 2 \+ 2 = 4 tokens .* compute 3; "):
        scored_rows([([5, 6], [7, 8])], 0, longest=4)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A policy, and reward models with its tokenizer and with another one."""
    root = tmp_path_factory.mktemp("chat")
    shape = TinyModel(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2)
    write_tiny_model(root / "policy", WORDS, shape)
    for name, words in (("same", WORDS), ("other", ["ten nine eight seven", *WORDS, "zero"])):
        write_tiny_model(root / name, words, shape)
        tokenizer = AutoTokenizer.from_pretrained(root / name)
        if name == "other":  # an ordinary word of the policy
            tokenizer.add_special_tokens({"additional_special_tokens": ["eight"]})
            tokenizer.save_pretrained(root / name)
        torch.manual_seed(1)
        sizes = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        LlamaForSequenceClassification(LlamaConfig(**sizes)).save_pretrained(root / name)
    return root


def batch_of(chat):
    """Two prompts of the policy with two responses each, padded."""
    tokenizer = tokenizer_of(ModelConfig(path=str(chat / "policy")))
    prompts = [[{"role": "user", "content": text}] for text in ("one two", "three four five")]
    texts = ["six", "seven eight nine", "ten", "eleven twelve"]
    chats = [prompts[0], prompts[0], prompts[1], prompts[1]]
    said = [{"role": "assistant", "content": text} for text in texts]
    rows = encode_conversations(tokenizer, [[*c, s] for c, s in zip(chats, said, strict=True)])
    width, length = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    pad = tokenizer.pad_token_id
    left = pad_rows([prompt for prompt, _ in rows], pad, width, "left")
    right = pad_rows([response for _, response in rows], pad, length, "right")
    ids, mask = (torch.cat(both, dim=1) for both in zip(left, right, strict=True))
    raw = np.empty(4, dtype=object)
    raw[:] = chats
    tensors = {"input_ids": ids, "attention_mask": mask, "responses": ids[:, width:]}
    return DataProto.from_dict(tensors=tensors, non_tensors={"raw_prompt": raw}), chats, texts


def test_tokens_of_the_policy_are_read_if_the_template_writes_the_same(chat):
    paths = [ModelConfig(path=str(chat / name)) for name in ("policy", "same", "other")]
    policy, same, other = map(tokenizer_of, paths)
    assert same_tokens(same, policy)
    assert not same_tokens(other, policy)
    longer = same.chat_template.replace("'<|end|>'", "'<|end|>' + ' one'")
    policy.chat_template = same.chat_template = longer
    assert not same_tokens(same, policy)


@pytest.mark.parametrize("name", ["same", "other"])
def test_a_conversation_is_encoded_by_the_tokenizer_of_the_reward_model(chat, name):
    from quadriga.backends import get_backend

    data, chats, texts = batch_of(chat)
    config = RewardModelConfig(model=ModelConfig(path=str(chat / name)))
    policy = ModelConfig(path=str(chat / "policy"))
    backend = get_backend("local")
    pool = backend.resource_pool([1], use_gpu=False)
    worker = backend.class_with_args(RewardModelWorker, config=config, policy=policy)
    group = backend.worker_group(pool, worker)
    try:
        group.init_model()
        found = group.compute_rm_score(data).batch["rm_scores"]
        data.batch["attention_mask"][0, -data.batch["responses"].shape[1] :] = 0
        assert group.compute_rm_score(data).batch["rm_scores"][0].tolist() == [0.0] * len(found[0])
    finally:
        group.shutdown()
    plain = AutoModelForSequenceClassification.from_pretrained(chat / name)
    tokenizer = AutoTokenizer.from_pretrained(chat / name)
    for row, (prompt, text) in enumerate(zip(chats, texts, strict=True)):
        spelled = text.replace("eight", "e ight") if name == "other" else text
        whole = [*prompt, {"role": "assistant", "content": spelled}]
        ids = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
        with torch.no_grad():
            expected = plain(torch.tensor([ids])).logits[0, 0]
        assert found[row].sum() == pytest.approx(float(expected), abs=1e-5)
        assert (found[row] != 0).sum() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: write_tiny_model(f, WORDS, TinyModel()), "has no head: a reward model is a"),
        (
            lambda f: LlamaForSequenceClassification(
                LlamaConfig(**{**SIZES, "num_labels": 3})
            ).save_pretrained(f),
            r"has 3 labels: score.weight is \[3, 32\], and the head",
        ),
        (
            lambda f: LlamaForTokenClassification(LlamaConfig(**SIZES)).save_pretrained(f),
            r"has score\.bias, so it is a value model",
        ),
    ],
)
def test_a_folder_without_a_head_for_one_score_is_refused(tmp_path, make, message):
    make(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        check_reward_model(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        engine(tmp_path / "model")
