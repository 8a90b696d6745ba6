"""What a model of text and images needs beside its weights.

It needs image tokens, an image processor, and the images of the rows of a batch with the positions
of their tokens.

The image processor is the one of transformers that computes with Pillow, so that torchvision is not
needed. A model of text and images numbers its tokens in three dimensions: time, height and width
(arXiv 2409.12191, section 2.1). The tokens of a text have three equal numbers.

Shapes: B rows, T columns, n images of a row, N patches of them, D numbers of a patch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

from quadriga.config.schema import ModelConfig
from quadriga.errors import ConfigError, FieldError, ModelError
from quadriga.models.architectures import takes_images
from quadriga.models.folder import ModelSource, local_folder
from quadriga.protocol import DataProto, fields

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedConfig

PROCESSOR_FILE = "preprocessor_config.json"
_PROCESSOR_FILES = (PROCESSOR_FILE, "processor_config.json", "video_preprocessor_config.json")


class ImageProcessor(Protocol):
    """From images to patches. T × H × W patches become T · H · W / merge_size² tokens."""

    merge_size: int

    def __call__(self, images: Sequence[Image], *, return_tensors: str) -> Mapping[str, Tensor]:
        """Return `pixel_values` [patches of all images, numbers of a patch] float32 and
        `image_grid_thw` [images, 3] int64: T, H and W of each image."""
        ...

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Return the patches of an image of this size."""
        ...

    def to_json_string(self) -> str:
        """Return the settings."""
        ...


@dataclass(frozen=True)
class ImageTokens:
    """The tokens that stand for images in a sequence.

    Attributes:
        image: one for each part of an image, which the model replaces by the image's features.
        never_sampled: those that a response must not contain, because no image belongs to them.
        merge_size: see `ImageProcessor`.
    """

    image: int
    never_sampled: tuple[int, ...]
    merge_size: int


def image_tokens_of(config: PreTrainedConfig) -> ImageTokens | None:
    """Return the image tokens of a model; None for a model of text."""
    if not takes_images(config):
        return None
    image: int = config.image_token_id
    video: int = config.video_token_id
    merge: int = config.vision_config.spatial_merge_size
    return ImageTokens(image, tuple(sorted({image, video})), merge)


def image_tokens(model: ModelSource) -> ImageTokens | None:
    """Return the image tokens of the model in a folder; None for a model of text.

    Reads config.json only.

    Raises:
        ModelError: the folder is not a model folder.
    """
    from quadriga.models.loading import folder_config

    return image_tokens_of(folder_config(model))


