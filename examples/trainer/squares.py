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
from PIL import Image

from quadriga.models.vision.tiny import TinyVisionModel, write_tiny_vision_model

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (230, 210, 50),
}
QUESTION = "Which colour has the square?"
SIDE = 16  # pixels


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


def write_task(folder: Path, *, train: int = 1024, test: int = 128, seed: int = 0) -> None:
    """Write the data files and the model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("sft", train), ("train", train), ("test", test)):
        rng = random.Random(f"{seed}/{name}")
        rows = [row(index, rng, image=name != "sft") for index in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    texts = [f"{QUESTION} {' '.join(COLOURS)}", *COLOURS] * 20
    write_tiny_vision_model(folder / "base", texts, TinyVisionModel(), seed=seed)


if __name__ == "__main__":
    write_task(Path(sys.argv[1] if len(sys.argv) > 1 else "squares"))
