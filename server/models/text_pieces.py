"""Where a long text may be cut so that its parts, tokenised one by one, give the ids of the whole.

Known of tokenizers whose pre-tokenizer cuts a text into words by what stands around a place, as the byte-level ones do. One that
takes a text as one long word (sentencepiece's) has no such places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

PIECE_CHARS = 16_384  # some four milliseconds of tokenising

# After a line break that follows a visible character; before a single space between letters, which belongs to the second word.
_PLACE = re.compile(r"(?<=\S\n)(?=[^\W_])|(?<=[A-Za-z])(?= [A-Za-z])")

_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
_LOCAL_PRE_TOKENIZERS = {
    "Split",
    "Digits",
    "Punctuation",
    "ByteLevel",
    "BertPreTokenizer",
    "Whitespace",
    "WhitespaceSplit",
}
_PROBE = "word word\nword"


class TextPieces:
    """The places of texts for one tokenizer, if it knows such."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._has_places = _has_places(backend)

    def ends(self, text: str) -> Iterator[int]:
        """Where pieces of `text` end, the last of them with it. They are as long as the text wants."""
        start, size = 0, len(text)
        while self._has_places and size - start > PIECE_CHARS:
            search, found = start + PIECE_CHARS, None
            while found is None and search < size:
                found = _PLACE.search(text, search, search + PIECE_CHARS)
                search += PIECE_CHARS
            if found is None:
                break
            start = found.start()
            yield start
        yield size


def _has_places(backend: tokenizers.Tokenizer) -> bool:
    if backend.pre_tokenizer is None or not _are_local(_state(backend.pre_tokenizer), _LOCAL_PRE_TOKENIZERS):
        return False
    if backend.normalizer is not None and not _are_local(_state(backend.normalizer), _LOCAL_NORMALIZERS):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if _PLACE.search(token.content) or (token.rstrip and token.content[-1:].isalpha()):
            return False
    words = backend.pre_tokenizer.pre_tokenize_str(_PROBE)
    starts = {span[0] for _, span in words}
    return len("word word\n") in starts and not starts.isdisjoint({len("word"), len("word ")})


def _state(component: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(component.__getstate__())
    return found


def _are_local(state: dict[str, Any], kinds: set[str]) -> bool:
    parts = state.get("pretokenizers", state.get("normalizers"))
    if parts is not None:
        return all(_are_local(part, kinds) for part in parts)
    return state.get("type") in kinds and not state.get("add_prefix_space")
