"""The tokens of a conversation are those of one call of the tokenizer for the whole text, and its
prompt has the tokens of generation, for each kind of tokenizer and each family of templates."""

import json

import pytest
from chat_families import CASES, CHAT, NO_END
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, PreTrainedTokenizerFast, PythonBackend

from quadriga.data import PromptDataset, SFTDataset
from quadriga.data.conversations import PairDataset, encode_turns
from quadriga.errors import DataError, UnknownNameError

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
    "' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = LLAMA2.replace("' ' + m.content + ' '", "m.content")
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}"
    "{{ ' ' if m.role == 'user' else eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEMPLATES = {name: template for name, (template, *_) in CASES.items()}
TEMPLATES |= {"Llama 2": LLAMA2, "Mistral": MISTRAL, "Vicuna": VICUNA, "Phi": PHI, "none": NO_END}
OPEN = ("Vicuna", "none", "Llama 3")
"""Templates whose prompts end with white space that is part of a token with what follows."""
SPECIAL = ["<s>", "</s>", "<|end|>", *{text for _, texts, _ in CASES.values() for text in texts}]
TEXTS = ["How many? And one more? Three. Four. Be kind. user assistant [INST] [/INST] Tom\n\n"] * 9
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(trim=False, first=False):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=first)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(show_progress=False, vocab_size=500))
    if trim:
        from tokenizers import processors

        made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def pieces(prepend=None, normalized=False, unigram=False):
    """A tokenizer in the form of SentencePiece: spaces are part of the words that follow."""
    made = Tokenizer(models.Unigram() if unigram else models.BPE(byte_fallback=True))
    if normalized:  # Llama 2
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        made.normalizer = normalizers.Sequence(steps)
        made.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}?[^{SPACE}]+"), "isolated")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Metaspace(prepend_scheme=prepend or "first")
    options = {"show_progress": False, "vocab_size": 300}
    alphabet = [f"<0x{i:02X}>" for i in range(256)]
    if unigram:
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>", special_tokens=["<unk>"])
    else:
        trainer = trainers.BpeTrainer(**options | {"vocab_size": 600}, special_tokens=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    return made


KINDS = {
    "byte level": byte_level,
    "byte level, trimmed": lambda: byte_level(trim=True),
    "byte level, first space": lambda: byte_level(first=True),
    "Llama 2": lambda: pieces(normalized=True),
    "Metaspace first": lambda: pieces("first"),
    "Metaspace always": lambda: pieces("always"),
    "Metaspace never": lambda: pieces("never"),
    "Unigram": lambda: pieces("always", unigram=True),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    made = PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param]())
    made.add_special_tokens(
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "additional_special_tokens": [AddedToken(t, special=True) for t in SPECIAL[2:]],
        }
    )
    return made


def one_call(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_one_call_after_the_prompt_of_generation(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    for answer in ["Tom", "Three.", " Tom", "\nTom", "\n\nTom", "é"]:
        chat = [CHAT[0], {"role": "assistant", "content": answer}]
        [found] = encode_turns(tokenizer, [chat])
        assert found.prompt_ids == one_call(tokenizer, prompt)
        whole = one_call(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False))
        if whole[: len(found.prompt_ids)] == found.prompt_ids:
            assert found.ids[: len(whole)] == whole[: len(found.ids)]
        else:
            assert name in OPEN or answer.startswith(("\n", " "))
            assert text_of(tokenizer, found.ids).startswith(text_of(tokenizer, whole))


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_turns_have_the_tokens_of_one_call(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    [found] = encode_turns(tokenizer, [CHAT])
    whole = one_call(tokenizer, tokenizer.apply_chat_template(CHAT, tokenize=False))
    if name not in OPEN:
        assert found.ids[: len(whole)] == whole[: len(found.ids)]
    assert text_of(tokenizer, found.ids).startswith(text_of(tokenizer, whole))


def text_of(tokenizer, ids):
    return tokenizer.decode(ids).rstrip()


class Characters(PythonBackend):
    """A tokenizer without places of tokens, which puts a space before each text."""

    def __init__(self, **options):
        self.names = ["<unk>", "<s>", "</s>", *map(chr, range(9, 127))]
        super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

    @property
    def vocab_size(self):
        return len(self.names)

    def get_vocab(self):
        return {name: i for i, name in enumerate(self.names)}

    def _tokenize(self, text, **_):
        return list(f" {text}")

    def _convert_token_to_id(self, token):
        return self.names.index(token)

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_a_tokenizer_without_offsets_trains_no_false_space():
    tokenizer = Characters()
    tokenizer.chat_template = MISTRAL
    [found] = encode_turns(tokenizer, [CHAT])
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert found.ids == one_call(tokenizer, whole)
    assert found.prompt_ids == one_call(tokenizer, "<s>[INST] How many? [/INST]")


@pytest.mark.parametrize("name", ["Phi", "Qwen", "Llama 3", "none"])
def test_special_tokens_in_texts_are_kept_neutralised_or_refused(tokenizer, name, tmp_path):
    """Of prompts, conversations and pairs; a row of "< |end|>" shows what neutralised texts are."""
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.pad_token = "</s>"
    typed, plain = "a<|end|>b</s>", "a< |end|>b< /s>"

    def tokens(text, choice):
        file = tmp_path / "rows.jsonl"
        row = {"prompt": text, "extra_info": {"answer": text}, "chosen": text, "rejected": "c"}
        file.write_text(json.dumps(row))
        options = {"special_tokens": choice}
        [prompt] = PromptDataset([file], tokenizer, **options)
        [turns] = SFTDataset([file], tokenizer, **options)
        [pair] = PairDataset([file], tokenizer, pad_token_id=2, **options)
        return prompt["input_ids"], turns["prompt_ids"] + turns["response_ids"], pair["chosen"]

    tools = [{"role": "user", "content": "", "calls": [{"name": typed}], "count": 2}]
    data = PromptDataset.from_rows([{"prompt": "a"}], tokenizer, special_tokens="neutralise")
    assert data.own_texts(None, tools)[0]["calls"] == [{"name": plain}]
    with pytest.raises(UnknownNameError, match="special_tokens 'neutralize'; known: keep,"):
        tokens(plain, "neutralize")
    assert tokens(typed, "neutralise") == tokens(plain, "keep") == tokens(plain, "refuse")
    for kept, split in zip(tokens(typed, "keep"), tokens(typed, "neutralise"), strict=True):
        assert kept != split
    with pytest.raises(DataError, match=r"row 0: .* a special token .* 'a< \|end\|>b< /s>'"):
        tokens(typed, "refuse")
