"""The position of each token of a prompt in time, height and width.

The numbers are those of Qwen2-VL (arXiv 2409.12191, section 2.1, multimodal rotary position
embedding): a token of text has one number three times, and a token of an image has the numbers of
its place in the image. The text after an image goes on behind its largest number.

One token of text, an image of 2 × 3 tokens, two tokens of text:

    token     t   i i i i i i   t t
    time      0   1 1 1 1 1 1   4 5
    height    0   1 1 1 2 2 2   4 5
    width     0   1 2 3 1 2 3   4 5
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Grid = tuple[int, int, int]
"""The tokens of an image in time, height and width."""


def token_grids(patch_grids: Sequence[Sequence[int]], merge_size: int) -> list[Grid]:
    """Return the tokens of images of so many patches: `merge_size`² patches become one token."""
    return [(t, h // merge_size, w // merge_size) for t, h, w in patch_grids]


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
