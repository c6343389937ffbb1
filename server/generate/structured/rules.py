"""Builder of Lark grammar rules, which a tool parser uses to describe its calls.

Free text extends to the next marker. Values between tags match their schema. Known gap: a string inside JSON between tags can
contain the closing tag, unless the closing tag is a special token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import llguidance

from server.generate.structured.grammar import GrammarError, JsonSchema, Literals, Regex, Rules, check_length
from server.generate.structured.json_quoting import quoted
from server.http.errors import clip
from server.models.tokenizer import Tokenizer
from server.text.tools.call_format import CallFormat
from server.text.tools.schemas import Schema, as_schema, dereferenced

# By which a schema is made of others.
COMBINING = frozenset({"anyOf", "oneOf", "allOf", "not", "if", "$ref"})
# What a list of an object's properties alone cannot say.
_NOT_LISTED = COMBINING | {
    "const", "enum", "minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas",
}  # fmt: skip
_TELLING_NOTHING = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_ANY = r"ANY: /(?s:.*)/"
_GRAMMAR = "x-grammar"  # of a schema: a string's own grammar, by its name and in Lark's syntax
_SPACE = '" "?'
MAX_KINDS = 20_000  # that schemas come apart into: references make few words mean many
_MAX_ALTERNATIVES_DEPTH = 32


class RuleWriter:
    """Builder of Lark rules. It implements `text.tools.call_format.Writer`, which documents most methods."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._literals = Literals(tokenizer)
        self._rules = [_ANY]
        self._made: dict[str, str] = {}  # body to name
        self._num_kinds = 0
        self.others: list[dict[str, Any]] = []  # grammars that the rules refer to
        self.root: Schema = {}  # to which references are

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules])

    def fitting(self, call_formats: Sequence[CallFormat]) -> CallFormat:
        return next(one for one in call_formats if one.only_with is None or one.only_with in self._literals)

    # --- expressions ----------------------------------------------------------------------------------------------

    def rule(self, body: str, options: str = "") -> str:
        return self._define(f"r{len(self._rules)}", options, body)

    def _terminal(self, body: str) -> str:
        return self._define(f"T{len(self._rules)}", "", body)

    def _define(self, name: str, options: str, body: str) -> str:
        definition = f"{options}: {body}"
        if definition not in self._made:
            self._made[definition] = name
            self._rules.append(f"{name}{definition}")
        return self._made[definition]

    def other(self, prefix: str, lark: str) -> str:
        """Add the separate grammar `lark`. Return its name, which begins with `prefix`; rules refer to it by this name."""
        name = f"{prefix}{len(self.others)}"
        self.others.append({"name": name, "lark_grammar": lark})
        return name

    def text(self, text: str) -> str:
        return self._literals(text)

    def either(self, expressions: Iterable[str]) -> str:
        return f"({' | '.join(expressions)})"

    def free(self, markers: Sequence[str], not_first: str = "") -> str:
        """Return an expression for text that contains none of `markers`. If `not_first` is given, the text must not begin with
        white space or with a character of `not_first`."""
        spelled = [marker for marker in markers if marker not in self._literals]
        bodies = ["ANY"] if not not_first else [f"/[^{_in_class(not_first)}\\s](?s:.*)/"]
        if spelled:
            bodies.append(f"~(ANY {self.either(map(json.dumps, spelled))} ANY)")
        return "ANY" if bodies == ["ANY"] else self._terminal(" & ".join(bodies))

    def until(self, marker: str, others: Sequence[str] = ()) -> str:
        """Return an expression for text up to and including the first `marker`. The text contains none of `others`. A marker
        that is not a special token requires a lazy rule."""
        body, written = self.free(others), self.text(marker)
        return f"{body} {written}" if written.startswith("<[") else self.rule(f"{body} {written}", "[lazy]")

    def text_schema(self, grammar: Regex | Rules) -> Schema:
        """Return a JSON schema for strings that match `grammar`. Pass it to `json` or `raw`."""
        if isinstance(grammar, Regex):
            return {"type": "string", "pattern": f"^(?:{grammar.pattern})$"}
        lark = grammar.lark()
        return {"type": "string", _GRAMMAR: (self.other("g", lark), lark)}

    def json(self, schema: Schema) -> str:
        if _GRAMMAR in schema:
            return self._quoted(schema)
        members = schema.get("properties")
        if isinstance(members, dict) and any(_GRAMMAR in as_schema(member) for member in members.values()):
            ((name, member),) = members.items()
            return (
                f"{self.text('{' + json.dumps(name) + ':')} {_SPACE} {self._quoted(as_schema(member))} {self.text('}')}"
            )
        definitions = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.rule(f"%json {json.dumps(JsonSchema({**definitions, **schema}).checked())}")

    def _quoted(self, schema: Schema) -> str:
        name = f"q{schema[_GRAMMAR][0]}"
        if all(other["name"] != name for other in self.others):
            self.others.append({"name": name, "lark_grammar": quoted(schema[_GRAMMAR][1])})
        quote = json.dumps('"')
        return f"{quote} @{name} {quote}"

    def raw(self, schema: Schema, end: str, marker: str) -> str:
        return self.either([self._raw(kind, end, marker) for kind in self.kinds(schema)])

    def _raw(self, schema: Schema, end: str, marker: str) -> str:
        if _GRAMMAR in schema:
            return f"@{schema[_GRAMMAR][0]} {self.text(end)}"
        if "enum" in schema:
            texts = [value if isinstance(value, str) else json.dumps(value) for value in schema["enum"]]
            return f"{self.either(map(self.text, texts))} {self.text(end)}"
        if schema.get("type") != "string":
            return f"{self.json(schema)} {self.text(end)}"
        if marker in self._literals:  # which no text can spell, so that nothing needs to be held back for it
            return f"{self._string(schema, [])} {self.text(end.lstrip(chr(10)))}"
        return self.rule(f"{self._string(schema, [marker])} {self.text(end)}", "[lazy]")

    def _string(self, schema: Schema, without: Sequence[str]) -> str:
        """Return a rule for an unquoted string that matches `schema` and contains none of `without`."""
        if unwritten := schema.keys() & COMBINING:
            raise GrammarError(f"{', '.join(unwritten)} is not supported for strings by this model's call format")
        free = self.free(without)
        patterns = patterns_of(schema)
        if free != "ANY":
            patterns.append(free)
        return "ANY" if not patterns else self._terminal(" & ".join(patterns))

    # --- schemas --------------------------------------------------------------------------------------------------

    def kinds(self, schema: Schema, depth: int = 0) -> list[Schema]:
        self._num_kinds += 1
        if self._num_kinds > MAX_KINDS or depth > _MAX_ALTERNATIVES_DEPTH:
            raise GrammarError("the schema has too many alternatives or endless recursion")
        schema = dereferenced(schema, self.root)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                rest = {key: value for key, value in schema.items() if key != name}
                branches = [_both(rest, as_schema(branch)) for branch in schema[name]]
                return [kind for branch in branches for kind in self.kinds(branch, depth + 1)]
        if "const" in schema:
            return [{"enum": [schema["const"]]}]
        if isinstance(schema.get("enum"), list):
            return [{"enum": schema["enum"]}]
        types = schema.get("type")
        if isinstance(types, list):
            return [{**schema, "type": each} for each in types]
        if types is None and not schema.keys() & COMBINING:
            types = "object" if "properties" in schema else "array" if "items" in schema else "string"
        return [schema if types is None else {**schema, "type": types}]

    def members(self, schema: Schema, separator: str, write: Callable[[str, Schema], str]) -> str:
        schema = self._object(schema)
        properties, required = as_schema(schema.get("properties")), schema.get("required") or []
        first = following = ""  # what may come yet, if nothing has been written so far and if something has
        between = self.text(separator) if separator else ""
        for name, described in reversed(list(properties.items())):
            one = self.rule(write(name, as_schema(described)))
            bodies = f"{one} {following}", f"{between} {one} {following}"
            if name in required:
                first, following = map(self.rule, bodies)
            else:
                first, following = (
                    self.rule(f"{body} | {other or chr(34) * 2}")
                    for body, other in zip(bodies, (first, following), strict=True)
                )
        return first

    def _object(self, schema: Schema) -> Schema:
        """Resolve an object's schema. Raises GrammarError unless the schema lists the object's properties."""
        schema = dereferenced(schema, self.root)
        listed = as_schema(schema.get("properties"))
        required = schema.get("required") or []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise GrammarError("required must be a list of names")
        open_ended = schema.get("additionalProperties") not in (None, False, True) or "patternProperties" in schema
        if (open_ended and not listed) or schema.keys() & _NOT_LISTED or set(required) - listed.keys():
            raise GrammarError("this model's call format requires a schema that lists all arguments as properties")
        return schema


