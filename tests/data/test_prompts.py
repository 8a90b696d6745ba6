"""`PromptDataset`: template, padding, filtering, invalid rows."""

import pytest
import torch
from chat_families import write

from quadriga.data.encoded import PromptDataset
from quadriga.errors import DataError


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def file(tmp_path):
    rows = [
        {"prompt": user("Tom"), "data_source": "s", "reward_model": {"ground_truth": "1"}},
        {"prompt": user("Tom has 3 apples."), "extra_info": {"k": [1, 2]}},
        {"prompt": "He buys"},
    ]
    return write(tmp_path / "p.jsonl", rows)


def test_batches_are_left_padded_and_have_object_arrays(file, tokenizer):
    data = PromptDataset([file], tokenizer)
    batch = data.collate([data[0], data[1], data[2]])
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    assert tokenizer.decode(data[0]["input_ids"]) == "<|user|>Tom<|end|><|assistant|>"
    assert ids.shape == (3, data.longest) and ids.dtype == torch.int64
    assert ids[0].tolist() == [tokenizer.pad_token_id] * (data.longest - 4) + data[0]["input_ids"]
    assert mask.sum(-1).tolist() == [len(data[i]["input_ids"]) for i in range(3)]
    assert mask[:, -1].tolist() == [1, 1, 1]
    assert batch.batch["position_ids"][0, -4:].tolist() == [0, 1, 2, 3]
    assert batch.batch["position_ids"][0, :-4].sum() == 0
    arrays = batch.non_tensor_batch
    assert arrays["index"].tolist() == [0, 1, 2]
    assert arrays["raw_prompt"][2] == user("He buys")
    assert arrays["data_source"].tolist() == ["s", None, None]
    assert arrays["extra_info"][1] == {"k": [1, 2]}
    assert arrays["reward_model"][0] == {"ground_truth": "1"}


def test_overlong_prompts_are_filtered_or_an_error(file, tokenizer):
    short = PromptDataset([file], tokenizer, max_prompt_length=6)
    assert len(short) == 2 and short.filtered == 1
    assert [short[i]["index"] for i in range(2)] == [0, 2]
    with pytest.raises(DataError, match=r"p.jsonl, row 1: the prompt has \d+ tokens"):
        PromptDataset([file], tokenizer, max_prompt_length=6, filter_overlong_prompts=False)
    with pytest.raises(DataError, match=r"all 3 prompts of .* have more than 2 tokens"):
        PromptDataset([file], tokenizer, max_prompt_length=2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"row 1: no 'prompt'; found keys \['question'\]"),
        ({"prompt": None}, r"row 1: no value of 'prompt'"),
        ({"prompt": []}, r"row 1: 'prompt' must be a text or a list of messages, got an empty"),
        ({"prompt": 3}, r"row 1: .* got int"),
        ({"prompt": [{"role": "user"}]}, r"row 1: each message of 'prompt'"),
        ({"prompt": [{"role": "user", "content": 3}]}, r"row 1: each message"),
    ],
)
def test_invalid_rows_are_named(tmp_path, tokenizer, row, message):
    path = write(tmp_path / "p.jsonl", [{"prompt": user("x")}, row])
    with pytest.raises(DataError, match=message):
        PromptDataset([path], tokenizer)


def test_a_prompt_without_tokens_is_named(tmp_path, tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    path = write(tmp_path / "p.jsonl", [{"prompt": "He buys"}, {"prompt": ""}])
    with pytest.raises(DataError, match=r"row 1: the prompt has no tokens"):
        PromptDataset([path], tokenizer)
    monkeypatch.setattr("quadriga.data.encoded.LARGE_FILE", 0)
    with pytest.raises(DataError, match=r"row 1: the prompt has no tokens"):
        PromptDataset([path], tokenizer, cache_dir=tmp_path / "c")
