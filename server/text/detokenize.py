"""Incremental detokenisation: converts token ids to text.

The results of all `feed` calls and of `flush` concatenate to the text that the tokenizers library returns for all ids. How the
ids were split does not matter. Text is returned as early as this guarantee allows. The bytes of an incomplete character are
held back until the character is complete.

A `TokenTable` is shared by all requests of a tokenizer and filled on demand. A `Detokenizer` is the state of one request, a few
bytes. This module does not depend on requests, stop strings or HTTP.

The stages of a tokenizer's decoder (a JSON list) are handled as follows:
- Replace, Metaspace and WordPiece depend on one token, and on whether it is the first. They are computed once per token and
  cached.
- ByteLevel: tokens are bytes. They are joined and decoded as UTF-8; each maximal invalid part becomes one U+FFFD.
- ByteFallback: consecutive tokens such as <0xE2> form a run. If a run is not valid UTF-8 as a whole, each of its bytes
  becomes U+FFFD. A run is therefore held back until the first token that is not a byte.
- Strip after Fuse removes leading characters of the whole text.
For other decoders, a window of ids is decoded repeatedly. Text is returned once no continuation can change it. This is slower,
and exact for every decoder whose context is shorter than the window."""

from __future__ import annotations

import json
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import tokenizers

from server.text import native

Stage = dict[str, Any]


class Detokenizer(Protocol):
    """Incremental detokenizer of one request."""

    def feed(self, ids: Sequence[int]) -> str:
        """Append `ids`. Return the text that is now complete, or "" if a character is still incomplete.

        Ids outside the tokenizer's vocabulary produce no text; models often pad their vocabulary."""
        ...

    def flush(self) -> str:
        """Return the text still held back, with U+FFFD for each incomplete character. Do not call `feed` afterwards."""
        ...


class TokenTable:
    """Cache of each token's text for one tokenizer, filled on demand.

    Threads share it without a lock, because every thread computes the same text for a token."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        stages = _stages(backend.decoder)
        self._plan = _plan(stages)
        self._pieces = _PieceForms(self._plan.pieces) if self._plan else None
        self._by_skipped: dict[frozenset[int], _Tokens] = {}
        self._all = self._skipping(frozenset())

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def detokenizer(
        self, *, skip_special_tokens: bool = True, keep_ids: frozenset[int] = frozenset(), continues: bool = False
    ) -> Detokenizer:
        """Return a detokenizer for one request. `keep_ids`: special tokens that are returned as text although others are skipped.
        Each distinct set has its own table, so use few sets.

        `continues`: the ids follow a prompt. Steps that a decoder applies only at the start of a text are then skipped, such as
        dropping the leading space."""
        tokens = self._skipping(self._special_ids - keep_ids if skip_special_tokens else frozenset())
        if isinstance(tokens, _ByteTokens):
            return tokens.detokenizer()
        if isinstance(tokens, _TextTokens):
            return _TextDetokenizer(tokens, continues)
        return _WindowDetokenizer(tokens, continues)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of token `id` within a text. For a special token, return its name; for an unknown id, return b""."""
        return self._all.token_bytes(id)

    def all_token_bytes(self, num_ids: int) -> list[bytes]:
        """Return the bytes of each of the first `num_ids` tokens. This is faster than calls of `token_bytes`."""
        if isinstance(self._all, _ByteTokens):
            return self._all.all_token_bytes(num_ids)  # which skip none
        return [self._all.token_bytes(id) for id in range(num_ids)]

    def _skipping(self, skip_ids: frozenset[int]) -> _Tokens:
        found = self._by_skipped.get(skip_ids)
        if found is None:
            found = self._by_skipped[skip_ids] = self._tokens(skip_ids)
        return found

    def _tokens(self, skip_ids: frozenset[int]) -> _Tokens:
        if self._plan is None or self._pieces is None:
            return _WindowTokens(self._backend, skip_ids)
        if self._plan.bytes == "level":
            return _ByteTokens(self._backend, skip_ids, self._pieces)
        return _TextTokens(self._backend, skip_ids, self._pieces, self._plan)


