"""From `<image>` in the text of a prompt to image tokens, patches and positions.

"<image>What is it?" and an image of 28 × 56 pixels

text of the template   … <|vision_start|><|image_pad|><|vision_end|>What is it? …
token ids              … one <|image_pad|> for each token of the image …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quadriga.data.chat import TemplateChat
from quadriga.data.images.positions import image_positions, token_grids
from quadriga.data.images.reading import images_of, read_image
from quadriga.data.rows import Row

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
        grids = inputs[GRIDS].tolist() if inputs else []
        try:
            return image_positions(
                self.ids, self.rules.image_token, token_grids(grids, self.rules.merge_size)
            )
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
