"""From `<image>` and the images of a row to token ids, patches and positions."""

import io
import json
import os
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import vision_cases as cases
from PIL import Image

from quadriga.config.schema import ModelConfig
from quadriga.data import PromptDataset
from quadriga.data.images import PromptImages, image_positions, read_image
from quadriga.data.rows import Row
from quadriga.errors import DataError
from quadriga.models.images import image_tokens
from quadriga.models.loading import load_causal_lm, load_tokenizer
from quadriga.protocol import fields
from quadriga.trainer.ingredients import image_rules

QUESTION = cases.QUESTION


def collated(data: PromptDataset):
    return data.collate([data[i] for i in range(len(data))])


def test_the_drawn_example_of_positions():
    found = image_positions([7, 9, 9, 9, 9, 9, 9, 7, 7], 9, [(1, 2, 3)])
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    assert image_positions([7, 7], 9, []).tolist() == [[0, 1]] * 3
    with pytest.raises(ValueError, match="the prompt has 1 image tokens, and its images have 0"):
        image_positions([9], 9, [])


def test_tokens_and_positions_are_those_of_transformers(folder):
    """An image of H × W pixels has H · W / 64 tokens here, and the model counts them itself."""
    batch, model, tokens = collated(cases.dataset(folder)), load_causal_lm(folder), 0
    image = image_tokens(folder).image
    for row in range(len(batch)):
        mask = batch.batch[fields.ATTENTION_MASK][row].bool()
        ids = batch.batch[fields.INPUT_IDS][row][mask][None]
        grids = batch.non_tensor_batch[fields.MULTI_MODAL_INPUTS][row].get("image_grid_thw")
        kinds = (ids == image).int()
        expected, _ = model.model.get_rope_index(ids, kinds, grids)
        found = batch.batch[fields.POSITION_IDS][row]
        assert torch.equal(found[:, mask], expected[:, 0])
        assert not found[:, ~mask].any()
        tokens += int(kinds.sum())
    assert tokens == 4 + 4 + 0 + (6 + 4)


