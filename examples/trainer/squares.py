"""A task with images: name the colour of a square. It makes the data and a small model, and scores.

    python examples/trainer/squares.py squares

writes into the folder `squares`:

- `base`: a Qwen2-VL with random weights, about 0.16 million parameters;
- `sft.parquet`: the question without an image, answered by a colour at random. A model that
  imitates these answers knows the words, and is right in one of four cases;
- `train.parquet` and `test.parquet`: the question with an image of 16 × 16 pixels.

Only the image says which answer is right, so that accuracy above a quarter comes from the image.
`examples/recipes/train_images.yaml` has the commands that go on from there.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quadriga.models import train_tokenizer
from quadriga.models.tiny import ROLE_TOKENS

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 50),
}
QUESTION = "Which colour has the square?"
SIDE = 16  # pixels
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (  # of the parts of a message, as the template of Qwen2-VL
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


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> float:
    """Return 1 for the right colour and 0 for everything else."""
    return float(solution_str.strip() == ground_truth)


def picture(colour: str, rng: random.Random) -> bytes:
    """Return a PNG of a square of a colour, of a random size in a random place, on grey."""
    grey = rng.randint(90, 160)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    size = rng.randint(8, 12)
    left, top = rng.randint(0, SIDE - size), rng.randint(0, SIDE - size)
    image.paste(COLOURS[colour], (left, top, left + size, top + size))
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def row(index: int, rng: random.Random, *, image: bool = True) -> dict[str, object]:
    """Return one row of a data file."""
    colour = rng.choice(list(COLOURS))
    tag = "<image>" if image else ""
    found: dict[str, object] = {
        "data_source": "squares",
        "prompt": [{"role": "user", "content": tag + QUESTION}],
        "reward_model": {"style": "rule", "ground_truth": colour},
        "extra_info": {"index": index, "answer": colour},
    }
    if image:
        found["images"] = [{"bytes": picture(colour, rng), "path": None}]
    return found


def write_vision_model(
    folder: Path,
    texts: list[str],
    *,
    heads: int = 4,
    initializer_range: float = 0.05,
    seed: int = 0,
) -> None:
    """Write a Qwen2-VL with random weights, its tokenizer and its image processor.

    An image of 16 × 16 pixels has 4 × 4 patches and 2 × 2 tokens. `heads`: of 16 numbers in the
    text model, and of 8 in the image encoder.
    """
    tokenizer = train_tokenizer(texts, 320)
    special = [*ROLE_TOKENS, *VISION_TOKENS]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = (tokenizer.get_vocab()[token] for token in VISION_TOKENS)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16 * heads,
        "intermediate_size": 32 * heads,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 512,
        "initializer_range": initializer_range,
        # The eight angles of a head are of time, height and width.
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 8 * heads, "hidden_size": 16 * heads, "num_heads": heads,
        "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
        "initializer_range": initializer_range,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, vision_start_token_id=start,
        vision_end_token_id=end, image_token_id=image, video_token_id=video,
        tie_word_embeddings=False,
    )  # fmt: skip
    size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)


def write_task(folder: Path, *, train: int = 1024, test: int = 128, seed: int = 0) -> None:
    """Write the data files and the model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("sft", train), ("train", train), ("test", test)):
        rng = random.Random(f"{seed}/{name}")
        rows = [row(index, rng, image=name != "sft") for index in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    texts = [f"{QUESTION} {' '.join(COLOURS)}", *COLOURS] * 20
    write_vision_model(folder / "base", texts, seed=seed)


if __name__ == "__main__":
    write_task(Path(sys.argv[1] if len(sys.argv) > 1 else "squares"))
