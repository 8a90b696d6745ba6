"""Write a small model and its tokenizer to an ordinary Hugging Face folder, without a download.

The tokenizer is trained on the given texts. A token is (part of) a word with the space before it,
or a single digit, so that a number has the same tokens everywhere. Bytes are the fallback, so that
any text can be encoded.

The model is a Llama, because `AutoTokenizer` loads the tokenizer.json of a Llama folder unchanged.
For Qwen2 it replaces the pre-tokenizer by that of the Qwen2 family.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.config.paths import local_path
from quadriga.errors import ModelError
from quadriga.observability.quiet import quiet_libraries

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# What the pre-tokenizer splits text into: "####", words with the space before them, single digits,
# punctuation with the space before it, other white space. BPE merges only inside a piece.
_PIECES = r"####| ?\p{L}+|\d| ?[^\s\p{L}\d]|\s"


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the model. The default has about a million parameters.

    Few wide layers, large initial weights and an untied output matrix let so small a model learn
    within minutes. With the defaults of transformers (0.02, tied) it needs several times the steps.

    Raises:
        ModelError: the heads do not divide the hidden size, or the key-value heads the heads; or
            the model is not tiny: it would have more than 10^9 parameters.
    """

    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 3
    intermediate_size: int = 512
    max_position_embeddings: int = 512
    vocab_size: int = 512
    tie_word_embeddings: bool = False
    initializer_range: float = 0.05

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads "
                f"{self.num_heads}, and num_heads of num_kv_heads {self.num_kv_heads}"
            )
        # The projections of queries and outputs, and the three matrices of the MLP.
        layer = self.hidden_size * (2 * self.hidden_size + 3 * self.intermediate_size)
        count = self.num_layers * layer + self.vocab_size * self.hidden_size
        if count > 10**9:
            raise ModelError(
                f"{self} has at least {count} parameters; a tiny model has at most 10^9"
            )


def train_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer over words and single digits, and add a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, END_TOKEN, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # has no annotations
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    folder: str | Path, texts: Iterable[str], shape: TinyModel | None = None, *, seed: int = 0
) -> int:
    """Write a Llama model with random weights and its tokenizer; return its parameter count.

    The folder holds config.json, generation_config.json, model.safetensors (float32),
    tokenizer.json and tokenizer_config.json, and loads like any other model. Equal arguments give
    equal weights: the global random state is neither used nor changed.
    """
    shape = shape or TinyModel()
    folder = Path(local_path(folder))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range, tie_word_embeddings=shape.tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
