"""Counting the values of a JSON text without building any: what decoding it would cost, before it is done.

A decoder is one call that keeps the interpreter to itself, and a million empty objects in a body of four megabytes take it longer
than sixteen megabytes of text; so does a name of megabytes, which an error then repeats. This takes about a third of a millisecond
per megabyte, in pieces between which other threads move."""

from __future__ import annotations

from enum import Enum, auto

PIECE_BYTES = 64 * 1024
INSIDE_VALUES = 4  # an object or a list takes a decoder as long as so many token ids
NAME_VALUES = 16  # and so does a name in an object


class Excess(Enum):
    VALUES = auto()
    NAME = auto()


def excess(text: bytes | bytearray, max_values: int, max_name_bytes: int) -> Excess | None:
    """What a JSON `text` has too much of: values (see above), or bytes of one name, give or take a piece. Of a text that is not
    JSON anything may be said: the decoder refuses it."""
    count = 0
    in_string, cut_escape = False, b""
    string_bytes = 0  # of the string that a piece begins in
    may_be_name = False  # a long string has ended, and nothing came behind it yet
    for start in range(0, len(text), PIECE_BYTES):
        piece = cut_escape + text[start : start + PIECE_BYTES]
        cut_escape = b""
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"")
            if piece.endswith(b"\\"):
                piece, cut_escape = piece[:-1], b"\\"
            piece = piece.replace(b'\\"', b"")
        strings_and_rest = piece.split(b'"')
        if in_string:
            is_inside = len(strings_and_rest) == 1
            string_bytes += PIECE_BYTES if is_inside else len(strings_and_rest[0])
            may_be_name = not is_inside and string_bytes > max_name_bytes
        if may_be_name and len(strings_and_rest) > in_string and (behind := strings_and_rest[in_string].lstrip()):
            if behind.startswith(b":"):
                return Excess.NAME
            may_be_name = False
        outside = b"".join(strings_and_rest[in_string::2])
        if len(strings_and_rest) > 1:
            string_bytes = len(strings_and_rest[-1])
        in_string ^= not len(strings_and_rest) % 2
        count += outside.count(b",") + INSIDE_VALUES * (outside.count(b"{") + outside.count(b"["))
        count += NAME_VALUES * outside.count(b":")
        if count > max_values:
            return Excess.VALUES
    return None
