"""From `<image>` in the text of a prompt to image tokens, patches and positions.

"<image>What is it?" and an image of 28 × 56 pixels

text of the template   … <|vision_start|><|image_pad|><|vision_end|>What is it? …
token ids              … one <|image_pad|> for each token of the image …
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quadriga.config.paths import local_path
from quadriga.data.chat import TemplateChat
from quadriga.data.rows import MAX_ROW, Row, read_pieces

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from quadriga.data.chat import Chat

TAG = "<image>"
"""Stands for an image in the text of a prompt."""

PATCHES, GRIDS = "pixel_values", "image_grid_thw"


@dataclass(frozen=True)
class ImageRules:
    """How images become tokens.

    Attributes:
        image_key: column of the images.
        image_token: id of the token that stands for a part of an image.
        merge_size: an image of T × H × W patches has T · H · W / merge_size² tokens.
        process: images → `pixel_values` [patches, numbers of a patch] and `image_grid_thw` [n, 3].
        count_patches: (height, width) of an image → its patches.
        settings: the settings of the image processor, for digests.
    """

    image_key: str | None
    image_token: int
    merge_size: int
    process: Callable[[Sequence[Image]], Mapping[str, Tensor]]
    count_patches: Callable[[int, int], int]
    settings: str

    def template_chat(self, row: Row, chat: Chat) -> TemplateChat:
        """Return the chat with a part for each image in place of its tag.

        Raises:
            DataError: the number of tags is not that of the images.
        """
        tags = sum(message["content"].count(TAG) for message in chat)
        images = len(images_of(row, self.image_key))
        if tags != images:
            raise row.error(
                f"the prompt has {tags} times {TAG}, and the row has {images} images in "
                f"{self.image_key!r}; write one {TAG} for each image"
            )
        return [{**m, "content": _parts(m["content"])} for m in chat] if tags else chat

    def expand(self, row: Row, ids: list[int]) -> list[int]:
        """Return the token ids of a prompt with all tokens of its images.

        The template writes one image token for each image. Every image of the row is decoded, so
        that an image which cannot be read is found before a run starts.

        Raises:
            DataError: an image cannot be read, or the prompt has another number of image tokens.
        """
        sources = images_of(row, self.image_key)
        if ids.count(self.image_token) != len(sources):
            raise row.error(
                f"the prompt has {ids.count(self.image_token)} image tokens after the chat "
                f"template, and the row has {len(sources)} images; remove the image token from its "
                "texts, or use the chat template of the model"
            )
        if not sources:
            return ids
        sizes = iter([self._tokens(row, i, source) for i, source in enumerate(sources)])
        expanded: list[int] = []
        for token in ids:
            expanded += [token] * (next(sizes) if token == self.image_token else 1)
        return expanded

    def _tokens(self, row: Row, number: int, source: object) -> int:
        """Return the tokens of an image."""
        image = read_image(row, number, source)
        try:
            patches = self.count_patches(image.height, image.width)
        except ValueError as error:  # the image processor refuses the size
            raise row.error(
                f"image {number} of {image.width} × {image.height} pixels cannot be used: {error}"
            ) from error
        return patches // self.merge_size**2


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt, which are decoded when they are used."""

    row: Row
    ids: Sequence[int]
    rules: ImageRules

    def inputs(self) -> dict[str, Tensor]:
        """Return `pixel_values` [N, D] and `image_grid_thw` [n, 3]; {} without images.

        Raises:
            DataError: an image cannot be read any more.
        """
        sources = images_of(self.row, self.rules.image_key)
        images = [read_image(self.row, i, source) for i, source in enumerate(sources)]
        if not images:
            return {}
        processed = self.rules.process(images)
        return {key: processed[key] for key in (PATCHES, GRIDS)}

    def positions(self, inputs: Mapping[str, Tensor]) -> npt.NDArray[np.int64]:
        """Return the positions [3, tokens] of the prompt with these `inputs`.

        Raises:
            DataError: an image has another size than when the run started.
        """
        merge = self.rules.merge_size  # merge² patches become one token
        patches = inputs[GRIDS].tolist() if inputs else []
        grids = [(t, h // merge, w // merge) for t, h, w in patches]
        try:
            return image_positions(self.ids, self.rules.image_token, grids)
        except ValueError as error:
            raise self.row.error(f"{error}; do not change image files during a run") from error


def _parts(content: str) -> list[dict[str, str]]:
    """Return a text as parts: "a<image>b" is a text, an image and a text."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(TAG)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


MAX_PIXELS = 1 << 26  # pixels of one image: 8192 × 8192
MAX_IMAGES = 64  # images of one row
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_KEYS = ("bytes", "path", "image")
_FILE = "file://"


def images_of(row: Row, image_key: str | None) -> list[object]:
    """Return the images of a row as they are stored, [] if it has none.

    One image in place of a list is a list of one.

    Raises:
        DataError: the value is neither, or there are more than `MAX_IMAGES`.
    """
    value = None if image_key is None else row.values.get(image_key)
    if value is None:
        return []
    if isinstance(value, bytes | str | Mapping):
        value = [value]
    if not isinstance(value, list):
        raise row.error(
            f"{image_key!r} must be a list of images, as bytes, paths or dicts with 'bytes' or "
            f"'path', got {type(value).__name__}"
        )
    if len(value) > MAX_IMAGES:
        raise row.error(f"{image_key!r} has {len(value)} images; at most {MAX_IMAGES} are read")
    return value


def image_stamp(data_file: Path, image_key: str) -> str:
    """Return a digest of the sizes and times of the image files that the rows of a data file name.

    Raises:
        DataError: the data file cannot be read, or a row has no list of images.
    """
    digest = hashlib.sha256()
    for row in (row for piece in read_pieces(data_file) for row in piece.rows):
        for given in map(_given, images_of(row, image_key)):
            if isinstance(given, str):
                path = _path(row, given)
                stat = path.stat() if path.is_file() else None
                digest.update(repr(stat and (stat.st_size, stat.st_mtime_ns)).encode())
    return digest.hexdigest()


def check_no_images(row: Row, image_key: str | None) -> None:
    """Check that a row has no images, for a model of text.

    Raises:
        DataError: it has some.
    """
    if images_of(row, image_key):
        raise row.error(
            f"the row has images in {image_key!r}, and the model takes text only; use a model that "
            "takes images, or set image_key to null to leave the images out"
        )


def check_text_alone(row: Row) -> None:
    """Check that a row for fine-tuning has no images in the column `images`.

    Raises:
        DataError: it has some.
    """
    if images_of(row, "images"):
        raise row.error("the row has images, and fine-tuning is on text; remove the column")


def read_image(row: Row, number: int, source: object) -> Image:
    """Return image `number` of a row, decoded, in RGB. A transparent part is white.

    Raises:
        DataError: it cannot be read, or it has more than `MAX_PIXELS` pixels.
    """
    import PIL.Image
    from PIL import ImageOps, UnidentifiedImageError

    content = _content(row, number, source)
    try:
        with warnings.catch_warnings():
            # Pillow warns of sizes below the limit here, and refuses those of twice its own limit.
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            image = PIL.Image.open(BytesIO(content), formats=_FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise row.error(
                f"image {number} has {width} × {height} pixels; the limit is {MAX_PIXELS}"
            )
        image.load()
        return _rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        problem = f"it is none of {', '.join(_FORMATS)}"
    except PIL.Image.DecompressionBombError:
        problem = f"it announces more than {MAX_PIXELS} pixels"
    # A damaged file raises errors of many types: OSError if it is cut, SyntaxError in a PNG chunk.
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError) as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
    raise row.error(f"image {number} cannot be read: {problem:.300}")


def _content(row: Row, number: int, source: object) -> bytes:
    """Return the bytes of an image file."""
    given = _given(source)
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str):
        found = f"a dict with {sorted(map(str, source))}" if isinstance(source, Mapping) else None
        raise row.error(
            f"image {number} must be bytes, a path or a dict with one of {', '.join(_KEYS)}; got "
            f"{found or type(source).__name__}"
        )
    name = given.removeprefix(_FILE)
    if "://" in name or name.startswith("data:"):
        raise row.error(
            f"image {number} is {given!r:.100}; images are read from files and not from addresses"
        )
    path = _path(row, given)
    # A named pipe would be read without end.
    if not path.is_file():
        raise row.error(f"image {number}: there is no file {path}")
    try:
        size = path.stat().st_size
        if size > MAX_ROW:
            raise row.error(f"image {number}: {path} has {size} bytes; the limit is {MAX_ROW}")
        return path.read_bytes()
    except OSError as error:
        raise row.error(f"image {number}: {path} cannot be read: {error.strerror}") from error


def _given(source: object) -> object:
    """Return the bytes or the path of an image; None for a dict without either."""
    if isinstance(source, Mapping):
        return next((source[key] for key in _KEYS if source.get(key) is not None), None)
    return source


def _path(row: Row, given: str) -> Path:
    """Return the path of an image file that a row names."""
    return Path(row.path).parent / Path(local_path(given.removeprefix(_FILE)))


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, opaque).convert("RGB")
    if image.mode.startswith("I;16"):  # `convert` would cut off all above 255
        image = image.point(lambda value: value / 257 + 0.5, "L")
    return image.convert("RGB")


Grid = tuple[int, int, int]
"""The tokens of an image in time, height and width."""


def image_positions(
    ids: Sequence[int], image_token: int, grids: Sequence[Grid]
) -> npt.NDArray[np.int64]:
    """Return the positions [3, T] of the tokens of a prompt.

    Args:
        ids: T token ids, with one `image_token` for each token of the images.
        grids: the images in the order of their tokens.

    Raises:
        ValueError: the number of image tokens is not that of the images.
    """
    is_image = np.asarray(ids, dtype=np.int64) == image_token
    sizes = [t * h * w for t, h, w in grids]
    if int(is_image.sum()) != sum(sizes):
        raise ValueError(
            f"the prompt has {int(is_image.sum())} image tokens, and its images have {sum(sizes)}"
        )
    positions = np.zeros((3, len(ids)), dtype=np.int64)
    start = column = 0
    for (t, h, w), size in zip(grids, sizes, strict=True):
        first = column + int(np.argmax(is_image[column:]))
        text = first - column
        positions[:, column:first] = start + np.arange(text)
        places = np.indices((t, h, w)).reshape(3, size)
        positions[:, first : first + size] = start + text + places
        start += text + max(h, w)
        column = first + size
    positions[:, column:] = start + np.arange(len(ids) - column)
    return positions