# --- taking the decoder apart -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Decoding steps of a tokenizer. `pieces`: stages that depend on one token. `bytes`: how byte tokens are joined. At most
    `strip_count` leading `strip_char` are then removed from the text."""

    pieces: list[Stage]
    bytes: Literal["level", "fallback"] | None
    strip_char: str = ""
    strip_count: int = 0


_JOIN_WITH_SPACES: Stage = {"type": "join"}  # what the library does when a tokenizer has no decoder


def _stages(decoder: Any) -> list[Stage]:
    """Return the stages of a tokenizer's `decoder` as a flat list."""
    if decoder is None:
        return [_JOIN_WITH_SPACES]
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.decoder = decoder
    return _flat(json.loads(bare.to_str())["decoder"])


def _flat(stage: Stage) -> list[Stage]:
    if stage["type"] == "Sequence":
        return [inner for child in stage["decoders"] for inner in _flat(child)]
    return [stage]


def _looks_at_position(stage: Stage) -> bool:
    return stage["type"] in ("Metaspace", "WordPiece", "join")


def _sees_one_token(stage: Stage) -> bool:
    if stage["type"] == "Strip":
        return bool(stage["stop"] == 0)
    return stage["type"] == "Replace" or _looks_at_position(stage)


def _plan(stages: list[Stage]) -> _Plan | None:
    """Return the decoding plan for `stages`, or None if the stages cannot be applied token by token."""
    rest = list(stages)
    pieces: list[Stage] = []
    while rest and _sees_one_token(rest[0]):
        pieces.append(rest.pop(0))
    joined: Literal["level", "fallback"] | None = None
    fused = False
    if rest and rest[0]["type"] == "ByteLevel" and not any(map(_looks_at_position, pieces)):
        joined, fused = "level", True
        rest.pop(0)
    elif rest and rest[0]["type"] == "ByteFallback":
        joined = "fallback"
        rest.pop(0)
    while rest and rest[0]["type"] == "Fuse":
        fused = True
        rest.pop(0)
    if not rest:
        return _Plan(pieces, joined)
    strip = rest.pop(0)
    if rest or not fused or joined == "level" or strip["type"] != "Strip" or strip["stop"] != 0:
        return None
    return _Plan(pieces, joined, strip["content"], strip["start"])


class _PieceForms:
    """Converter of a token to text, by the stages that depend on one token: `first` at the start of a text, `rest` elsewhere."""

    # Any letter does: it only makes the token behind it the second one.
    _ANCHOR = "a"

    def __init__(self, stages: list[Stage]) -> None:
        self.positional = any(map(_looks_at_position, stages))
        self._joins = stages == [_JOIN_WITH_SPACES]
        self._decoder = None if self._joins or not stages else _decoder(stages)
        self._anchor_len = len(self._decoder.decode([self._ANCHOR])) if self._decoder else 0

    def first(self, token: str) -> str:
        return token if self._decoder is None else str(self._decoder.decode([token]))

    def rest(self, token: str) -> str:
        if self._decoder is None:
            return " " + token if self._joins else token
        return str(self._decoder.decode([self._ANCHOR, token]))[self._anchor_len :]


def _decoder(stages: list[Stage]) -> Any:
    """Return a decoder with only these stages. It is built from JSON, because the library has no other public way."""
    bare = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    bare["decoder"] = {"type": "Sequence", "decoders": stages}
    return tokenizers.Tokenizer.from_str(json.dumps(bare)).decoder


# --- byte-level ---------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary: its own if visible Latin-1, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_TO_LATIN_1 = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in _BYTE_OF.items()}


def _bytes_of(token: str) -> bytes:
    if token.isascii():  # in the alphabet or not, it stands for itself
        return token.encode()
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # not written in the byte alphabet: an added token, taken as it is
        return token.encode()


