"""Pictures of files: hostile ones are refused before they are unpacked, odd ones become what a person would see."""

from __future__ import annotations

import contextlib
import io
import threading

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from server.http.errors import InvalidMedia
from server.media.images import MAX_SIDE, of_array, read_image
from tests.server.media.pictures import drawn, png, stored

LIMIT = 1_000_000
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\n"
JPEG = stored(drawn(), "JPEG")
WEBP = stored(drawn(), "WEBP")
PNG = stored(drawn())

HOSTILE = {
    "a bomb of 100 megapixels": (png(10_000, 10_000), "pixels"),
    "one of 900 megapixels": (png(30_000, 30_000), "pixels"),
    "a side of four thousand million": (png(2**32 - 1, 1), "pixels|broken|not a readable image"),
    "a thin one, longer than any": (png(MAX_SIDE + 1, 1), "a side are read"),
    "no width": (png(0, 5), "is empty|broken|not a readable image"),
    "no height": (png(5, 0), "is empty|broken|not a readable image"),
    "a head without rows": (png(20, 20), "broken"),
    "a JPEG cut off": (JPEG[: len(JPEG) // 2], "broken"),
    "a PNG cut off": (PNG[: len(PNG) // 2], "broken"),
    "a WebP cut off": (WEBP[: len(WEBP) // 2], "broken|not a readable image|no frames"),
    "a head alone": (PNG[:20], "broken|not a readable image|no frames"),
    "wrong checksums": (PNG.replace(b"IDAT", b"IDAZ"), "broken|not a readable image|no frames"),
    "text": (b"hello, I am a picture", "not a readable image"),
    "zeros": (bytes(1000), "not a readable image"),
    "SVG, which can name other files": (SVG, "not a readable image"),
    "PostScript, which runs": (POSTSCRIPT, "not a readable image"),
    "a format of Pillow's that nobody sends": (stored(drawn(), "PPM"), "not a readable image"),
}


def test_what_is_packed_well_is_unpacked_in_small_pieces(monkeypatch):
    """Pillow's decoders let no other thread move."""
    sizes = []
    feed = PngImagePlugin.PngImageFile.load_read
    monkeypatch.setattr(
        PngImagePlugin.PngImageFile, "load_read", lambda self, size: sizes.append(size) or feed(self, size)
    )
    assert read_image(stored(drawn(200, 200)), "where", max_pixels=LIMIT).size == (200, 200)
    assert len(sizes) > 10
    assert max(sizes) <= 4096


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_reason(name):
    data, reason = HOSTILE[name]
    with pytest.raises(InvalidMedia, match=reason) as caught:
        read_image(data, "messages[0]", max_pixels=LIMIT)
    assert caught.value.param == "messages[0]"
    assert "/etc" not in caught.value.message


def test_too_large_a_picture_is_never_unpacked(monkeypatch):
    loaded = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: loaded.append(self.size))
    with pytest.raises(InvalidMedia, match="100 x 100 pixels"):
        read_image(stored(drawn(100, 100)), "x", max_pixels=100 * 100 - 1)
    assert not loaded
    with contextlib.suppress(InvalidMedia):  # nothing is loaded now
        read_image(stored(drawn(100, 100)), "x", max_pixels=100 * 100)
    assert loaded


def one_colour(mode: str, colour, size=(6, 4)) -> Image.Image:
    return Image.new(mode, size, colour)


def palette() -> Image.Image:
    picture = one_colour("P", 1)
    picture.putpalette([0, 0, 0, 10, 200, 30])
    return picture


ODD = {
    "grey": (stored(one_colour("L", 77)), (77, 77, 77)),
    "bits": (stored(one_colour("1", 1)), (255, 255, 255)),
    "sixteen bits": (stored(Image.fromarray(np.full((4, 6), 0x8000, dtype=np.uint16))), (128, 128, 128)),
    "a palette": (stored(palette()), (10, 200, 30)),
    "a palette with a clear colour": (stored(palette(), transparency=1), (255, 255, 255)),
    "half clear, before white": (stored(one_colour("RGBA", (0, 0, 0, 128))), (127, 127, 127)),
    "quite clear": (stored(one_colour("RGBA", (9, 9, 9, 0))), (255, 255, 255)),
    "grey and clear": (stored(one_colour("LA", (9, 0))), (255, 255, 255)),
    "CMYK": (stored(one_colour("CMYK", (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_ones_are_what_a_person_would_see(name):
    data, colour = ODD[name]
    picture = read_image(data, "x", max_pixels=LIMIT)
    assert (picture.mode, picture.size) == ("RGB", (6, 4))
    assert set(picture.get_flattened_data()) == {colour}


def test_inks_of_a_jpeg_are_the_colours_that_they_print():
    """Adobe's, which are stored the other way round."""
    data = stored(one_colour("CMYK", (0, 255, 255, 0), (16, 16)), "JPEG", quality=95)
    assert b"Adobe" in data
    picture = np.asarray(read_image(data, "x", max_pixels=LIMIT)).astype(int)
    assert abs(picture - [255, 0, 0]).max() < 12


def test_the_ground_can_be_another():
    clear = stored(one_colour("RGBA", (9, 9, 9, 0)))
    picture = read_image(clear, "x", max_pixels=LIMIT, background=[1, 2, 3])
    assert picture.getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize(("orientation", "turned"), [
    (1, lambda rows: rows), (2, np.fliplr), (3, lambda rows: np.rot90(rows, 2)), (4, np.flipud),
    (5, lambda rows: rows.transpose(1, 0, 2)), (6, lambda rows: np.rot90(rows, -1)),
    (7, lambda rows: np.rot90(rows, 2).transpose(1, 0, 2)), (8, np.rot90),
])  # fmt: skip
def test_a_turned_camera_makes_no_turned_picture(orientation, turned):
    picture, exif = drawn(), Image.Exif()
    exif[0x0112] = orientation
    found = read_image(stored(picture, exif=exif.tobytes()), "x", max_pixels=LIMIT)
    assert np.array_equal(np.asarray(found), turned(np.asarray(picture)))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_counts(format):
    frames = [one_colour("RGB", colour, (8, 8)) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if format == "WEBP" else {}
    data = stored(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert set(read_image(data, "x", max_pixels=LIMIT).get_flattened_data()) == {(255, 0, 0)}


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_that_people_send(format):
    assert read_image(stored(drawn(), format), "x", max_pixels=LIMIT).size == (24, 16)


def test_pictures_are_read_on_several_threads_at_once():
    expected = np.asarray(drawn(64, 64))
    data, found, start = stored(drawn(64, 64)), [], threading.Barrier(4)

    def read() -> None:
        start.wait()
        found.append(np.asarray(read_image(data, "x", max_pixels=LIMIT)))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(np.array_equal(one, expected) for one in found)


@pytest.mark.parametrize("shape", [(4,), (4, 5, 2), (1, 4, 5, 3)])
def test_arrays_that_are_no_pictures(shape):
    with pytest.raises(InvalidMedia, match="is not an image"):
        of_array(np.zeros(shape, dtype=np.uint8), "x")
    with pytest.raises(InvalidMedia, match="float32"):
        of_array(np.zeros((4, 5, 3), dtype=np.float32), "x")
