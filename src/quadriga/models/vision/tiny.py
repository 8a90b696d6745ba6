"""Write a small model of text and images, with tokenizer and image processor, without a download.

The model is a Qwen2-VL. Its tokenizer is that of `models/tiny.py` with the tokens of images. Its
chat template writes the parts of a message as the template of Qwen2-VL does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from quadriga.errors import ModelError
from quadriga.models.tiny import ROLE_TOKENS, train_tokenizer
from quadriga.models.vision.processor import check_pillow
from quadriga.observability.quiet import quiet_libraries

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyVisionModel:
    """Sizes of the model. The default has 0.2 million parameters.

    An image of 16 × 16 pixels has 4 × 4 patches and 2 × 2 tokens.

    Raises:
        ModelError: the heads do not divide the hidden size, or the key-value heads the heads.
    """

    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 128
    max_position_embeddings: int = 512
    vocab_size: int = 320
    tie_word_embeddings: bool = False
    initializer_range: float = 0.05
    vision_size: int = 32
    vision_layers: int = 2
    vision_heads: int = 4
    patch_size: int = 4
    max_pixels: int = 64 * 64

    def __post_init__(self) -> None:
        heads = (
            (self.hidden_size, self.num_heads),
            (self.num_heads, self.num_kv_heads),
            (self.vision_size, self.vision_heads),
        )
        # A rotary embedding rotates pairs of numbers; that of an image has two dimensions.
        sizes = (
            (self.hidden_size // self.num_heads) % 4,
            (self.vision_size // self.vision_heads) % 4,
        )
        if any(size % count for size, count in heads) or any(sizes):
            raise ModelError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}, "
                f"vision_size {self.vision_size} of vision_heads {self.vision_heads}, and "
                f"num_heads of num_kv_heads {self.num_kv_heads}; the size of a head must be a "
                "multiple of 4"
            )


def train_vision_tokenizer(texts: Iterable[str], vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a tiny model, and add the tokens and the template for images."""
    tokenizer = train_tokenizer(texts, vocab_size)
    special = [*ROLE_TOKENS, *VISION_TOKENS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_tiny_vision_model(
    folder: str | Path,
    texts: Iterable[str],
    shape: TinyVisionModel | None = None,
    *,
    seed: int = 0,
) -> int:
    """Write a Qwen2-VL with random weights, its tokenizer and its image processor.

    The folder is an ordinary one, as `write_tiny_model` makes it, with preprocessor_config.json.
    The global random state is neither used nor changed.

    Returns:
        The number of parameters.

    Raises:
        ConfigError: Pillow is not installed.
    """
    check_pillow()
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    shape = shape or TinyVisionModel()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_vision_tokenizer(texts, shape.vocab_size)
    side = 2 * shape.patch_size  # of the pixels of one token
    processor = Qwen2VLImageProcessorPil(
        patch_size=shape.patch_size,
        merge_size=2,
        size={"shortest_edge": side * side, "longest_edge": shape.max_pixels},
    )
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(_config(shape, tokenizer))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _config(shape: TinyVisionModel, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    start, end, image, video = (tokenizer.get_vocab()[token] for token in VISION_TOKENS)
    # Half of a head is rotated by time, height and width, in sections of about a third each.
    half = shape.hidden_size // shape.num_heads // 2
    section = half // 4, (half - half // 4) // 2
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": shape.initializer_range,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [*section, half - sum(section)],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": shape.vision_layers,
        "embed_dim": shape.vision_size,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.vision_heads,
        "mlp_ratio": 2,
        "patch_size": shape.patch_size,
        "spatial_merge_size": 2,
        "initializer_range": shape.initializer_range,
    }
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=shape.tie_word_embeddings,
    )