class _ByteTokens:
    """Table of byte-level tokens. `texts`: tokens of complete characters, or without output. `broken`: bytes of all other
    tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_ids: frozenset[int], pieces: _PieceForms) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._pieces = pieces
        self.texts: dict[int, str] = {}
        self.broken: dict[int, bytes] = {}
        self.detokenizer: Callable[[], Detokenizer] = partial(_ByteDetokenizer, self)
        if native.module is not None:
            compiled = native.module.BytePieces(partial(_bytes_of_id, backend, skip_ids, pieces))
            self.detokenizer = partial(native.module.ByteDetokenizer, compiled)

    def learn(self, id: int) -> None:
        data = _bytes_of_id(self._backend, self._skip_ids, self._pieces, id)
        try:
            self.texts[id] = data.decode()
        except UnicodeDecodeError:
            self.broken[id] = data

    def token_bytes(self, id: int) -> bytes:
        if id not in self.texts and id not in self.broken:
            self.learn(id)
        text = self.texts.get(id)
        return self.broken[id] if text is None else text.encode()

    def all_token_bytes(self, num_ids: int) -> list[bytes]:
        """Return the bytes of the first `num_ids` tokens, without filling the table."""
        first = self._pieces.first
        tokens = map(self._backend.id_to_token, range(num_ids))
        return [b"" if token is None else _bytes_of(first(token)) for token in tokens]


def _bytes_of_id(backend: tokenizers.Tokenizer, skip_ids: frozenset[int], pieces: _PieceForms, id: int) -> bytes:
    token = _token_string(backend, id)
    return b"" if token is None or id in skip_ids else _bytes_of(pieces.first(token))


class _ByteDetokenizer:
    __slots__ = ("_pending", "_texts", "_tokens")

    def __init__(self, tokens: _ByteTokens) -> None:
        self._tokens = tokens
        self._texts = tokens.texts
        self._pending = b""  # the beginning of a character

    def feed(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._pending:
            text = self._texts.get(ids[0])
            if text is not None:
                return text
        data = self._pending + b"".join([self._tokens.token_bytes(id) for id in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


# --- pieces of text, with byte fallback ---------------------------------------------------------------------------


class _TextTokens:
    """Table of text tokens. `texts`: text of a token that is not the first. `bytes`: byte of a byte-fallback token. The value
    None marks ids without output; they do not end a run of bytes."""

    def __init__(
        self, backend: tokenizers.Tokenizer, skip_ids: frozenset[int], pieces: _PieceForms, plan: _Plan
    ) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._pieces = pieces
        self._fallback = plan.bytes == "fallback"
        self.strip_char = plan.strip_char
        self.strip_count = plan.strip_count
        self.positional = pieces.positional
        self.texts: dict[int, str] = {}
        self.others: dict[int, bytes | None] = {}

    def piece(self, id: int) -> str | bytes | None:
        """Return the text of token `id`, one byte (bytes) for a byte-fallback token, or None if the token has no output."""
        text = self.texts.get(id)
        if text is not None:
            return text
        if id not in self.others:
            token = self._token(id)
            piece = None if token is None else self._text_or_byte(self._pieces.rest(token))
            if isinstance(piece, str):
                self.texts[id] = piece
                return piece
            self.others[id] = piece
        return self.others[id]

    def first_piece(self, id: int) -> str | bytes | None:
        """Return the same as `piece`, for a token at the start of a text."""
        token = self._token(id)
        return None if token is None else self._text_or_byte(self._pieces.first(token))

    def token_bytes(self, id: int) -> bytes:
        piece = self.piece(id)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def _token(self, id: int) -> str | None:
        return None if id in self._skip_ids else _token_string(self._backend, id)

    def _text_or_byte(self, text: str) -> str | bytes:
        if self._fallback and text.startswith("<0x") and text.endswith(">") and len(text.encode()) == 6:
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                return text
        return text


class _TextDetokenizer:
    __slots__ = ("_first", "_run", "_settled", "_strip", "_texts", "_tokens")

    def __init__(self, tokens: _TextTokens, continues: bool) -> None:
        self._tokens = tokens
        self._texts = tokens.texts
        self._first = tokens.positional and not continues
        self._strip = 0 if continues else tokens.strip_count  # leading characters that may still be cut
        self._run = b""  # byte-fallback tokens, until a token that is none
        self._settled = not self._first and not self._strip

    def feed(self, ids: Sequence[int]) -> str:
        if self._settled and len(ids) == 1:
            text = self._texts.get(ids[0])
            if text is not None:
                return text
        return "".join([self._piece(id) for id in ids])

    def flush(self) -> str:
        self._settled = False
        return self._cut(self._end_run())

    def _piece(self, id: int) -> str:
        piece = self._tokens.first_piece(id) if self._first else self._tokens.piece(id)
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            self._run += piece
            self._settled = False
            return ""
        text = self._cut(self._end_run() + piece)
        self._settled = not self._strip
        return text

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _cut(self, text: str) -> str:
        if not self._strip or not text:
            return text
        cut = 0
        while cut < min(self._strip, len(text)) and text[cut] == self._tokens.strip_char:
            cut += 1
        self._strip = self._strip - cut if cut == len(text) else 0
        return text[cut:]


# --- any other decoder --------------------------------------------------------------------------------------------


class _WindowTokens:
    """Tokenizer with an unknown decoder, whose effect is only found by decoding.

    `probes`: continuations that may change how the ids before them are decoded. They are no id, a byte that is never valid, and
    two words that begin differently. Text that is equal in all these decodings is final, except U+FFFD at its end: a
    continuation may complete the character."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._probes: list[list[int]] | None = None

    @property
    def probes(self) -> list[list[int]]:
        if self._probes is None:
            self._probes = [[], *([id] for id in self._find_probes())]
        return self._probes

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode([id for id in ids if id not in self._skip_ids], skip_special_tokens=False)

    def token_bytes(self, id: int) -> bytes:
        return b"" if _token_string(self._backend, id) is None else self.decode([id]).encode()

    def _find_probes(self) -> list[int]:
        never_valid = [self._backend.token_to_id(token) for token in ("<0xFF>", "ÿ")]
        words: dict[str, int] = {}
        for id in range(self._backend.get_vocab_size()):
            text = self.decode([id]).strip()
            if text.isalpha() and text[0] not in words:
                words[text[0]] = id
                if len(words) == 2:
                    break
        return [id for id in never_valid if id is not None] + list(words.values())


