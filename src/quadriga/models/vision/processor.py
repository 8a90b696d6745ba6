"""What a model of text and images needs beside its weights: image tokens and an image processor.

The image processor is the one of transformers that computes with Pillow, so that torchvision is not
needed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quadriga.errors import ConfigError, ModelError
from quadriga.models.architectures import takes_images
from quadriga.models.folder import check_model_folder, local_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from PIL.Image import Image
    from torch import Tensor
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


def image_tokens(path: str | Path, *, trust_remote_code: bool = False) -> ImageTokens | None:
    """Return the image tokens of the model in a folder; None for a model of text.

    Reads config.json only.

    Raises:
        ModelError: the folder is not a model folder.
    """
    from quadriga.models.loading import read_config

    folder = local_folder(path, weights=False)
    check_model_folder(folder, weights=False, tokenizer=False, trust_remote_code=trust_remote_code)
    return image_tokens_of(read_config(folder, trust_remote_code=trust_remote_code))


def load_image_processor(path: str | Path, *, trust_remote_code: bool = False) -> ImageProcessor:
    """Load the image processor of a model folder.

    Raises:
        ModelError: the folder has none, or it cannot be used.
        ConfigError: Pillow is not installed.
    """
    from transformers import AutoImageProcessor

    from quadriga.models.loading import model_errors
    from quadriga.observability.quiet import quiet_libraries

    check_pillow()
    folder = local_folder(path)
    if not (folder / PROCESSOR_FILE).is_file():
        raise ModelError(
            f"model folder {folder} has no {PROCESSOR_FILE}, which a model that takes images needs",
            path=str(folder),
        )
    with quiet_libraries(), model_errors(folder, "image processor"):
        processor: ImageProcessor = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # none
            folder, trust_remote_code=trust_remote_code, backend="pil"
        )
    if not hasattr(processor, "merge_size"):
        raise ModelError(
            f"{type(processor).__name__}, the image processor in {folder}, has no merge_size; "
            "use the image processor of the model",
            path=str(folder),
        )
    return processor


def copy_processor(source: str | Path, folder: Path) -> None:
    """Copy the settings of the image processor from a model folder, if it has some."""
    for name in _PROCESSOR_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)


def check_pillow() -> None:
    """Raise `ConfigError` if Pillow, which reads images, is not installed."""
    from importlib.util import find_spec

    if find_spec("PIL") is None:
        raise ConfigError(
            "a model that takes images needs Pillow, and it is not installed; install "
            "quadriga[vision]",
            key="model.path",
        )
