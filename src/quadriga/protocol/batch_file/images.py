"""Images of Pillow, as their raw pixels.

No decoder of image files runs when a batch is loaded, so a few bytes cannot become a large image:
`nested` has every pixel. Each mode of Pillow is held without loss, which no image format does.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from quadriga.errors import DataError
from quadriga.protocol.batch_file.limits import (
    Json,
    MalformedError,
    brief,
    expect_int,
    expect_list,
    expect_text,
)
from quadriga.protocol.batch_file.plain_values import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

_CLASSES = {
    "Image": "PIL.Image",
    "AvifImageFile": "PIL.AvifImagePlugin",
    "BmpImageFile": "PIL.BmpImagePlugin",
    "DibImageFile": "PIL.BmpImagePlugin",
    "GifImageFile": "PIL.GifImagePlugin",
    "IcoImageFile": "PIL.IcoImagePlugin",
    "Jpeg2KImageFile": "PIL.Jpeg2KImagePlugin",
    "JpegImageFile": "PIL.JpegImagePlugin",
    "MpoImageFile": "PIL.MpoImagePlugin",
    "PcxImageFile": "PIL.PcxImagePlugin",
    "PngImageFile": "PIL.PngImagePlugin",
    "PpmImageFile": "PIL.PpmImagePlugin",
    "PsdImageFile": "PIL.PsdImagePlugin",
    "QoiImageFile": "PIL.QoiImagePlugin",
    "SgiImageFile": "PIL.SgiImagePlugin",
    "TgaImageFile": "PIL.TgaImagePlugin",
    "TiffImageFile": "PIL.TiffImagePlugin",
    "WebPImageFile": "PIL.WebPImagePlugin",
}
"""Class of an image → its module. An image that was opened has the class of its file format."""
_PIXEL_BYTES = {
    "L": 1, "P": 1, "LA": 2, "La": 2, "PA": 2, "I;16": 2, "I;16B": 2, "I;16L": 2,
    "RGB": 3, "YCbCr": 3, "LAB": 3, "HSV": 3,
    "RGBA": 4, "RGBa": 4, "RGBX": 4, "CMYK": 4, "I": 4, "F": 4,
}  # fmt: skip
_PALETTE_BYTES = {"RGB": 3, "RGBA": 4}
_MAX_SIDE = 2**31 - 1


class EncodedImage(NamedTuple):
    """An image without its pixels: class, mode and size, palette, and the values of Python."""

    form: Json
    pixels: bytes
    values: list[object]


def is_image(value: object) -> TypeGuard[Image]:
    """Return whether a value is an image. False if Pillow was not imported: no image exists."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def pixel_bytes(mode: str, width: int, height: int) -> int:
    """Return the length of the pixels. A row of mode 1 has 8 pixels per byte."""
    if mode == "1":
        return (width + 7) // 8 * height
    if mode not in _PIXEL_BYTES:
        raise MalformedError(f"no image mode {brief(mode)}")
    return width * height * _PIXEL_BYTES[mode]


def encode_image(image: Image) -> EncodedImage:
    """Return an image in parts. Raises `UnsupportedError` for one that would be altered."""
    name = type(image).__name__
    if _CLASSES.get(name) != type(image).__module__:
        raise UnsupportedError(f"a {type(image).__module__}.{name}")
    if getattr(image, "is_animated", False):
        raise UnsupportedError(f"a {name} of several frames (use image.copy() for the current one)")
    try:
        info, mode, size, _, pixels, *rest = image.__getstate__()
        palette = _encode_palette(image)
    except OSError as error:
        raise UnsupportedError(f"a {name} that cannot be read ({error})") from error
    if 0 in size or mode not in {"1", *_PIXEL_BYTES} or len(pixels) != pixel_bytes(mode, *size):
        raise UnsupportedError(f"a {name} of mode {mode} and size {size[0]} × {size[1]}")
    form: Json = [name, mode, size[0], size[1], palette]
    return EncodedImage(form, pixels, [info, *rest])


def _encode_palette(image: Image) -> Json:
    if image.mode not in ("P", "PA"):
        return None
    mode = image.im.getpalettemode()
    # Pillow stores a CMYK palette as RGB, so it would become another one.
    shown = mode if image.palette is None else image.palette.mode
    if mode not in _PALETTE_BYTES or shown != mode:
        raise UnsupportedError(f"an image with a palette of mode {shown}")
    return [mode, bytes(image.getpalette(None) or []).hex()]


def image_form(raw: Json) -> tuple[str, str, tuple[int, int], tuple[str, bytes] | None]:
    """Return class, mode, size and palette of an image, checked."""
    name, mode, width, height, palette = expect_list(raw, 5)
    kind, pixels = expect_text(name), expect_text(mode)
    if kind not in _CLASSES:
        raise MalformedError(f"no class of images {brief(kind)}")
    size = (expect_int(width, 1, _MAX_SIDE), expect_int(height, 1, _MAX_SIDE))
    if (palette is None) != (pixels not in ("P", "PA")):
        raise MalformedError(f"an image of mode {pixels} and a palette do not fit together")
    if palette is None:
        return kind, pixels, size, None
    colours, digits = (expect_text(part) for part in expect_list(palette, 2))
    data = bytes.fromhex(digits)
    width_of_colour = _PALETTE_BYTES.get(colours, 0)
    if not width_of_colour or len(data) % width_of_colour or len(data) > 256 * width_of_colour:
        raise MalformedError(f"a palette of {len(data)} bytes in mode {brief(colours)}")
    return kind, pixels, size, (colours, data)


def decode_image(raw: Json, pixels: bytes, values: list[object]) -> Image:
    """Return the image of its parts; `pixels` has the length of `pixel_bytes`."""
    name, mode, size, palette = image_form(raw)
    try:
        module = importlib.import_module(_CLASSES[name])
    except ImportError as error:
        raise DataError(f"the batch file has images; install Pillow to load it: {error}") from error
    kind: type[Image] = getattr(module, name)
    info, *rest = values
    _check_state(name, info, rest)
    image = kind.__new__(kind)
    image.__setstate__([info, mode, size, None, pixels, *rest])
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    return image


def _check_state(name: str, info: object, rest: list[object]) -> None:
    """Check what Pillow keeps besides the pixels: the file name, and the layers of a JPEG."""
    fits = type(info) is dict and all(type(key) is str or type(key) is int for key in info)
    if name == "Image":
        fits = fits and not rest
    elif name in ("JpegImageFile", "MpoImageFile"):
        fits = fits and len(rest) == 3 and type(rest[1]) is int and type(rest[2]) is list
    else:
        fits = fits and len(rest) == 1
    if not fits or (rest and type(rest[0]) not in (str, bytes)):
        raise MalformedError(f"an image of class {name} with other attributes")