class _WindowDetokenizer:
    __slots__ = ("_ids", "_num_sent", "_tokens")

    _MAX_IDS = 64
    _CONTEXT_IDS = 8

    def __init__(self, tokens: _WindowTokens, continues: bool) -> None:
        self._tokens = tokens
        self._ids: list[int] = list(tokens.probes[-1]) if continues else []
        self._num_sent = len(tokens.decode(self._ids))  # characters of the ids' decoding that were given out

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        texts = [self._tokens.decode(self._ids + probe) for probe in self._tokens.probes]
        certain = _common_beginning(texts).rstrip("\ufffd")
        text = certain[self._num_sent :]
        self._num_sent = max(self._num_sent, len(certain))
        if len(self._ids) > self._MAX_IDS and len(certain) == len(texts[0]):
            self._ids = self._ids[-self._CONTEXT_IDS :]
            self._num_sent = len(self._tokens.decode(self._ids))
        return text

    def flush(self) -> str:
        text = self._tokens.decode(self._ids)[self._num_sent :]
        self._num_sent += len(text)
        return text


def _common_beginning(texts: list[str]) -> str:
    # The least and the greatest differ first where any two of them do.
    least, greatest = min(texts), max(texts)
    for at, (one, other) in enumerate(zip(least, greatest, strict=False)):
        if one != other:
            return least[:at]
    return least


_Tokens = _ByteTokens | _TextTokens | _WindowTokens


def _token_string(backend: tokenizers.Tokenizer, id: int) -> str | None:
    return backend.id_to_token(id) if 0 <= id < 2**32 else None
