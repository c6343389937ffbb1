"""Stop strings: returns text up to the first stop string, and holds back text that may begin a stop string.

A stop string ends the text when its last character arrives. If several stop strings end at the same character, the longest
counts. The cut therefore does not depend on how the text was split. Only the standard library is used."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Filter that ends a text at the first of `stops` (non-empty strings). `include`: keep the stop string in the text.

    Each stop string has a Knuth-Morris-Pratt automaton, so the cost is linear in the text's length."""

    __slots__ = ("_beginnings", "_fallbacks", "_include", "_num_matched", "_pending", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._include = include
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._fallbacks = [_fallback(stop) for stop in stops]
        self._num_matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._pending = ""  # the longest of those ends
        self.stopped: str | None = None  # the stop string that ended the text

    def feed(self, text: str, armed: bool = True) -> str:
        """Append `text`. Return the text that cannot belong to a stop string, or "" after a stop string was found.

        If `armed` is False, a stop string may begin in `text` but not end in it. For min_tokens, the text of the first tokens is
        fed with `armed=False`."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        if not self._pending and self._beginnings.isdisjoint(text):
            return text
        return self._scan(text, armed)

    def flush(self) -> str:
        """Return the text still held back, at the end of the answer."""
        text, self._pending = self._pending, ""
        self._num_matched = [0] * len(self._stops)
        return text

    def _scan(self, text: str, armed: bool) -> str:
        pending = self._pending + text
        for end, char in enumerate(text, start=len(self._pending) + 1):
            ended = self._advance(char)
            if ended and armed:
                self.stopped = max(ended, key=len)
                self._pending = ""
                return pending[: end if self._include else end - len(self.stopped)]
        certain = len(pending) - max(self._num_matched)
        self._pending = pending[certain:]
        return pending[:certain]

    def _advance(self, char: str) -> list[str]:
        """Advance every automaton by the character `char`. Return the stop strings that end with it."""
        ended = []
        for which, stop in enumerate(self._stops):
            fallback = self._fallbacks[which]
            num_matched = self._num_matched[which]
            while num_matched and stop[num_matched] != char:
                num_matched = fallback[num_matched - 1]
            if stop[num_matched] == char:
                num_matched += 1
            if num_matched == len(stop):
                ended.append(stop)
                num_matched = fallback[num_matched - 1]
            self._num_matched[which] = num_matched
        return ended


def _fallback(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of the longest shorter prefix that is also its suffix (Knuth, Morris, Pratt
    1977)."""
    lengths = [0] * len(stop)
    matched = 0
    for end in range(1, len(stop)):
        while matched and stop[end] != stop[matched]:
            matched = lengths[matched - 1]
        matched += stop[end] == stop[matched]
        lengths[end] = matched
    return lengths
