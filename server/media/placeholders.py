"""Placeholders of media in a prompt. The template's text has one placeholder per item; the token ids have one per encoder output.

An image may have thousands of placeholders. A run of equal placeholders is tokenised as one token, which is then repeated: a
special token has the same id everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, TypeAlias

import numpy as np

from runtime.api import MediaItem, beside_pictures
from server.media.part import Modality

Tensors: TypeAlias = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
_NAMES: Final = {"image": "images", "audio": "audio items", "video": "videos"}


class PlaceholderError(ValueError):
    """Error: the placeholders in a prompt do not match its media items."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Text that replaces the placeholder of one item. `text`: contains each run of encoder-output tokens as a single token.
    `runs`: the length of each run. `heard`: indices of the runs for a video's audio."""

    text: str
    runs: tuple[int, ...]
    heard: frozenset[int] = frozenset()

    @classmethod
    def of(cls, text: str, token: str, sound_token: str | None = None) -> Expansion:
        runs: list[int] = []
        heard: set[int] = set()

        def one(found: re.Match[str]) -> str:
            token = found[1]
            if token == sound_token:
                heard.add(len(runs))
            runs.append(len(found[0]) // len(token))
            return token

        tokens = "|".join(re.escape(each) for each in (token, sound_token) if each is not None)
        text = re.sub(rf"({tokens})(?:\1)*", one, text)
        return cls(text, tuple(runs), frozenset(heard))

    @property
    def num_outputs(self) -> int:
        return sum(self.runs)


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """Processed media item without its position in a prompt; see `MediaItem`. `sound`: tensors of a video's audio track, which
    becomes a separate item."""

    modality: Modality
    digest: bytes
    expansion: Expansion
    inputs: Tensors
    sound: Tensors | None = None

    @property
    def arrays(self) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        yield from self.inputs.values()
        yield from (self.sound or {}).values()

    @property
    def takers(self) -> list[Modality]:
        """Modality of each run in `expansion.runs`: "audio" for a video's audio, otherwise the item's modality."""
        return [
            "audio" if index in self.expansion.heard else self.modality for index in range(len(self.expansion.runs))
        ]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Media items of one prompt, in the request's order. `tokens`: by modality, the placeholder in a rendered template.
    `output_ids`: by modality, the token id that is replaced by encoder outputs. `layout`: function that formats a prompt without
    a template, or None. `tells_apart`: the model encodes audio differently if the prompt has images."""

    read: Sequence[ReadMedia]
    tokens: Mapping[Modality, str]
    output_ids: Mapping[Modality, int]
    layout: Callable[[str], str] | None = None
    tells_apart: bool = False

    def written(self, text: str, spelled: Callable[[str], str] = str) -> tuple[str, list[ReadMedia]]:
        """Replace each placeholder in `text` by its item's text. Return the new text, and the items in the order of their
        placeholders. `spelled`: converts a control token to its spelling in `text`.

        Raises PlaceholderError if the number of placeholders differs from the number of items."""
        left = {modality: [each for each in self.read if each.modality == modality] for modality in self.tokens}
        by_token = {spelled(token): modality for modality, token in self.tokens.items()}
        pieces = re.split(f"({'|'.join(map(re.escape, by_token))})", text)
        for modality, given in left.items():
            found = sum(by_token.get(piece) == modality for piece in pieces[1::2])
            if found != len(given):
                raise PlaceholderError(
                    f"the prompt has {found} placeholders ({self.tokens[modality]}) for {len(given)} {_NAMES[modality]}"
                )
        ordered: list[ReadMedia] = []
        for place in range(1, len(pieces), 2):
            ordered.append(left[by_token[pieces[place]]].pop(0))
            pieces[place] = spelled(ordered[-1].expansion.text)
        return "".join(pieces), ordered

    def placed(self, ids: Sequence[int], ordered: Sequence[ReadMedia]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Repeat the encoder-output tokens in `ids` to the full length of each run. Return the new token ids, and the items with
        their positions. `ids` and `ordered`: token ids and items of a text returned by `written`.

        Raises PlaceholderError if `ids` contains encoder-output tokens that belong to no item."""
        found = np.asarray(ids, dtype=np.int64)
        takers = [self.output_ids[taker] for each in ordered for taker in each.takers]
        places = np.flatnonzero(np.isin(found, list(self.output_ids.values())))
        if found[places].tolist() != takers:
            raise PlaceholderError("the prompt has placeholders without an image, audio or video")
        lengths = np.ones(len(found), dtype=np.int64)
        lengths[places] = [length for each in ordered for length in each.expansion.runs]
        starts = iter((np.cumsum(lengths) - lengths)[places].tolist())
        items = tuple(item for each in ordered for item in _placed(each, starts))
        return np.repeat(found, lengths).tolist(), beside_pictures(items) if self.tells_apart else items


def _placed(read: ReadMedia, starts: Iterator[int]) -> Iterator[MediaItem]:
    """Yield the item with its positions and, for a video with audio, the audio as a second item. `starts`: first position of
    each run."""
    seen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    heard: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for index, length in enumerate(read.expansion.runs):
        start = next(starts)
        (heard if index in read.expansion.heard else seen).append(np.arange(start, start + length))
    yield MediaItem(read.modality, read.digest, np.concatenate(seen).astype(np.int32), read.inputs)
    if read.sound is not None and heard:
        digest = sha256(read.digest + b"sound").digest()
        yield MediaItem("audio", digest, np.concatenate(heard).astype(np.int32), read.sound)
