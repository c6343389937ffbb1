"""Split of a window's tokens into segments at timestamp tokens, as in Whisper's and transformers' long-form decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.models.speech import TIMESTAMP_S


class SegmentPiece(NamedTuple):
    """Tokens of one segment, timestamps included. `start` and `end`: seconds from the start of its window."""

    start: float
    end: float
    ids: Sequence[int]


def split(
    ids: Sequence[int], timestamp_begin: int, num_frames: int, frames_per_timestamp: int = 2
) -> tuple[list[SegmentPiece], int]:
    """Split a window into segments. Return the segments, and the number of frames that they cover. The next window begins there.

    `ids`: tokens of the window, without the end token. `num_frames`: frames of audio in the window. Two consecutive timestamps
    end a segment. Tokens after the last such pair belong to the next window, unless a single timestamp ends them."""
    is_stamp = [id >= timestamp_begin for id in ids]
    ends_once = is_stamp[-2:] == [False, True]
    places = [place + 1 for place in range(len(ids) - 1) if is_stamp[place] and is_stamp[place + 1]]

    def seconds(id: int) -> float:
        return (id - timestamp_begin) * TIMESTAMP_S

    if not places:
        stamps = [id for id, stamp in zip(ids, is_stamp, strict=True) if stamp]
        last = num_frames // frames_per_timestamp
        if stamps and stamps[-1] != timestamp_begin:
            last = stamps[-1] - timestamp_begin
        return [SegmentPiece(0.0, last * TIMESTAMP_S, ids)], num_frames
    if ends_once:
        places.append(len(ids))
    else:
        places[-1] += 1  # the last segment keeps the timestamp that the next window begins at
    pieces: list[SegmentPiece] = []
    before = 0
    for number, place in enumerate(places):
        piece = ids[before:place]
        end = piece[-1] if number < len(places) - 1 or ends_once else piece[-2]
        pieces.append(SegmentPiece(seconds(piece[0]), seconds(end), piece))
        before = place
    if ends_once:
        return pieces, num_frames
    return pieces, (ids[before - 2] - timestamp_begin) * frames_per_timestamp


def tokens_before(segments: Sequence[Sequence[int]], timestamp_begin: int, limit: int) -> list[int]:
    """Return the last `limit` tokens of `segments`, for the next window's prompt. If they end with two timestamps, drop the
    second."""
    ids = [id for segment in segments for id in segment]
    if len(ids) > 1 and ids[-1] >= timestamp_begin and ids[-2] >= timestamp_begin:
        ids.pop()
    return ids[-limit:]
