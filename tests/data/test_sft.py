"""`SFTDataset`: the layout of a rollout, with the loss on the answer and its end token."""

import pytest
from chat_families import write

from quadriga.data.conversations import SFTDataset
from quadriga.data.loader import SFTLoader
from quadriga.errors import DataError


def row(question, answer):
    return {"prompt": [{"role": "user", "content": question}], "extra_info": {"answer": answer}}


@pytest.fixture
def data(tmp_path, tokenizer):
    rows = [row("Tom has 3 apples.", "#### 3"), row("He", "3+4=7\n#### 7")]
    return SFTDataset([write(tmp_path / "s.jsonl", rows)], tokenizer)


def test_layout_and_masks_of_a_batch(data, tokenizer):
    [batch] = SFTLoader(data, 2, shuffle=False)
    fields = batch.batch
    prompt, answer = fields["prompts"].shape[1], fields["responses"].shape[1]
    assert fields["input_ids"].shape == (2, prompt + answer)
    assert fields["input_ids"][:, :prompt].equal(fields["prompts"])
    assert fields["input_ids"][:, prompt:].equal(fields["responses"])
    assert fields["attention_mask"][:, prompt:].equal(fields["response_mask"])
    for i, text in enumerate(["#### 3<|end|>", "3+4=7\n#### 7<|end|>"]):
        kept = fields["responses"][i][fields["response_mask"][i].bool()]
        assert tokenizer.decode(kept) == text
        real = fields["attention_mask"][i].bool()
        positions = fields["position_ids"][i][real]
        assert positions.tolist() == list(range(int(real.sum())))
    whole = tokenizer.decode(fields["input_ids"][1][fields["attention_mask"][1].bool()])
    assert whole == "<|user|>He<|end|><|assistant|>3+4=7\n#### 7<|end|>"


def test_rows_without_an_answer_are_named(tmp_path, tokenizer):
    rows = [row("a", "b"), {"prompt": "a", "extra_info": {"index": 1}}]
    path = write(tmp_path / "s.jsonl", rows)
    with pytest.raises(DataError, match=r"row 1: no 'answer' in 'extra_info'"):
        SFTDataset([path], tokenizer)
    with pytest.raises(DataError, match=r"row 0: 'extra_info' must be text, got dict"):
        SFTDataset([path], tokenizer, response_key="extra_info")
