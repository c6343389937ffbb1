"""How few tokens a text can have, from its length alone: lets a caller refuse what is surely too long without tokenising it.

Sound or silent: where a tokenizer may drop text, or make one token of arbitrarily much, there is no bound. One exception:
control characters, which many vocabularies lack and drop, are counted like all others; nobody misses such a text."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# The most code points that Unicode's canonical composition makes one.
_COMPOSED = 4
_KEEPING_NORMALIZERS = ("Prepend", "Replace", "NFC")
_KEEPING_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")


def most_chars_per_token(backend: Tokenizer) -> int | None:
    """None: no bound."""
    model = backend.model
    if not isinstance(model, BPE) or any(token.lstrip or token.rstrip for token in _added(backend)):
        return None
    normalizers, splitters = _stages(backend)
    if any(stage["type"] not in _KEEPING_NORMALIZERS or _shortens(stage) for stage in normalizers):
        return None
    if any(stage["type"] not in _KEEPING_SPLITTERS or stage.get("behavior") == "Removed" for stage in splitters):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if any(stage["type"] == "ByteLevel" for stage in splitters):
        needed = _byte_level_alphabet()
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(byte in vocabulary for byte in needed):  # text outside the vocabulary may vanish
        return None
    composes = any(stage["type"] == "NFC" for stage in normalizers)
    return max(map(len, vocabulary), default=1) * (_COMPOSED if composes else 1)


def _byte_level_alphabet() -> list[str]:
    """What every text without control characters leaves a mark with: visible ASCII, blanks, UTF-8's continuation bytes."""
    ascii_text = "\t\n\r" + "".join(map(chr, range(0x20, 0x7F)))
    continuations = "".join(map(chr, range(0x80, 0xC0)))
    splitter = ByteLevel(add_prefix_space=False, use_regex=False)
    return [char for piece, _ in splitter.pre_tokenize_str(ascii_text + continuations) for char in piece]


def _added(backend: Tokenizer) -> list[Any]:
    return list(backend.get_added_tokens_decoder().values())


def _stages(backend: Tokenizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    bare = Tokenizer(BPE())
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    described = json.loads(bare.to_str())
    return _flat(described["normalizer"], "normalizers"), _flat(described["pre_tokenizer"], "pretokenizers")


def _flat(stage: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    if stage is None:
        return []
    if stage["type"] == "Sequence":
        return [inner for child in stage[children] for inner in _flat(child, children)]
    return [stage]


def _shortens(stage: dict[str, Any]) -> bool:
    """A Replace by something shorter, or of a pattern whose length is not known."""
    if stage["type"] != "Replace":
        return False
    pattern = stage["pattern"].get("String")
    return pattern is None or len(stage["content"]) < len(pattern)
