r"""JSON quoting: converts a Lark grammar to a grammar of the same texts, escaped for a JSON string, without the quotation marks.

JSON escapes each character separately. Rules therefore stay the same, and the characters in terminals are replaced as json.dumps
writes them, with non-ASCII characters unescaped. Grammars with tokens or references to other grammars are rejected.

The lexer backtracks by one byte, but an escape has two. A terminal that ends within an escape ("\n" at the end of a line) would
make rules fail, so non-recursive rules are merged into one terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from re import _constants as codes  # type: ignore[attr-defined]  # the parser of patterns, which the standard library has for itself
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from server.generate.structured.grammar import MAX_RULE_CHARS, GrammarError, check_length
from server.http.errors import clip

Ranges = list[tuple[int, int]]  # of code points, both ends included

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
# What a JSON string has to escape, and how.
_ESCAPED: Final[Mapping[int, str]] = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), ord('"'), ord("\\"))}
_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      |(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")
      |(?P<string>"(?:\\.|[^"\\\n])*"i?)
      |(?P<regex>/(?!/)(?:\\.|[^/\\\n])*/[A-Za-z]*)
      |(?P<imported>%import\s+common\.(?P<name>[A-Z_]+)(?:\s*->\s*(?P<alias>[A-Z_]+))?)
      |(?P<ignore>%ignore\b)
      |(?P<foreign>[%@<][^\s]*)
      |(?P<other>[^"/%@<#]+)""",
    re.VERBOSE,
)
Pieces = list[tuple[str | None, str]]  # of what kind, and its text
_PREFIX: Final = "RULE_"  # of a terminal that was a rule
_NAME: Final = re.compile(r"[?!]?(?P<name>[A-Za-z_][A-Za-z0-9_-]*)(?:\.-?[0-9]+(?=\s*:))?(?P<colon>\s*:)?")
_ALIAS: Final = re.compile(r"->\s*[A-Za-z_]+")
_OPTIONS: Final = re.compile(r"[A-Za-z0-9_]\[")
# Terminals that grammars import from Lark's own `common`, as regular expressions.
_COMMON: Final[Mapping[str, str]] = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+", "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+))([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+|([0-9]+\.[0-9]*|\.[0-9]+))([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}  # fmt: skip


def quoted(lark: str) -> str:
    """Return the Lark grammar of the texts of `lark`, escaped for JSON strings. Raises GrammarError."""
    pieces: list[tuple[str | None, str]] = []
    at = 0
    while at < len(lark):
        found = _TOKEN.match(lark, at)
        if found is None:
            raise GrammarError(f"the grammar cannot be read at {clip(lark[at : at + 20])!r}")
        pieces.append((found.lastgroup, _piece(found)))
        at = found.end()
    written = "".join(text for _, text in (_as_terminals(pieces) if _is_flat(pieces) else pieces))
    check_length("the grammar, escaped for JSON,", written, 8 * MAX_RULE_CHARS)
    return written


def _is_flat(pieces: Pieces) -> bool:
    if any(kind == "ignore" for kind, _ in pieces):
        return False
    bodies: dict[str, set[str]] = {}
    rule: set[str] = set()
    for kind, text in pieces:
        if kind != "other":
            continue
        if _OPTIONS.search(text):
            return False
        for name in _NAME.finditer(_ALIAS.sub("", text)):
            if name["colon"]:
                rule = bodies.setdefault(name["name"], set())
            else:
                rule.add(name["name"])
    done: set[str] = set()
    while ready := [name for name, names in bodies.items() if name not in done and names & bodies.keys() <= done]:
        done |= {*ready}
    return done == bodies.keys() and "start" in bodies


def _as_terminals(pieces: Pieces) -> Pieces:
    named = [(kind, _NAME.sub(_terminal, _ALIAS.sub("", text)) if kind == "other" else text) for kind, text in pieces]
    return [("other", f"start: {_PREFIX}START\n"), *named]


def _terminal(name: re.Match[str]) -> str:
    word = name["name"]
    word = word if word.isupper() else _PREFIX + word.upper().replace("-", "_")
    return f"{word}{':' if name['colon'] else ''}"


def _piece(found: re.Match[str]) -> str:
    text = found.group()
    match found.lastgroup:
        case "comment":
            return ""
        case "range":
            low, high = (_plain(part.strip()) for part in text.split("..", 1))
            return f"/{quoted_regex(f'[{re.escape(low)}-{re.escape(high)}]')}/"
        case "string" if text.endswith("i"):
            return f"/{quoted_regex(re.escape(_plain(text[:-1])), re.IGNORECASE)}/"
        case "string":
            return json.dumps("".join(_ESCAPED.get(ord(char), char) for char in _plain(text)), ensure_ascii=False)
        case "regex":
            pattern, _, flags = text[1:].rpartition("/")
            return f"/{quoted_regex(pattern.replace(chr(92) + '/', '/'), _flags(flags))}/"
        case "imported" | "name" | "alias":
            name = found["name"]
            if name not in _COMMON:
                raise GrammarError(f"the grammar imports common.{name}, which is not supported")
            return f"{found['alias'] or name}: /{quoted_regex(_COMMON[name])}/\n"
        case "foreign":
            raise GrammarError(f"{clip(text)!r} is not supported in a grammar of JSON string contents")
    return text


def _plain(literal: str) -> str:
    """Parse a string literal of a Lark grammar. Return the string. Raises GrammarError."""
    try:
        plain: str = json.loads(literal, strict=False)
    except ValueError:
        raise GrammarError(f"the string {clip(literal)} cannot be read") from None
    return plain


def _flags(letters: str) -> int:
    known = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE, "u": re.UNICODE}
    if unknown := set(letters) - known.keys():
        raise GrammarError(f"there is no flag {unknown.pop()!r} of regular expressions")
    return sum((known[letter] for letter in set(letters)), 0)


# --- regular expressions ------------------------------------------------------------------------------------------


def quoted_regex(pattern: str, flags: int = 0) -> str:
    """Return a regular expression, in Rust's syntax, of the texts that match `pattern`, escaped for JSON. Raises GrammarError."""
    try:
        parsed = parser.parse(pattern, flags)
        return _sequence(parsed, parsed.state.flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"the regular expression {clip(pattern)!r} cannot be read: {error}") from None


def _sequence(nodes: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join(_node(code, argument, flags) for code, argument in nodes)


def _node(code: Any, argument: Any, flags: int) -> str:
    if (write := _WRITERS.get(code)) is None:
        raise GrammarError(f"{str(code).lower().replace('_', ' ')} of regular expressions is not supported here")
    return write(argument, flags)


def _repeat(argument: Any, flags: int) -> str:
    least, most, body = argument
    bound = "" if most == codes.MAXREPEAT else most
    return f"(?:{_sequence(body, flags)}){{{least},{bound}}}"


def _group(argument: Any, flags: int) -> str:
    _, added, removed, body = argument
    return f"(?:{_sequence(body, (flags | added) & ~removed)})"


def _branch(argument: Any, flags: int) -> str:
    return f"(?:{'|'.join(_sequence(branch, flags) for branch in argument[1])})"


def _any(argument: Any, flags: int) -> str:
    newline = ord("\n")
    return _one_of([(0, _LAST)] if flags & re.DOTALL else [(0, newline - 1), (newline + 1, _LAST)])


def _literal(argument: int, flags: int) -> str:
    return _one_of(_cased([(argument, argument)], flags))


def _not_literal(argument: int, flags: int) -> str:
    return _one_of(_others(_cased([(argument, argument)], flags)))


def _class(argument: Any, flags: int) -> str:
    negated, ranges = False, []
    for code, what in argument:
        if code is codes.NEGATE:
            negated = True
        elif code is codes.LITERAL:
            ranges.append((what, what))
        elif code is codes.RANGE:
            ranges.append(what)
        else:
            ranges += _category(what)
    ranges = _cased(ranges, flags)
    return _one_of(_others(ranges) if negated else ranges)


_WORD: Final = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE: Final = [(9, 13), (32, 32)]
_CATEGORIES: Final = {
    codes.CATEGORY_DIGIT: [(48, 57)], codes.CATEGORY_WORD: _WORD, codes.CATEGORY_SPACE: _SPACE,
}  # fmt: skip
_NOT_CATEGORIES: Final = {
    codes.CATEGORY_NOT_DIGIT: [(48, 57)], codes.CATEGORY_NOT_WORD: _WORD, codes.CATEGORY_NOT_SPACE: _SPACE,
}  # fmt: skip


def _category(code: Any) -> Ranges:
    return _CATEGORIES[code] if code in _CATEGORIES else _others(_NOT_CATEGORIES[code])


_WRITERS: Final[Mapping[Any, Callable[[Any, int], str]]] = {
    codes.LITERAL: _literal, codes.NOT_LITERAL: _not_literal, codes.ANY: _any, codes.IN: _class, codes.BRANCH: _branch,
    codes.SUBPATTERN: _group, codes.MAX_REPEAT: _repeat, codes.MIN_REPEAT: _repeat,
    codes.AT: lambda argument, flags: "",  # a terminal is matched whole
}  # fmt: skip


def _others(ranges: Ranges) -> Ranges:
    found, low = [], 0
    for first, last in sorted(ranges):
        if first > low:
            found.append((low, first - 1))
        low = max(low, last + 1)
    return [*found, (low, _LAST)] if low <= _LAST else found


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """Add ASCII letters in the other case to `ranges` if `flags` ignore case."""
    if not flags & re.IGNORECASE:
        return ranges
    letters = [code for low, high in ranges for code in range(max(low, 65), min(high, 122) + 1) if chr(code).isalpha()]
    return [*ranges, *((code ^ 32, code ^ 32) for code in letters)]


def _one_of(ranges: Ranges) -> str:
    """Return a regular expression that matches one JSON-escaped character of `ranges`."""
    escapes = [re.escape(text) for code, text in _ESCAPED.items() if any(low <= code <= high for low, high in ranges)]
    left = _others([*_others(ranges), *((code, code) for code in _ESCAPED), _SURROGATES])
    if left:
        escapes.append(f"[{''.join(map(_range, left))}]")
    if not escapes:
        raise GrammarError("a regular expression has a class without characters")
    return escapes[0] if len(escapes) == 1 else f"(?:{'|'.join(escapes)})"


def _range(ends: tuple[int, int]) -> str:
    low, high = (f"\\x{{{code:x}}}" for code in ends)
    return low if low == high else f"{low}-{high}"