def test_patches_are_those_of_the_image_processor(folder):
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    entry = collated(cases.dataset(folder)).non_tensor_batch[fields.MULTI_MODAL_INPUTS][3]
    images = [Image.open(io.BytesIO(image)) for image in cases.rows()[3]["images"]]
    expected = processor(images=images, return_tensors="pt")
    assert torch.equal(entry["pixel_values"], expected["pixel_values"])
    assert entry["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 4]]


def test_images_in_parquet_and_beside_json_lines_are_the_same(folder, tmp_path):
    content = cases.png("red", (24, 16))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(content)
    path = "pictures/red.png"
    forms = [{"bytes": content, "path": None}], [{"bytes": None, "path": path}]
    for name, images in zip(("bytes", "paths"), forms, strict=True):
        table = pa.Table.from_pylist([{"prompt": QUESTION, "images": images}])
        pq.write_table(table, tmp_path / f"{name}.parquet")
    lines = [path, [path], [{"path": path}], [{"image": f"file://{tmp_path / path}"}]]
    text = "\n".join(json.dumps({"prompt": QUESTION, "images": images}) for images in lines)
    (tmp_path / "rows.jsonl").write_text(text)
    files = [tmp_path / name for name in ("bytes.parquet", "paths.parquet", "rows.jsonl")]
    rules = image_rules(ModelConfig(path=str(folder)), "images")
    batch = collated(PromptDataset(files, load_tokenizer(folder), images=rules))
    entries = list(batch.non_tensor_batch[fields.MULTI_MODAL_INPUTS])
    assert len(entries) == 6
    assert all(torch.equal(entries[0]["pixel_values"], e["pixel_values"]) for e in entries)
    assert (batch.batch[fields.INPUT_IDS] == batch.batch[fields.INPUT_IDS][0]).all()


def test_lengths_count_the_tokens_of_images(folder):
    large = {"prompt": QUESTION, "images": [cases.png("red", (64, 64))]}
    assert cases.dataset(folder, [large]).longest > 64
    short = cases.dataset(folder, [*cases.rows(), large], max_prompt_length=40)
    assert (len(short), short.filtered) == (4, 1)
    with pytest.raises(DataError, match=r"given, row 0: the prompt has \d+ tokens, more than max"):
        cases.dataset(folder, [large], max_prompt_length=40, filter_overlong_prompts=False)


def test_transparent_and_turned_images(folder):
    def pixels(image):
        content = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by 90°
        image.save(content, "PNG", exif=exif)
        row = {"prompt": QUESTION, "images": [content.getvalue()]}
        return collated(cases.dataset(folder, [row])).non_tensor_batch["multi_modal_inputs"][0]

    white = pixels(Image.new("RGB", (24, 16), "white"))
    clear = pixels(Image.new("RGBA", (24, 16), (0, 0, 0, 0)))
    assert torch.equal(white["pixel_values"], clear["pixel_values"])
    assert white["image_grid_thw"].tolist() == [[1, 6, 4]]


def bomb() -> bytes:
    """A PNG of some hundred bytes whose header announces 60000 × 60000 pixels."""
    content = bytearray(cases.png("red"))
    content[16:24] = (60000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    return bytes(content)


def large() -> bytes:
    """A PNG below Pillow's limits and above ours."""
    content = bytearray(cases.png("red"))
    content[16:24] = (9000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(bytes(content[12:29])).to_bytes(4, "big")
    return bytes(content)


NOISE = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)).save(
    NOISE, "JPEG"
)
REFUSED = {
    "no image": ([b"GIF89a?"], QUESTION, "image 0 cannot be read"),
    "a program": ([b"%!PS-Adobe-3.0 EPSF-3.0\n"], QUESTION, "image 0 cannot be read: it is none"),
    "a cut file": ([NOISE.getvalue()[:400]], QUESTION, "image 0 cannot be read: OSError"),
    "a bomb": ([bomb()], QUESTION, "image 0 cannot be read: it announces more than 67108864 pixel"),
    "too large": ([large()], QUESTION, "image 0 has 9000 × 9000 pixels; the limit is 67108864"),
    "an odd shape": ([cases.png("red", (2, 900))], QUESTION, "image 0 of 2 × 900 pixels cannot be"),
    "the second": ([cases.png("red"), b"?"], f"{QUESTION}<image>", "image 1 cannot be read"),
    "no file": (["missing.png"], QUESTION, "image 0: there is no file missing.png"),
    "a pipe": (["pipe"], QUESTION, "image 0: there is no file pipe"),
    "an address": (["https://a.b/c.png"], QUESTION, "read from files and not from addresses"),
    "a number": ([3], QUESTION, "image 0 must be bytes, a path or a dict with one of bytes, path"),
    "an empty dict": ([{"bytes": None}], QUESTION, r"got a dict with \['bytes'\]"),
    "no list": (3, QUESTION, "'images' must be a list of images"),
    "many": ([b""] * 65, QUESTION, "'images' has 65 images; at most 64 are read"),
    "more tags": ([cases.png("red")], f"{QUESTION}<image>", "2 times <image>, and the row has 1 i"),
    "fewer tags": ([cases.png("red")], "which?", "0 times <image>, and the row has 1 images in"),
    "tags alone": (None, QUESTION, "1 times <image>, and the row has 0 images"),
    "an image token": (None, "a <|image_pad|>", "1 image tokens after the chat template, and the "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_that_cannot_be_used_is_refused_before_the_start(
    folder, case, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    images, prompt, message = REFUSED[case]
    good, bad = {"prompt": "which?"}, {"prompt": prompt, "images": images}
    with pytest.raises(DataError, match=rf"^given, row 1: .*{message}") as caught:
        cases.dataset(folder, [good, bad])
    assert "\n" not in str(caught.value)
    assert caught.value.row == 1


def test_a_model_of_text_refuses_images_instead_of_leaving_them_out(folder):
    tokenizer = load_tokenizer(folder)
    rows = [{"prompt": "which?", "images": []}, {"prompt": QUESTION, "images": [b""]}]
    with pytest.raises(DataError, match="row 1: the row has images in 'images', and the model tak"):
        PromptDataset.from_rows(rows, tokenizer)
    assert len(PromptDataset.from_rows(rows, tokenizer, image_key=None)) == 2
    assert fields.MULTI_MODAL_INPUTS not in PromptDataset.from_rows(rows[:1], tokenizer)[0]


def test_a_file_that_changes_its_size_during_a_run_is_noticed(folder, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(cases.png("red"))
    data = cases.dataset(folder, [{"prompt": QUESTION, "images": [str(file)]}])
    assert isinstance(data[0]["multi_modal_inputs"], PromptImages)
    file.write_bytes(cases.png("red", (64, 64)))
    with pytest.raises(
        DataError, match="row 0: the prompt has 4 image tokens, and its images have"
    ):
        collated(data)


def test_an_image_of_16_bits_is_scaled(folder):
    """20000 of 65535 is 78 of 255. `convert` alone would give 255."""
    content = io.BytesIO()
    Image.fromarray(np.full((16, 16), 20000, dtype=np.uint16)).save(content, format="PNG")
    row = Row({}, "given", 0)
    assert read_image(row, 0, content.getvalue()).getpixel((3, 3)) == (78, 78, 78)
