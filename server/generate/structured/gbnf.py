"""GBNF, llama.cpp's grammars, as llguidance's converter to Lark reads them.

The converter does not know all of GBNF: characters by their code points, a dot that is any character, bounds that begin with a
comma. These are written here in what it knows. What neither knows (tokens, such as <think> or <[5]>) is refused."""

from __future__ import annotations

import re
from typing import Final

from llguidance.gbnf_to_lark import gbnf_to_lark

_PIECES: Final = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\])*")'
    r"|(?P<characters>\[(?:\\.|[^\]\\])*\])"
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<bound>\{\s*(?=,))"
    r"|(?P<any>\.)"
    r"|(?P<token>!?<\[?[^<>\s]*>)",
    re.DOTALL,
)
_CODE_POINT: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SET_OPERATORS: Final = str.maketrans(
    {"&": "\\x26", "~": "\\x7e"}
)  # doubled, inside [ ], to the regular expressions that come of it
_ANY: Final = "[\\x00-\U0010ffff]"
_ESCAPED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\", "[": "\\[", "]": "\\]"}
_MEANT: Final = frozenset("^-/")  # inside [ ] these would mean something, so they stay numbers


def lark_of(text: str) -> str:
    """Raises ValueError, or whatever the converter trips over."""
    return gbnf_to_lark(_PIECES.sub(_rewritten, text))


def _rewritten(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "literal":
            return _CODE_POINT.sub(_character, found[0])
        case "characters":
            return _CODE_POINT.sub(_character, found[0]).translate(_SET_OPERATORS)
        case "bound":
            return "{0"
        case "any":
            return _ANY
        case "token":
            raise ValueError(f"tokens, such as {found[0]}, are not supported in a grammar")
    return found[0]


def _character(found: re.Match[str]) -> str:
    if found[3] is not None:
        return found[0]
    number = int(found[1] or found[2], 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise ValueError(f"{found[0]} is no character")
    character = chr(number)
    if character in _MEANT or (number < 0x20 and character not in _ESCAPED):
        return f"\\x{number:02x}"
    return _ESCAPED.get(character, character)
