"""Placeholders: what stands in a prompt for a picture: once in the text that a template writes, and once for each of its encoder's
outputs in the ids.

A run of placeholders is tokenised as one and repeated afterwards: a special token is one wherever it stands, and a picture may have
thousands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from runtime.api import MediaItem, beside_pictures
from server.media.part import Modality

_NAMES: Final = {"image": "pictures", "audio": "sounds", "video": "videos"}


class PlaceholderError(ValueError):
    """A prompt that has not one placeholder for each of what was given."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """What stands for one item in a prompt: `text`, in which a run of the token that takes the encoder's outputs is one such token;
    and the lengths of these runs."""

    text: str
    runs: tuple[int, ...]

    @classmethod
    def of(cls, text: str, token: str) -> Expansion:
        runs: list[int] = []

        def one(found: re.Match[str]) -> str:
            runs.append(len(found[0]) // len(token))
            return token

        text = re.sub(f"(?:{re.escape(token)})+", one, text)
        return cls(text, tuple(runs))

    @property
    def num_outputs(self) -> int:
        return sum(self.runs)


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """One picture, sound or video, processed: an item but for its place. See `MediaItem`."""

    modality: Modality
    digest: bytes
    expansion: Expansion
    inputs: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Those of one prompt, as they were given. `tokens`: the placeholder of each modality in the text that a template writes;
    `output_ids`: the tokens that take its encoder's outputs. `layout`: how a text that no template wrote is put for the model,
    special tokens and all, where its processor does that. `tells_apart`: sounds beside pictures are others than alone."""

    read: Sequence[ReadMedia]
    tokens: Mapping[Modality, str]
    output_ids: Mapping[Modality, int]
    layout: Callable[[str], str] | None = None
    tells_apart: bool = False

    def written(self, text: str, spelled: Callable[[str], str] = str) -> tuple[str, list[ReadMedia]]:
        """`text` with what stands for each item in place of its placeholder, and the items in the order in which they stand there.
        `spelled`: how `text` writes control tokens.

        Raises PlaceholderError where there are more or fewer placeholders than items."""
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
        """The ids of a text that `written` gave, runs in their full length, and the items at their places.

        Raises PlaceholderError where tokens that take an encoder's outputs stand there and belong to no item."""
        found = np.asarray(ids, dtype=np.int64)
        takers = [self.output_ids[each.modality] for each in ordered for _ in each.expansion.runs]
        places = np.flatnonzero(np.isin(found, list(self.output_ids.values())))
        if found[places].tolist() != takers:
            raise PlaceholderError("the prompt has placeholders that no picture, sound or video was given for")
        lengths = np.ones(len(found), dtype=np.int64)
        lengths[places] = [length for each in ordered for length in each.expansion.runs]
        starts = iter((np.cumsum(lengths) - lengths)[places].tolist())
        items = tuple(_placed(each, starts) for each in ordered)
        return np.repeat(found, lengths).tolist(), beside_pictures(items) if self.tells_apart else items


def _placed(read: ReadMedia, starts: Iterator[int]) -> MediaItem:
    spans = [np.arange(start, start + length) for length, start in zip(read.expansion.runs, starts, strict=False)]
    return MediaItem(read.modality, read.digest, np.concatenate(spans).astype(np.int32), read.inputs)
