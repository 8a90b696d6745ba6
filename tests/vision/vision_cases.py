"""A small model of text and images, prompts with and without images, and steps of an engine."""

import io
import os
import shutil
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig, SamplingConfig
from quadriga.data import PromptDataset
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.images import MultiModalRows
from quadriga.models.loading import load_tokenizer
from quadriga.protocol import DataProto, fields
from quadriga.rollout import build_rollout
from quadriga.trainer import stages
from quadriga.trainer.ingredients import image_rules
from quadriga.workers.actor_rollout_ref import generate_batch, sampling_params

sys.path.append(str(Path(__file__).parents[2] / "examples" / "trainer"))
import squares

QUESTION = "<image>which colour has it?"


def write_model(folder: Path) -> None:
    texts = ["which colour has it? red green blue"] * 10
    squares.write_vision_model(folder, texts, heads=2, initializer_range=0.2)


def write_window_model(folder: Path, other: Path) -> None:
    """Write a Qwen2.5-VL, whose image encoder has windows, with the tokens of `other`."""
    shutil.copytree(other, folder)
    config = AutoConfig.from_pretrained(other)
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16,
        "initializer_range": 0.2,
    }  # fmt: skip
    text = config.text_config.to_dict()
    text.pop("model_type")
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(config, name) for name in tokens}
    torch.manual_seed(0)
    made = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    Qwen2_5_VLForConditionalGeneration(made).save_pretrained(folder)


def png(colour: str, size: tuple[int, int] = (16, 16)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


def rows() -> list[dict[str, object]]:
    """Equal texts with different images, a text alone, and two images of different sizes."""
    return [
        {"prompt": QUESTION, "images": [{"bytes": png("red"), "path": None}]},
        {"prompt": QUESTION, "images": [{"bytes": png("blue"), "path": None}]},
        {"prompt": "which colour?", "images": []},
        {"prompt": "<image> and <image>", "images": [png("green", (24, 16)), png("red")]},
    ]


def dataset(folder: Path, values=None, **options) -> PromptDataset:
    rules = image_rules(ModelConfig(path=str(folder)), "images")
    given = rows() if values is None else values
    return PromptDataset.from_rows(given, load_tokenizer(folder), images=rules, **options)


def prompts(folder: Path, *, n: int = 2) -> DataProto:
    """The batch of `rows`, each row `n` times."""
    data = dataset(folder)
    batch = data.collate([data[i] for i in range(len(data))])
    return stages.expand_prompts(batch, n=n, seed=0).batch


def responses(folder: Path, batch: DataProto, engine=None, **sampling) -> DataProto:
    """The batch with responses of up to six tokens."""
    model = ModelConfig(path=str(folder))
    params = sampling_params(SamplingConfig(**sampling), model, max_new_tokens=6)
    prompts = batch.select(meta_info_keys=[])
    generated = generate_batch(engine or build_rollout("hf", model), prompts, params)
    return batch.select(batch_keys=[fields.PROMPT_LENGTH], meta_info_keys=[]).union(generated)


def inputs(data: DataProto) -> tuple[dict[str, torch.Tensor], MultiModalRows]:
    """What a training engine takes of a batch."""
    names = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSE_MASK)
    images = MultiModalRows.of(data)
    assert images is not None
    return {name: data.batch[name] for name in names}, images


def trainer(folder: Path | str, **settings) -> FSDPEngine:
    engine = EngineConfig(dtype="float64", reduce_dtype="float64")
    return FSDPEngine(ModelConfig(path=str(folder)), engine, OptimConfig(lr=0.01), **settings)


def step(engine: FSDPEngine, data: DataProto, micro: int | None = None) -> dict[str, torch.Tensor]:
    """Make one optimizer step that raises the log-probabilities; return the weights."""
    batch, images = inputs(data)
    (tokens,) = engine.global_counts(batch[fields.RESPONSE_MASK].sum())

    def loss(outputs, _):
        return -outputs["log_probs"].sum() / tokens, {}

    engine.train_step(batch, loss, micro_batch_size=micro, images=images)
    return {name: tensor.clone() for name, tensor in engine.state_stream()}


def rank_main(rank: int, folder: str, saved: str, results: str, port: int) -> None:
    """Make the step on two ranks, of which the second has no row with an image."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    data = torch.load(saved, weights_only=False)
    own = data.select_idxs([i for i in range(len(data)) if (i // 2 == 2) == (rank == 1)])
    weights = step(trainer(folder, min_unit_parameters=1), own, micro=2)
    if rank == 0:
        torch.save(weights, results)
    torch.distributed.destroy_process_group()
