"""Gram index: finds earlier occurrences of n-grams (short runs of tokens) in a growing text.

An occurrence is stored as a position: the number of tokens up to the end of the n-gram, where its continuation begins. The
index maps an n-gram to its last position. It maps each position to the previous one of the same n-gram, as in an LZ
compressor's window. Each token costs one entry per n-gram size. A search costs one step per position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from runtime.sequence import Sequence

BORDER = -1  # separates texts; an n-gram that contains it is not looked up
PLACES_A_STEP = 1024  # positions indexed per step, over all texts: about a millisecond
PLACES_LOOKED_AT = 16  # occurrences of an n-gram that are examined
MAX_PROMPT = 32_768  # last tokens of a prompt that are indexed, at some 300 bytes each


class GramIndex:
    """Index of a text's n-grams. `sizes`: lengths of the n-grams, in tokens. `ids`: the token ids of the text."""

    def __init__(self, *sizes: int) -> None:
        self.ids: list[int] = []
        self._num_indexed = 0  # places up to this one are indexed
        self._latest: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._earlier: dict[int, list[int]] = {size: [0] for size in sizes}  # by place; 0: none

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Iterable[int]) -> None:
        self.ids += ids

    def index(self, most: int) -> int:
        """Index up to `most` more positions in order, but not the text's end. Return the number of newly indexed positions."""
        first = self._num_indexed + 1
        end = min(len(self.ids), first + most)  # the last position is the n-gram to look up
        if first >= end:
            return 0
        ids = self.ids
        for size, latest in self._latest.items():
            earlier = self._earlier[size]
            for place in range(first, end):
                if place < size:
                    earlier.append(0)
                    continue
                gram = tuple(ids[place - size : place])
                earlier.append(latest.get(gram, 0))
                latest[gram] = place
        self._num_indexed = end - 1
        return end - first

    def places(self, last: tuple[int, ...]) -> Iterator[int]:
        """Yield the positions after earlier occurrences of the n-gram `last`, the latest first. Its length must be in `sizes`."""
        earlier = self._earlier[len(last)]
        place = self._latest[len(last)].get(last, 0)
        while place:
            yield place
            place = earlier[place]

    def places_of_end(self, text: GramIndex, size: int) -> Iterator[int]:
        """Yield the latest positions in this text after occurrences of the last `size` tokens of `text`."""
        last = tuple(text.ids[-size:])
        return islice(self.places(last), PLACES_LOOKED_AT) if len(last) == size else iter(())

    def match_length(self, place: int, text: list[int], most: int) -> int:
        """Return how many tokens before position `place` equal the tokens at the end of `text`, up to `most`."""
        ids, length, num = self.ids, 0, len(text)
        most = min(most, place, num)
        while length < most and ids[place - 1 - length] == text[num - 1 - length]:
            length += 1
        return length


class GrowingTexts:
    """Indexed texts of decoding sequences (prediction, prompt and output). Long texts are indexed in pieces, over several steps."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes
        self._texts: dict[int, GramIndex] = {}  # by number
        self._num_taken: dict[int, int] = {}  # indexed output tokens, by sequence number
        self._left = PLACES_A_STEP  # positions that may still be indexed in this step
        self._asked: set[int] = set()  # sequence numbers in this step; a repeated one starts the next step

    def caught_up(self, sequence: Sequence) -> GramIndex:
        """Return the text of `sequence` after appending all tokens that became known since the last call."""
        number = sequence.number
        if number in self._asked:
            self._asked.clear()
            self._left = PLACES_A_STEP
        self._asked.add(number)
        text = self._texts.get(number)
        if text is None:
            text = self._texts[number] = GramIndex(*self._sizes)
            if sequence.request.prediction:
                text.extend((*sequence.request.prediction, BORDER))
            text.extend(sequence.prompt_ids[-MAX_PROMPT:])
            self._num_taken[number] = 0
        if self._num_taken[number] < sequence.num_output_tokens:
            text.extend(sequence.output_ids[self._num_taken[number] :])
            self._num_taken[number] = sequence.num_output_tokens
        self.index(text)
        return text

    def index(self, text: GramIndex) -> None:
        """Index more of `text`, up to the limit of positions per step."""
        self._left -= text.index(self._left)

    def finished(self, sequence: Sequence) -> bool:
        """Remove the text of `sequence`. Return False if it has none."""
        self._num_taken.pop(sequence.number, None)
        return self._texts.pop(sequence.number, None) is not None
