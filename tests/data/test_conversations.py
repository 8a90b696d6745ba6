"""Conversations: which tokens the assistant wrote, for the chat formats of several families."""

import pytest
from chat_families import CASES, CHAT, CHATML, NO_END, THINKING, family, write

from quadriga.data.conversations import SFTDataset, encode_turns, turn_end_ids
from quadriga.data.loader import SFTLoader
from quadriga.errors import DataError, ModelError


def trained_texts(tokenizer, conversation):
    """The runs of trained tokens, decoded."""
    runs, before = [], 0
    for token, trained in zip(conversation.ids, conversation.trained, strict=True):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", CASES)
def test_the_turns_of_the_assistant_with_their_end_tokens_are_trained(name):
    template, special, expected = CASES[name]
    tokenizer = family(template, special)
    [found] = encode_turns(tokenizer, [CHAT])
    assert trained_texts(tokenizer, found) == expected
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(found.ids) == whole.rstrip("\n")
    [last] = encode_turns(tokenizer, [CHAT], last_only=True)
    assert last.ids == found.ids and trained_texts(tokenizer, last) == expected[-1:]
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert found.prompt_ids == prompt  # the one of generation
    [end] = turn_end_ids(tokenizer)
    assert tokenizer.decode([end]) == expected[0].removeprefix("Three.") != tokenizer.eos_token


def test_a_template_that_rewrites_earlier_turns_is_refused_or_trains_the_last():
    tokenizer = family(THINKING, CASES["ChatML"][1])
    chat = [*CHAT]
    chat[1] = {"role": "assistant", "content": "<think>One, two.</think>Three."}
    with pytest.raises(ModelError, match=r"turns of conversation 1 .* set data.loss_turns=last"):
        encode_turns(tokenizer, [CHAT[:2], chat])
    [found] = encode_turns(tokenizer, [chat], last_only=True)
    assert trained_texts(tokenizer, found) == ["Four.<|im_end|>"]
    assert "One, two" not in tokenizer.decode(found.ids)


THOUGHT = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


def test_a_template_that_opens_a_thought_trains_the_last_answer():
    tokenizer = family(THOUGHT, CASES["ChatML"][1])
    chat = [CHAT[0], {"role": "assistant", "content": "One.</think>Three."}]
    for last_only in (True, False):
        [found] = encode_turns(tokenizer, [chat], last_only=last_only)
        assert trained_texts(tokenizer, found) == ["One.</think>Three.<|im_end|>"]
        assert tokenizer.decode(found.prompt_ids).endswith("<|im_start|>assistant\n<think>\n")
    with pytest.raises(ModelError, match=r"set data.loss_turns=last"):
        encode_turns(tokenizer, [CHAT])


@pytest.mark.parametrize(
    ("written", "content", "trained"),
    [
        ("m.content | trim", "  Three. ", "Three."),
        ("m.content.split('</think>')[-1]", "One.</think>Three.", "Three."),
    ],
)
def test_an_answer_that_the_template_shortens_ends_with_its_token(written, content, trained):
    template = THOUGHT.replace("m.content", f"({written})")
    assert template != THOUGHT
    tokenizer = family(template, CASES["ChatML"][1])
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    [found] = encode_turns(tokenizer, [chat])
    assert trained_texts(tokenizer, found) == [f"{trained}<|im_end|>"]


def test_a_special_token_within_an_answer_does_not_end_it():
    tokenizer = family(NO_END, ["</think>"])
    chat = [CHAT[0], {"role": "assistant", "content": "One.</think>Three."}]
    [found] = encode_turns(tokenizer, [chat])
    assert trained_texts(tokenizer, found) == [f"One.</think>Three.\n{tokenizer.eos_token}"]
    chat = [CHAT[0], {"role": "assistant", "content": ""}]
    [found] = encode_turns(family(NO_END.replace("m.content + '\n'", "m.content")), [chat])
    assert found.response_ids == [tokenizer.eos_token_id] and found.prompt_ids


def test_a_row_that_cannot_be_encoded_is_named(tmp_path):
    tokenizer = family(THINKING, CASES["ChatML"][1])
    thoughts = [*CHAT]
    thoughts[1] = {"role": "assistant", "content": "<think>One, two.</think>Three."}
    file = write(tmp_path / "c.jsonl", [{"m": CHAT}, {"m": thoughts}])
    with pytest.raises(ModelError, match=r"c.jsonl, row 1: the chat template"):
        SFTDataset([file], tokenizer, messages_key="m")
    file = write(tmp_path / "c.jsonl", [{"m": CHAT}, {"m": CHAT[:1]}])
    with pytest.raises(DataError, match=r"row 1: 'm' has no message of the role 'assistant'"):
        SFTDataset([file], tokenizer, messages_key="m")


def test_a_dataset_of_conversations(tmp_path):
    tokenizer = family(*CASES["Gemma"][:2])
    file = write(tmp_path / "c.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    data = SFTDataset([file], tokenizer, messages_key="messages")
    assert data.ends == {tokenizer.convert_tokens_to_ids("<end_of_turn>")}
    [batch] = SFTLoader(data, 2, shuffle=False)
    mask, attention = batch.batch["response_mask"], batch.batch["attention_mask"]
    width = batch.batch["prompts"].shape[1]
    assert mask.sum(-1).tolist() == [sum(data[i]["response_mask"]) for i in (0, 1)]
    assert attention.sum(-1).tolist() == [
        len(data[i]["prompt_ids"]) + len(data[i]["response_ids"]) for i in (0, 1)
    ]
    kept = batch.batch["responses"][0][mask[0].bool()]
    assert tokenizer.decode(kept) == "Three.<end_of_turn>Four.<end_of_turn>"
    assert not bool((mask & ~attention[:, width:]).any())
