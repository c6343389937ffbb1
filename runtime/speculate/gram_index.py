"""Gram index: where short runs of tokens have stood before in a text that grows at its end.

A gram of n tokens is found by its place, the number of tokens up to its end: what followed it begins there. Of all places of a
gram the latest is looked up, and each knows the one before it, as in the window of a compressor. So a token costs one entry for
each size, whatever the length of the text; and a search costs as many places as it looks at. Ids below 0 part one text from the
next: nobody looks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PLACES_A_STEP = 1024  # that are taken in of all texts together, which takes about a millisecond
MAX_PROMPT = 32_768  # tokens of a prompt, its last ones, that are kept: some 300 bytes each


class GramIndex:
    """`sizes`: of the grams that are indexed. `ids`: the text."""

    def __init__(self, *sizes: int) -> None:
        self.ids: list[int] = []
        self._num_indexed = 0  # places up to this one have been seen
        self._latest: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._earlier: dict[int, list[int]] = {size: [0] for size in sizes}  # by place; 0: none

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Iterable[int]) -> None:
        self.ids += ids

    def index(self, most: int) -> int:
        """Take in up to `most` more places that something follows, in order; how many these were."""
        first = self._num_indexed + 1
        end = min(len(self.ids), first + most)  # the last place is that of the tokens which are looked for
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
        """Where `last`, as many tokens as one of the sizes, has stood, the latest first."""
        earlier = self._earlier[len(last)]
        place = self._latest[len(last)].get(last, 0)
        while place:
            yield place
            place = earlier[place]

    def match_length(self, place: int, text: list[int], most: int) -> int:
        """How many tokens before `place` are those at the end of `text`, up to `most`."""
        ids, length, num = self.ids, 0, len(text)
        most = min(most, place, num)
        while length < most and ids[place - 1 - length] == text[num - 1 - length]:
            length += 1
        return length


class Allowance:
    """What may still be taken in during a step, by whoever is asked in it: so many prompts that start together, or a long one, hold
    nobody up. Nobody says when a step begins: it does when somebody is asked again."""

    def __init__(self) -> None:
        self._left = PLACES_A_STEP
        self._asked: set[int] = set()

    def asked(self, number: int) -> None:
        """Sequence `number` is asked for a guess."""
        if number in self._asked:
            self._asked.clear()
            self._left = PLACES_A_STEP
        self._asked.add(number)

    def index(self, text: GramIndex) -> None:
        self._left -= text.index(self._left)