def load_image_processor(model: ModelConfig) -> ImageProcessor:
    """Load the image processor of a model folder.

    Raises:
        ModelError: the folder has none, or it cannot be used.
        ConfigError: Pillow is not installed.
    """
    from transformers import AutoImageProcessor

    from quadriga.models.loading import model_errors
    from quadriga.observability.quiet import quiet_libraries

    if find_spec("PIL") is None:
        raise ConfigError(
            "a model that takes images needs Pillow, and it is not installed; install "
            "quadriga[vision]",
            key="model.path",
        )
    folder = local_folder(model.path)
    if not (folder / PROCESSOR_FILE).is_file():
        raise ModelError(
            f"model folder {folder} has no {PROCESSOR_FILE}, which a model that takes images needs"
        )
    with quiet_libraries(), model_errors(folder, "image processor"):
        processor: ImageProcessor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # none
            folder, trust_remote_code=model.trust_remote_code, backend="pil"
        )
    if not hasattr(processor, "merge_size"):
        raise ModelError(
            f"{type(processor).__name__}, the image processor in {folder}, has no merge_size; "
            "use the image processor of the model"
        )
    return processor


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy the settings of the image processor from a model folder, if it has some."""
    for name in _PROCESSOR_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


PIXELS, GRIDS = "pixel_values", "image_grid_thw"

ImageInputs = Mapping[str, Tensor]
"""The images of one row: `pixel_values` [N, D] float32, and `image_grid_thw` [n, 3] int64, the
patches of each image in time, height and width. Empty for a row without images."""


@dataclass(frozen=True)
class MultiModalRows:
    """The images and positions of B rows.

    Attributes:
        inputs: B entries.
        position_ids: [B, 3, T] int64.
    """

    inputs: tuple[ImageInputs, ...]
    position_ids: Tensor

    @classmethod
    def of(cls, data: DataProto) -> MultiModalRows | None:
        """Return the rows of a batch; None if it has no field `multi_modal_inputs`.

        Raises:
            FieldError: an entry is not `ImageInputs`, or the positions are not [B, 3, T].
        """
        if fields.MULTI_MODAL_INPUTS not in data.non_tensor_batch:
            return None
        entries = list(data.non_tensor_batch[fields.MULTI_MODAL_INPUTS])
        positions = data.batch[fields.POSITION_IDS]
        if positions.ndim != 3 or positions.shape[1] != 3:
            raise FieldError(
                f"a batch with the field {fields.MULTI_MODAL_INPUTS!r} needs "
                f"{fields.POSITION_IDS!r} of shape [B, 3, T]; got {list(positions.shape)}",
                field=fields.POSITION_IDS,
            )
        found = []
        for row, entry in enumerate(entries):
            if not _are_inputs(entry):
                raise FieldError(
                    f"row {row} of the field {fields.MULTI_MODAL_INPUTS!r} must be {{}} or a dict "
                    f"of the tensors {PIXELS!r} [N, D] and {GRIDS!r} [n, 3], got {entry!r:.120}",
                    field=fields.MULTI_MODAL_INPUTS,
                )
            found.append(entry)
        return cls(tuple(found), positions)

    def select(self, rows: Tensor) -> MultiModalRows:
        """Return `rows`, in their order."""
        kept = tuple(self.inputs[row] for row in rows.tolist())
        return MultiModalRows(kept, self.position_ids[rows])

    def followed_by(self, response_mask: Tensor) -> Tensor:
        """Return the positions [B, 3, P + R] of these prompts and of responses to them.

        `response_mask` is [B, R]. A response goes on behind the largest number of its prompt, and
        padding repeats the last position, as in a batch of text.
        """
        behind = self.position_ids.amax((1, 2)) + 1
        own = (response_mask.cumsum(-1) - 1).clamp(min=0) + behind[:, None]
        return torch.cat([self.position_ids, own[:, None].expand(-1, 3, -1)], dim=2)

    def joined(self) -> dict[str, Tensor]:
        """Return the images of all rows one after the other; {} if there are none."""
        some = [entry for entry in self.inputs if entry]
        return {key: torch.cat([e[key] for e in some]) for key in (PIXELS, GRIDS)} if some else {}

    def image_numbers(self) -> Tensor:
        """Return a number for each row, [B] int64. Rows with equal images have equal numbers."""
        numbers: dict[bytes, int] = {}
        digests = {id(entry): _digest(entry) for entry in self.inputs}
        found = [numbers.setdefault(digests[id(e)], len(numbers)) for e in self.inputs]
        return torch.tensor(found, dtype=torch.int64)


def check_images(
    ids: Tensor, mask: Tensor, images: MultiModalRows | None, tokens: ImageTokens | None
) -> None:
    """Check that each row has as many image tokens as its images.

    Args:
        ids, mask: [B, T], the mask 0 at padding.
        images: of the B rows; None: they have none.
        tokens: of the model; None: it takes text only.

    Raises:
        FieldError: a row has another number of them, or the model takes text only.
    """
    name = fields.MULTI_MODAL_INPUTS
    if tokens is None:
        if images is not None:
            raise FieldError(
                f"the rows have the field {name!r}, and the model takes text only; use a model "
                "that takes images",
                field=name,
            )
        return
    found = ((ids == tokens.image) & mask.bool()).sum(1).tolist()
    grids = [None] * len(ids) if images is None else [e.get(GRIDS) for e in images.inputs]
    if len(grids) != len(ids):
        raise FieldError(f"{len(ids)} rows have {len(grids)} entries in {name!r}", field=name)
    for row, (count, grid) in enumerate(zip(found, grids, strict=True)):
        patches = 0 if grid is None else int(grid.prod(1).sum())
        if count != patches // tokens.merge_size**2:
            raise FieldError(
                f"row {row} has {count} image tokens, and its images have {patches} patches, which "
                f"are {patches // tokens.merge_size**2} tokens; give the field {name!r} of the "
                "same rows",
                field=name,
            )


def _are_inputs(entry: object) -> TypeGuard[ImageInputs]:
    if not isinstance(entry, Mapping):
        return False
    if not entry:
        return True
    pixels, grids = entry.get(PIXELS), entry.get(GRIDS)
    return (
        isinstance(pixels, Tensor)
        and isinstance(grids, Tensor)
        and pixels.ndim == grids.ndim == 2
        and grids.shape[1] == 3
        and len(pixels) == int(grids.prod(1).sum())
    )


def _digest(entry: ImageInputs) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(entry):
        digest.update(repr((key, tuple(entry[key].shape))).encode())
        digest.update(entry[key].contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
