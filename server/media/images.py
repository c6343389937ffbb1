"""Image decoder: converts an image file to an upright RGB image of Pillow.

The size in the file's header is checked first, so an oversized file is never decompressed. Only the first frame of an animation
is used. Transparent areas are blended with white, or with `background`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from server.http.errors import InvalidMedia, MediaNotInstalled, clip

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow reads more, for which other programs run, or which nobody sends.
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_MODULES: Final = ("Png", "Jpeg", "WebP", "Gif", "Bmp", "Tiff", "Avif")
MAX_SIDE: Final = 65_536
WHITE: Final = (255, 255, 255)
_CLEAR: Final = ("RGBA", "RGBa", "LA", "La", "PA")  # modes that have an alpha channel
_DEEP: Final = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # of 16 bits


_PIECE_BYTES: Final = 4096  # of a file, unpacked without leave for other threads: up to 4 MB, 2 ms


def read_image(data: bytes, where: str, *, max_pixels: int, background: Sequence[int] = WHITE) -> Image:
    """Decode an image file to an RGB image. `background`: RGB colour behind transparent areas. Raises InvalidMedia."""
    with _pillow(where) as pillow:
        picture = pillow.Image.open(BytesIO(data), formats=FORMATS)
        check_size(picture.size, max_pixels, where)
        picture.decodermaxblock = _PIECE_BYTES
        picture.load()
    return rgb(picture, where, background)


def check_size(size: tuple[int, int], max_pixels: int, where: str) -> None:
    """Raise InvalidMedia for the field `where` if the image size (width, height) is empty or exceeds the limits."""
    width, height = size
    if width < 1 or height < 1:
        raise InvalidMedia(f"it is {width} x {height} pixels: the image is empty", where)
    if width * height > max_pixels or max(width, height) > MAX_SIDE:
        raise InvalidMedia(
            f"it is {width} x {height} pixels; at most {max_pixels} in all and {MAX_SIDE} a side are read", where
        )


def rgb(picture: Image, where: str, background: Sequence[int] = WHITE) -> Image:
    """Convert a Pillow image to RGB, rotated as its EXIF data require. `background`: see `read_image`. Raises InvalidMedia."""
    with _pillow(where) as pillow:
        turned: Image | None = pillow.ImageOps.exif_transpose(picture)
        picture = picture if turned is None else turned
        if picture.mode == "RGB" and "transparency" not in picture.info:
            return picture
        if picture.mode in _DEEP:
            return picture.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
        if picture.mode not in _CLEAR and "transparency" not in picture.info:
            return picture.convert("RGB")
        clear = picture.convert("RGBA")
        ground: Image = pillow.Image.new("RGB", clear.size, tuple(background))
        ground.paste(clear, mask=clear.getchannel("A"))
        return ground


class _pillow:
    """Context manager that imports Pillow, and converts each error of Pillow about a broken file to InvalidMedia."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> Any:
        try:
            import PIL
            import PIL.Image
            import PIL.ImageOps

            for name in _MODULES:
                import_module(f"PIL.{name}ImagePlugin")
        except ImportError:
            raise MediaNotInstalled("Pillow is not installed: pip install 'oneloop[media]'", self._where) from None
        self._module = PIL
        return PIL

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InvalidMedia | MemoryError) or not isinstance(error, Exception):
            return
        image = self._module.Image
        if isinstance(error, image.DecompressionBombError | image.DecompressionBombWarning):
            raise InvalidMedia("it has far too many pixels", self._where) from None
        if isinstance(error, image.UnidentifiedImageError):
            raise InvalidMedia(f"it is not a readable image. Supported: {', '.join(FORMATS)}", self._where) from None
        raise InvalidMedia(f"the image is broken: {clip(error)}", self._where) from None


def of_array(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], where: str) -> Image:
    """Convert a uint8 array [H, W], [H, W, 3] or [H, W, 4] to a Pillow image. Raises InvalidMedia for the field `where`."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InvalidMedia(
            f"an array of {array.dtype} {list(array.shape)} is not an image: expected uint8 [H, W], [H, W, 3] or [H, W, 4]",
            where,
        )
    with _pillow(where) as pillow:
        made: Image = pillow.Image.fromarray(array)
        return made
