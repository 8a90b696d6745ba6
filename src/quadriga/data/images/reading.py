"""The images of a row: bytes, files, or dicts that hold one of the two.

A row of a parquet file holds images as datasets of the hub do, `{"bytes": …, "path": …}`. A row of
a JSON-lines file names files, relative to the folder of the JSON-lines file.

A file of kilobytes can stand for an image of gigabytes, so the size that its header announces is
checked before it is decoded. Only formats that need no other program are decoded.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.config.paths import expand_home
from quadriga.data.rows import MAX_ROW, Row, read_pieces

if TYPE_CHECKING:
    from PIL.Image import Image

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


def image_files(data_file: Path, image_key: str) -> Iterator[Path]:
    """Yield the image files that the rows of a data file name, in their order, missing ones too.

    Raises:
        DataError: the data file cannot be read, or a row has no list of images.
    """
    for piece in read_pieces(data_file):
        for row in piece.rows:
            for source in images_of(row, image_key):
                given = _given(source)
                if isinstance(given, str):
                    yield _path(row, given)


def image_stamp(data_file: Path, image_key: str) -> str:
    """Return a digest of the sizes and times of all files that `image_files` yields.

    Raises:
        DataError: as `image_files`.
    """
    digest = hashlib.sha256()
    for path in image_files(data_file, image_key):
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
    return Path(row.path).parent / Path(expand_home(given.removeprefix(_FILE)))


def _rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        return PIL.Image.alpha_composite(white, opaque).convert("RGB")
    if image.mode.startswith("I;16"):  # `convert` would cut off all above 255
        image = image.point(lambda value: value / 257 + 0.5, "L")
    return image.convert("RGB")
