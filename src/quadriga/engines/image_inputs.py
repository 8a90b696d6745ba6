"""The arguments of a model of text and images for rows with their padding at the end.

Shapes: B rows, S = P + R columns, L tokens of the longest row.

The image encoder computes in every pass, with an empty image if no row has one. Its layers are FSDP
units, whose parameters all ranks gather together: a rank without images that left them out would
leave the others waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from quadriga.engines.base import Batch
from quadriga.engines.micro_batches import check_fields
from quadriga.models.vision.processor import image_tokens_of
from quadriga.models.vision.rows import GRIDS, PIXELS, MultiModalRows, check_images
from quadriga.protocol import fields

# Two rows of text, L = 3, and the row of the empty image, which consists of one token (i):
#
#   input_ids     11 12 21        position_ids   0 1 2     of each dimension
#                 13 14  0                       0 1 2
#                  i  0  0                       0 0 0
#
# No target is in the last row, so it changes neither an output nor a gradient.


Images = MultiModalRows | None


def check_batch(batch: Batch, images: Images, config: PreTrainedConfig) -> None:
    """Raise `FieldError` if a batch lacks a field, or its rows and images do not fit."""
    check_fields(batch)
    ids, mask = batch[fields.INPUT_IDS], batch[fields.ATTENTION_MASK]
    check_images(ids, mask, images, image_tokens_of(config))


def images_of(images: Images, rows: Tensor | None) -> Images:
    """Return the images of a micro-batch; None for one without rows."""
    return None if images is None or rows is None else images.select(rows)


def image_arguments(
    config: PreTrainedConfig,
    input_ids: Tensor,
    attention_mask: Tensor,
    images: MultiModalRows | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the arguments of the model's `forward`, on `device`.

    Args:
        input_ids: [B, L], rows that begin in column 0.
        attention_mask: [B, S], the tokens among the columns of the batch.
        images: of the rows, with as many tokens as the rows have; None: they have none.
    """
    tokens = image_tokens_of(config)
    assert tokens is not None
    positions = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
    joined: dict[str, Tensor] = {}
    if images is not None:
        positions, joined = _left_aligned(images.position_ids, attention_mask), images.joined()
    # On the meta device, where memory is planned, the encoder cannot compute: it reads numbers.
    if not joined and device.type != "meta":
        joined = _empty_image(config, tokens.merge_size)
        row = torch.zeros_like(input_ids[:1])
        row[0, 0] = tokens.image
        input_ids = torch.cat([input_ids, row])
        positions = torch.cat([positions, torch.zeros_like(positions[:, :1])], dim=1)
    arguments = {"input_ids": input_ids, "position_ids": positions, **joined}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arguments.items()}


def _left_aligned(positions: Tensor, attention_mask: Tensor) -> Tensor:
    """Move positions [B, 3, S] to where `parallel.aligned_rows` moves the tokens: [3, B, L]."""
    valid = attention_mask.bool()
    longest = max(int(valid.sum(1).max()), 1) if len(valid) else 1
    row, column = valid.nonzero(as_tuple=True)
    place = (valid.long().cumsum(1) - 1)[row, column]
    aligned = positions.new_zeros(3, len(valid), longest)
    aligned[:, row, place] = positions[row, :, column].T
    return aligned


def _empty_image(config: PreTrainedConfig, merge_size: int) -> dict[str, Tensor]:
    """Return an image of one token, all of whose numbers are 0."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    numbers = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        PIXELS: torch.zeros(merge_size**2, numbers),
        GRIDS: torch.tensor([[1, merge_size, merge_size]]),
    }
