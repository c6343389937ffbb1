"""Strings: the texts that a JSON schema allows as a string, without quotes, as regular expressions of which all have to match.

JSON in quotes is llguidance's business; this is for values that stand bare between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

import llguidance

from server.generate.structured.grammar import GrammarError, check_length
from server.http.errors import clip
from server.text.tools.schemas import Schema

MAX_PATTERN_CHARS = 1000

# Not all texts of each format, but those that people write.
_DAY = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
_DATE = f"[12][0-9]{{3}}-{_DAY}"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": r"P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}[HMS])?|T[0-9]{1,9}[HMS])",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"[a-zA-Z0-9_%+-]{{1,32}}(\.[a-zA-Z0-9_%+-]{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": r"[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}:\/\/[a-zA-Z0-9_~:\/?#@!$&'()*+,;=.-]+",
}


def patterns_of(schema: Schema) -> list[str]:
    """The patterns in Lark's syntax; none where any text will do. Raises GrammarError."""
    found = []
    if "minLength" in schema or "maxLength" in schema:
        found.append(f"(?s:.{{{_count(schema, 'minLength') or 0},{_count(schema, 'maxLength')}}})")
    if "pattern" in schema:
        found.append(_unanchored(str(schema["pattern"])))
    if "format" in schema:
        found.append(_format(schema["format"]))
    return [f"/{pattern}/" for pattern in found]


def _count(schema: Schema, name: str) -> str:
    count = schema.get(name)
    if count is not None and (not isinstance(count, int) or count < 0):
        raise GrammarError(f"{name} is no number of characters")
    return "" if count is None else str(count)


def _unanchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, as one of the whole text."""
    check_length("a pattern", pattern, MAX_PATTERN_CHARS)
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_alternatives(body):
        raise GrammarError(f"the pattern {clip(pattern)!r} needs parentheses around what stands between its anchors")
    return llguidance.regex_to_lark(f"{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}", "")


def _has_alternatives(pattern: str) -> bool:
    """Outside of any parentheses."""
    rest = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "", pattern)
    while (shorter := re.sub(r"\([^()]*\)", "", rest)) != rest:
        rest = shorter
    return "|" in rest


def _format(name: object) -> str:
    if not isinstance(name, str) or name not in _FORMATS:
        raise GrammarError(f"this model's way to write strings does not take the format {clip(json.dumps(name))}")
    return llguidance.regex_to_lark(_FORMATS[name], "")
