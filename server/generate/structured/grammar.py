"""Grammars sent by clients, as plain data, and their conversion to llguidance's source format.

`source` rejects grammars that would be too expensive to compile or to compute masks for: both costs grow with size and depth. It
can take milliseconds, so it must not run on the event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, Literal

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from msgspec import Struct

from server.generate.structured.closing import closed
from server.models.tokenizer import Tokenizer

Schema = Mapping[str, Any] | bool
Whitespace = Literal["compact", "none", "any"]  # compact: a space at most, behind a comma or a colon

MAX_CHARS = 1 << 17  # of a schema or of all choices, as JSON
MAX_RULE_CHARS = 1 << 14  # of a regular expression or a grammar, whose cost grows with the square of that
MAX_DEPTH = 64  # objects and lists of a schema inside each other
MAX_PROPERTIES = 5000  # of a schema and all its parts
MAX_MULTIPLE = 10_000  # significant digits of multipleOf, as an integer

_WHITESPACE: Mapping[Whitespace, Mapping[str, Any]] = {
    "none": {"whitespace_flexible": False},
    "compact": {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    # Room for indentation, and no more: a model that falls in love with white space would otherwise never come back.
    "any": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"},
}


class GrammarError(ValueError):
    """Error: the client's grammar is invalid or not supported. The message is for the client."""


class JsonSchema(Struct, frozen=True, tag=True):
    """Grammar of JSON that matches `schema`.

    `whitespace`: allow white space between JSON tokens. `pattern`: regular expression of this white space. `closed`: objects
    accept only listed properties, unless their schema allows others."""

    schema: Any  # a Schema, or one as JSON text
    whitespace: Whitespace = "compact"
    pattern: str | None = None
    closed: bool = True

    def source(self, tokenizer: Tokenizer) -> str:
        return grammars(json_schema=self.checked())

    def checked(self) -> dict[str, Any]:
        """Return the schema with closed objects and with the white space options. Other grammars can include it. Raises
        GrammarError."""
        schema = read_json(self.schema, "the schema")
        check_schema(schema)
        if self.closed:
            schema = closed(schema)
        if schema is False:
            raise GrammarError("the schema is false, which nothing satisfies")
        space = _WHITESPACE[self.whitespace]
        if self.pattern is not None:
            space = {"whitespace_pattern": self.pattern}
        asked = {} if schema is True else schema
        return {**asked, "x-guidance": {**space, **asked.get("x-guidance", {})}}


class Regex(Struct, frozen=True, tag=True):
    """Grammar of texts that match the regular expression `pattern` as a whole. Anchors at the ends of `pattern` have no effect."""

    pattern: str

    def source(self, tokenizer: Tokenizer) -> str:
        check_length("the regular expression", self.pattern, MAX_RULE_CHARS)
        return llguidance.LLMatcher.grammar_from_regex(self.pattern)


class Alternatives(Struct, frozen=True, tag=True):
    texts: tuple[str, ...]

    def source(self, tokenizer: Tokenizer) -> str:
        words = " | ".join(map(json.dumps, self.texts))
        check_length("the choices", words, MAX_CHARS)
        return grammars(lark_grammar=f"start: {words}")


class Rules(Struct, frozen=True, tag=True):
    """Grammar in llguidance's Lark syntax or in llama.cpp's GBNF syntax."""

    text: str

    def source(self, tokenizer: Tokenizer) -> str:
        return grammars(lark_grammar=self.lark())

    def lark(self) -> str:
        """Return the grammar in Lark syntax. Raises GrammarError."""
        check_length("the grammar", self.text, MAX_RULE_CHARS)
        try:
            return self.text if is_lark_syntax(self.text) else lark_of(self.text)
        except Exception as error:  # whatever the converter trips over
            raise GrammarError(f"the grammar cannot be read: {error}") from None


ANY_OBJECT = JsonSchema({"type": "object"})


def grammars(**first: Any) -> str:
    """Return llguidance's JSON source for one grammar. `first`: either `lark_grammar` or `json_schema`."""
    return json.dumps({"grammars": [first]})


# --- limits -------------------------------------------------------------------------------------------------------


def check_length(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise GrammarError(f"{what} has {len(text)} characters; at most {limit} are allowed")


def read_json(given: Any, what: str) -> Schema:
    """Return `given`, decoded if it is JSON text. `what`: name for error messages. Raises GrammarError."""
    if isinstance(given, str):
        check_length(what, given, MAX_CHARS)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{what} is not JSON: {error}") from None
    if not isinstance(given, bool | dict):
        raise GrammarError(f"{what} must be a JSON object, true or false")
    return given


def check_schema(schema: Schema) -> None:
    """Raise GrammarError if `schema` is too large or deep, or has numeric limits that need large automata."""
    num_properties = num_pattern_chars = 0
    for node, depth in _nodes(schema):
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH} objects and lists")
        if not isinstance(node, dict):
            continue
        properties, pattern, multiple = node.get("properties"), node.get("pattern"), node.get("multipleOf")
        if isinstance(properties, dict):
            num_properties += len(properties)
        patterns = [pattern, *(node["patternProperties"] if isinstance(node.get("patternProperties"), dict) else ())]
        num_pattern_chars += sum(len(one) for one in patterns if isinstance(one, str))
        if isinstance(multiple, int | float) and _digits(multiple) > MAX_MULTIPLE:
            raise GrammarError(f"multipleOf {multiple} has too many digits: more than {MAX_MULTIPLE} as an integer")
    if num_properties > MAX_PROPERTIES:
        raise GrammarError(f"the schema has {num_properties} properties; at most {MAX_PROPERTIES} are allowed")
    if num_pattern_chars > MAX_RULE_CHARS:
        raise GrammarError(f"the schema's patterns have {num_pattern_chars} characters; {MAX_RULE_CHARS} are allowed")
    check_length("the schema", json.dumps(schema), MAX_CHARS)


def _nodes(schema: Any) -> Iterator[tuple[Any, int]]:
    todo = [(schema, 1)]
    while todo:
        node, depth = todo.pop()
        yield node, depth
        inside = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        todo += [(part, depth + 1) for part in inside if isinstance(part, dict | list)]


def _digits(number: float) -> int:
    """Return the significant decimal digits of `number` as an integer: 75 for 7.50 and 7500."""
    return abs(int("".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0") or 0))


# --- parts of Lark ------------------------------------------------------------------------------------------------


class Literals:
    """Converter of texts to Lark expressions, for one tokenizer. Special tokens in a text become tokens of the grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = sorted(tokenizer.special_ids)
        self._special = {name: id for name, id in zip(tokenizer.token_strings(ids), ids, strict=True) if name}
        names = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def __contains__(self, text: str) -> bool:
        """Return True if `text` is a special token."""
        return text in self._special

    def __call__(self, text: str) -> str:
        pieces = [text] if self._pattern is None else self._pattern.split(text)
        found = self._special
        return (
            " ".join(f"<[{found[piece]}]>" if piece in found else json.dumps(piece) for piece in pieces if piece)
            or '""'
        )


# --- GBNF ---------------------------------------------------------------------------------------------------------


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
    """Convert the grammar `text` from GBNF to Lark syntax. Raises ValueError or an error of llguidance's converter."""
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
        raise ValueError(f"{found[0]} is not a character")
    character = chr(number)
    if character in _MEANT or (number < 0x20 and character not in _ESCAPED):
        return f"\\x{number:02x}"
    return _ESCAPED.get(character, character)
