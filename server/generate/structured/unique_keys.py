r"""Matcher of JSON in which no object repeats a key.

A grammar can ensure this only for properties that a schema lists. For other keys, this matcher follows the text and forbids each
token that would complete a repeated key. Keys are compared as written: "a" and "\u0061" differ. If no other token is allowed (a
schema with a finite set of keys), the repeated key is allowed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from runtime.api import Bitmask, TokenMatcher
from server.generate.structured.bitmask import has_bit, without_bits

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING, _CLOSING = b"{[", b"}]"
_BRACE = _OPENING[0]


class TokenIndex:
    """Index of a vocabulary: the tokens with a quotation mark, sorted, and the tokens that contain a whole key."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._ordered = sorted((token, id) for id, token in enumerate(tokens) if _QUOTE in token)
        self._with_keys = [(token, id) for token, id in self._ordered if token.count(b'"') > 1]

    def ending_key(self, rest: bytes) -> Iterator[int]:
        """Yield the ids of tokens that begin with `rest` and a quotation mark."""
        beginning = rest + b'"'
        at = bisect_left(self._ordered, (beginning, -1))
        while at < len(self._ordered) and self._ordered[at][0].startswith(beginning):
            yield self._ordered[at][1]
            at += 1

    def with_key(self, key: bytes) -> list[int]:
        """Return the ids of tokens that contain `key` in quotation marks."""
        whole = b'"' + key + b'"'
        return [id for token, id in self._with_keys if whole in token]


class UniqueKeys:
    """TokenMatcher that forbids repeated keys. `matcher`: TokenMatcher of a grammar that accepts only JSON."""

    def __init__(self, matcher: TokenMatcher, index: TokenIndex) -> None:
        self._matcher = matcher
        self._index = index
        self._text = _Text()
        self._with_key: dict[bytes, list[int]] = {}  # of the keys so far, where there are such tokens

    def allowed(self) -> Bitmask | None:
        mask = self._matcher.allowed()
        if mask is None or not self._text.has_keys:
            return mask
        banned = [id for id in self._candidates() if has_bit(mask, id) and self._repeats(id)]
        banned += self._ending(mask)
        if not banned:
            return mask
        left = without_bits(mask, banned)
        return left if any(left) else mask

    def accept(self, token_id: int) -> None:
        self._matcher.accept(token_id)
        if token_id < len(self._index.tokens):
            self._text.read(self._index.tokens[token_id])
            for key in self._text.taken_keys():
                if found := self._index.with_key(key):
                    self._with_key[key] = found

    def checkpoint(self) -> Callable[[], None]:
        take_matcher_back, text, with_key = self._matcher.checkpoint(), self._text.copy(), self._with_key.copy()

        def take_back() -> None:
            take_matcher_back()
            self._text, self._with_key = text, with_key

        return take_back

    def _candidates(self) -> Iterator[int]:
        for found in self._with_key.values():
            yield from found

    def _repeats(self, token_id: int) -> bool:
        return self._text.copy().read(self._index.tokens[token_id])

    def _ending(self, mask: Bitmask) -> list[int]:
        """Return the allowed token ids in `mask` that would complete a repeated key."""
        begun = self._text.begun_key
        if begun is None:
            return []
        rests = [key[len(begun) :] for key in self._text.keys if key.startswith(begun)]
        return [id for rest in rests for id in self._index.ending_key(rest) if has_bit(mask, id)]


class _Text:
    """State of a JSON text: the keys of every open object (None for a list), and the string that is open."""

    __slots__ = ("_awaits_key", "_escaped", "_is_key", "_new_keys", "_open", "_string")

    def __init__(self) -> None:
        self._open: list[frozenset[bytes] | None] = []
        self._awaits_key = False  # the next string is a key
        self._string: bytearray | None = None  # what is written of the string that is open
        self._is_key = False
        self._escaped = False
        self._new_keys: list[bytes] = []

    def copy(self) -> _Text:
        made = _Text()
        made._open = self._open.copy()
        made._string = None if self._string is None else self._string.copy()
        made._awaits_key, made._is_key, made._escaped = self._awaits_key, self._is_key, self._escaped
        return made

    @property
    def has_keys(self) -> bool:
        return any(self._open)

    @property
    def keys(self) -> frozenset[bytes]:
        """Keys of the innermost open object. Empty in a list."""
        return (self._open[-1] if self._open else None) or frozenset()

    @property
    def begun_key(self) -> bytes | None:
        return bytes(self._string) if self._string is not None and self._is_key else None

    def taken_keys(self) -> list[bytes]:
        """Return the keys that were completed since the last call."""
        taken, self._new_keys = self._new_keys, []
        return taken

    def read(self, data: bytes) -> bool:
        """Read `data`. Return True if an object in it repeats a key."""
        twice = False
        for byte in data:
            if self._string is None:
                self._outside(byte)
            elif self._escaped:
                self._escaped = False
                if self._is_key:
                    self._string.append(byte)
            elif byte == _QUOTE:
                twice |= self._is_key and self._end_key(bytes(self._string))
                self._string = None
            else:
                self._escaped = byte == _BACKSLASH
                if self._is_key:
                    self._string.append(byte)
        return twice

    def _end_key(self, key: bytes) -> bool:
        keys = self.keys
        self._open[-1] = keys | {key}
        self._new_keys.append(key)
        return key in keys

    def _outside(self, byte: int) -> None:
        if byte == _QUOTE:
            self._string, self._is_key = bytearray(), self._awaits_key
        elif byte == _COMMA:
            self._awaits_key = bool(self._open) and self._open[-1] is not None
        elif byte == _COLON:
            self._awaits_key = False
        elif byte in _OPENING:
            self._open.append(frozenset() if byte == _BRACE else None)
            self._awaits_key = byte == _BRACE
        elif byte in _CLOSING and self._open:
            self._open.pop()
            self._awaits_key = False
