"""Subtitle formats of a transcript: SubRip (.srt) and WebVTT (.vtt)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.generate.speech.request import Segment


def srt(segments: Iterable[Segment]) -> str:
    blocks = (
        f"{number}\n{_time(start, ',')} --> {_time(end, ',')}\n{text}\n"
        for number, (start, end, text) in enumerate(_cues(segments), 1)
    )
    return "\n".join(blocks)


def vtt(segments: Iterable[Segment]) -> str:
    cues = (f"{_time(start, '.')} --> {_time(end, '.')}\n{_escaped(text)}\n" for start, end, text in _cues(segments))
    return "\n".join(["WEBVTT\n", *cues])


def _cues(segments: Iterable[Segment]) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, text) of each segment with text. "-->" is replaced, since subtitle parsers would read it as a time."""
    for segment in segments:
        text = " ".join(segment.text.split()).replace("-->", "->")
        if text:
            yield segment.start, max(segment.start, segment.end), text


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
