"""Arguments of the chat template: they change its text, and belong to the cache of token ids."""

import json

import pytest

from quadriga.data.chat import check_template_arguments, encode_chats
from quadriga.data.conversations import PairDataset, SFTDataset
from quadriga.data.encoded import PromptDataset
from quadriga.errors import ConfigError
from quadriga.models.tiny import train_tokenizer

# As Qwen3: without thinking, the beginning of a response has an empty thought.
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
    "{{ m.content }}<|end|>{% if m.style is defined %}{{ m.style }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}none {% endif %}{% endif %}"
)
OFF = {"enable_thinking": False}


@pytest.fixture
def tokenizer():
    made = train_tokenizer(["How many? none Three. Four."] * 4)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def file(tmp_path):
    row = {"prompt": "How many?", "answer": "Three.", "chosen": "Three.", "rejected": "Four."}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def test_prompts_conversations_and_pairs_are_written_with_the_arguments(tokenizer, file):
    for arguments, thought in (({}, ""), (OFF, "none ")):
        prompt = f"<|user|>How many?<|end|><|assistant|>{thought}"
        [item] = PromptDataset([file], tokenizer, chat_template_kwargs=arguments)
        assert tokenizer.decode(item["input_ids"]) == prompt
        sft = SFTDataset(
            [file], tokenizer, response_key="answer", chat_template_kwargs=arguments
        )  # fmt: skip
        assert tokenizer.decode(sft[0]["prompt_ids"]) == prompt
        assert tokenizer.decode(sft[0]["response_ids"]) == "Three.<|end|>"
    # The thought is not in a whole conversation, so the border is unknown: all is the prompt.
    pair = PairDataset([file], tokenizer, pad_token_id=0, chat_template_kwargs=OFF)[0]
    assert pair["chosen"][1] == []
    assert PairDataset([file], tokenizer, pad_token_id=0)[0]["chosen"][1]


def test_an_argument_that_the_template_does_not_read_is_refused(tokenizer):
    chat = [[{"role": "user", "content": "How many?"}]]
    with pytest.raises(ConfigError, match=r"reads no enable_thinkin; did you mean enable_thinking"):
        encode_chats(tokenizer, chat, arguments={"enable_thinkin": False})
    for name in ("role", "style", "none_at_all"):  # two are attributes of messages
        with pytest.raises(ConfigError, match=rf"chat_template_kwargs\.{name} has no effect"):
            check_template_arguments(tokenizer, {name: 1})
    for name in ("tokenize", "add_generation_prompt", "chat_template", "messages"):
        with pytest.raises(ConfigError, match=rf"a.key\.{name} cannot be set"):
            check_template_arguments(tokenizer, {name: 1}, "a.key")
    check_template_arguments(tokenizer, OFF)
