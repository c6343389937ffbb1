"""Where a part's bytes are: in the request, or in a file below the one folder that may be read."""

from __future__ import annotations

import base64
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.errors import InvalidMedia
from server.media import source as module
from server.media.fetch import AllowedHosts, Fetcher
from server.media.part import Base64, Given, MediaPart, Url, file_part
from server.media.source import Sources

LIMIT = 100


def sources(folder=None) -> Sources:
    return Sources(Fetcher(AllowedHosts(()), max_bytes=LIMIT, timeout_s=1), folder and str(folder), LIMIT)


def part(source) -> MediaPart:
    return MediaPart("image", source, "where", "image_url")


def read(url: str, folder=None) -> bytes:
    return sources(folder).read(part(Url(url)))


@pytest.mark.parametrize(("url", "expected"), [
    ("data:image/png;base64,YWJj", b"abc"),
    ("data:;base64,YWJj", b"abc"),
    ("DATA:image/png;charset=x;BASE64,YWJj", b"abc"),
    ("data:image/png;base64,YW\nJj", b"abc"),
    ("data:text/plain,a%20b", b"a b"), ("data:," + "%61" * LIMIT, b"a" * LIMIT),
])  # fmt: skip
def test_data_urls(url, expected):
    assert read(url) == expected


@pytest.mark.parametrize(("url", "reason"), [
    ("data:image/png;base64,", "is empty"), ("data:,", "is empty"), ("data:image/png;base64", "no comma"),
    ("data:image/png;base64,YW$j", "not base64"), ("data:image/png;base64,YWJ", "not base64"),
    ("data:image/png;base64,ü", "not base64"),
    ("data:image/png;base64," + "A" * 400, "more than 100 bytes"), ("data:," + "a" * 400, "more than 100 bytes"),
    ("data:," + "a" * 101, "more than 100 bytes"), ("data:," + "%61" * 101, "more than 100 bytes"),
    ("data:,é", "invalid characters"), ("data:,\ud800", "invalid characters"),
    ("", "begin with data:"), ("YWJj", "begin with data:"), ("ftp://a/b", "begin with data:"), ("javascript:x", "begin with data:"),
])  # fmt: skip
def test_urls_without_data(url, reason):
    with pytest.raises(InvalidMedia, match=reason):
        read(url)


@given(
    data=st.binary(max_size=60),
    put=st.sampled_from(["", "=", "==", "A", "A=", "$", " ", "\n", "\t", "é"]),
    where=st.integers(0, 90),
)
def test_base64_is_read_in_pieces_as_in_one(data, put, where):
    text = base64.b64encode(data).decode()
    text = text[:where] + put + text[where:]
    plain = "".join(text.split()) if " " in text or "\n" in text else text
    try:
        expected = b"" if len(plain) % 4 else base64.b64decode(plain, validate=True)
    except ValueError:
        expected = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CHARS", 8)
        if expected:
            assert sources().read(part(Base64(text))) == expected
        else:
            with pytest.raises(InvalidMedia, match=r"not base64|is empty"):
                sources().read(part(Base64(text)))


def test_base64_and_bytes():
    assert sources().read(part(Base64("YWJj"))) == b"abc"
    assert sources().read(part(Given(b"abc"))) == b"abc"
    for source in (Base64(base64.b64encode(bytes(101)).decode() + "AAAA"), Given(bytes(101))):
        with pytest.raises(InvalidMedia, match="more than 100 bytes"):
            sources().read(part(source))


@pytest.mark.parametrize(("url", "modality"), [
    ("data:image/png;base64,YQ==", "image"), ("data:audio/wav;base64,YQ==", "audio"), ("DATA:Video/MP4;base64,YQ==", "video"),
])  # fmt: skip
def test_files_say_what_they_are(url, modality):
    assert file_part(url, "x", "file").modality == modality


@pytest.mark.parametrize(
    "url", ["data:application/pdf;base64,YQ==", "data:text/html,x", "YQ==", "data:;base64,YQ==", "https://a/b"]
)
def test_files_that_nothing_here_reads(url):
    with pytest.raises(InvalidMedia):
        file_part(url, "x", "file")


# --- files of this machine ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A folder that may be read, with a file, and one beside it."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a b.png").write_bytes(b"picture")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_bytes(b"secret")
    (tmp_path / "open2").mkdir()
    (tmp_path / "open2" / "x").write_bytes(b"neighbour")
    return tmp_path


def test_a_file_below_the_folder(tree):
    assert read(f"file://{tree}/open/a%20b.png", tree / "open") == b"picture"
    assert read(f"file://localhost{tree}/open/../open/a%20b.png", tree / "open") == b"picture"
    (tree / "open" / "link").symlink_to(tree / "open" / "a b.png")
    assert read(f"file://{tree}/open/link", tree / "open") == b"picture"
    (tree / "way").symlink_to(tree / "open")
    assert read(f"file://{tree}/way/a%20b.png", tree / "way") == b"picture"


def test_no_file_without_a_folder(tree):
    with pytest.raises(InvalidMedia, match="--allowed-local-media-path"):
        read(f"file://{tree}/open/a%20b.png")


def test_nothing_but_files_below_the_folder_and_one_answer_for_all(tree):
    folder = tree / "open"
    (folder / "link").symlink_to(tree / "secret" / "key")
    (folder / "way").symlink_to(tree / "secret")
    (folder / "round").symlink_to(folder / "round")
    os.mkfifo(folder / "pipe")
    (folder / "deep").mkdir()
    hidden = [
        "secret/key", "open/../secret/key", "open/%2e%2e/secret/key", "open2/x", "open/link", "open/way/key", "open/round",
        "open/pipe", "open/deep", "open", "open/nothing",
    ]  # fmt: skip
    messages = set()
    for name in hidden:
        with pytest.raises(InvalidMedia) as caught:
            read(f"file://{tree}/{name}", folder)
        messages.add(caught.value.message)
    with pytest.raises(InvalidMedia) as caught:
        read("file:///dev/zero", folder)
    messages.add(caught.value.message)
    assert len(messages) == 1


@pytest.mark.parametrize("url", [
    "file://host/a", "file://..%2fa", "file:///a%00b", "file:a", "file:///" + "a" * 5000,
    "file://[", "file://℀/a", "file:///\ud800",
])  # fmt: skip
def test_file_urls_that_are_none(tree, url):
    with pytest.raises(InvalidMedia):
        read(url, tree / "open")


def test_a_folder_that_becomes_a_link_between_look_and_opening(tree, monkeypatch):
    (tree / "open" / "deep").mkdir()
    (tree / "open" / "deep" / "key").write_bytes(b"mine")
    opening = os.open

    def swapped(path, flags):
        (tree / "open" / "deep").rename(tree / "open" / "old")
        (tree / "open" / "deep").symlink_to(tree / "secret")
        return opening(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(InvalidMedia, match="no such file"):
        read(f"file://{tree}/open/deep/key", tree / "open")


def test_a_file_that_is_too_large(tree):
    (tree / "open" / "big").write_bytes(bytes(LIMIT + 1))
    with pytest.raises(InvalidMedia, match="more than 100 bytes"):
        read(f"file://{tree}/open/big", tree / "open")