def _both(schema: Schema, branch: Schema) -> Schema:
    """Merge a schema with one branch of its anyOf. Raises GrammarError if both define the same keyword differently."""
    twice = schema.keys() & branch.keys() - _TELLING_NOTHING
    if any(schema[name] != branch[name] for name in twice):
        raise GrammarError(
            f"anyOf beside the same keyword ({', '.join(twice)}) is not supported by this model's call format"
        )
    return {**schema, **branch}


def _in_class(characters: str) -> str:
    """Escape `characters` for a character class of a regular expression."""
    return "".join(f"\\{char}" for char in characters)


# --- strings without quotes ---------------------------------------------------------------------------------------


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
    """Convert the constraints of a string schema to Lark patterns. The list is empty if any text is valid. Raises GrammarError."""
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
        raise GrammarError(f"{name} must be a number of characters")
    return "" if count is None else str(count)


def _unanchored(pattern: str) -> str:
    """Convert a JSON schema pattern, which may match anywhere in a text, to a pattern that matches the whole text."""
    check_length("a pattern", pattern, MAX_PATTERN_CHARS)
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern[begins : len(pattern) - ends]
    if (begins or ends) and _has_alternatives(body):
        raise GrammarError(f"the pattern {clip(pattern)!r} needs parentheses around the part between its anchors")
    return llguidance.regex_to_lark(f"{'' if begins else '(?s:.*)'}({body}){'' if ends else '(?s:.*)'}", "")


def _has_alternatives(pattern: str) -> bool:
    rest = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "", pattern)
    while (shorter := re.sub(r"\([^()]*\)", "", rest)) != rest:
        rest = shorter
    return "|" in rest


def _format(name: object) -> str:
    if not isinstance(name, str) or name not in _FORMATS:
        raise GrammarError(f"this model's call format does not support the string format {clip(json.dumps(name))}")
    return llguidance.regex_to_lark(_FORMATS[name], "")
