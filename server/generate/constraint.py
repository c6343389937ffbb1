"""What an answer's text has to look like, by what clients say: each form as an OutputConstraint; and the one that several are.

An adapter names the form and the field; what grammar it becomes is nobody's business above."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from server.generate.request import OutputConstraint
from server.generate.structured.grammar import ANY_OBJECT, Choice, JsonSchema, Regex, Rules, Whitespace
from server.generate.structured.tags import StructuralTag
from server.http.errors import InvalidRequest
from server.http.schema import StructuredOutputs
from server.models.model import Grammar


def json_schema(schema: Any, param: str) -> OutputConstraint:
    """JSON that satisfies `schema`: an object, or one as JSON text."""
    return OutputConstraint(JsonSchema(schema), param)


def json_object(param: str) -> OutputConstraint:
    """Any object."""
    return OutputConstraint(ANY_OBJECT, param)


def regex(pattern: str, param: str) -> OutputConstraint:
    """A text that the regular expression `pattern` matches."""
    return OutputConstraint(Regex(pattern), param)


def rules(text: str, param: str) -> OutputConstraint:
    """A text of a grammar, in Lark's syntax or GBNF."""
    return OutputConstraint(Rules(text), param)


def structural_tag(tag: Mapping[str, Any], param: str) -> OutputConstraint:
    """Text in which some strings open a part with a form of its own, as xgrammar describes it."""
    return OutputConstraint(StructuralTag(tag), param)


def _grammar_of(wanted: StructuredOutputs) -> Grammar:
    """The grammar that `wanted`, which has been checked, describes."""
    whitespace, closed = _whitespace(wanted), wanted.disable_additional_properties is not False
    if wanted.regex is not None:
        return Regex(wanted.regex)
    if wanted.choice is not None:
        return Choice(tuple(wanted.choice))
    if wanted.grammar is not None:
        return Rules(wanted.grammar)
    if wanted.structural_tag is not None:
        return StructuralTag(wanted.structural_tag, whitespace, wanted.whitespace_pattern, closed)
    schema = ANY_OBJECT.schema if wanted.json is None else wanted.json
    return JsonSchema(schema, whitespace, wanted.whitespace_pattern, closed)


def one_constraint(
    found: Sequence[OutputConstraint], wanted: Mapping[str, StructuredOutputs]
) -> OutputConstraint | None:
    """The constraint that all of these are: clients say the same thing twice, to servers old and new. `found`: of the API's own
    fields, `wanted`: of others, by their names; one that is only a style says how the others' JSON is written.

    Raises InvalidRequest where they are different ones."""
    constraints = list(found)
    constraints += (OutputConstraint(_grammar_of(one), param) for param, one in wanted.items() if not one.is_style)
    for param, style in wanted.items():
        if style.is_style:
            constraints = [_styled(one, style) for one in constraints]
            if not any(isinstance(one.grammar, JsonSchema | StructuralTag) for one in constraints):
                raise InvalidRequest(f"{param} says how JSON is written, and no field asks for JSON", param=param)
    if not constraints:
        return None
    first, *others = constraints
    if any(_meaning(one.grammar) != _meaning(first.grammar) for one in others):
        names = " and ".join(dict.fromkeys(one.param.partition(".")[0] for one in constraints))
        raise InvalidRequest(f"{names} each ask for a form, and not the same; give one of them", param=first.param)
    return first


def _styled(constraint: OutputConstraint, style: StructuredOutputs) -> OutputConstraint:
    if not isinstance(constraint.grammar, JsonSchema | StructuralTag):
        return constraint
    pattern, closed = style.whitespace_pattern, style.disable_additional_properties is not False
    changed = structs.replace(constraint.grammar, whitespace=_whitespace(style), pattern=pattern, closed=closed)
    return constraint._replace(grammar=changed)


def _whitespace(wanted: StructuredOutputs) -> Whitespace:
    if wanted.disable_any_whitespace is None:
        return "compact"
    return "none" if wanted.disable_any_whitespace else "any"


def _meaning(grammar: Grammar) -> object:
    """What two grammars that say the same have in common."""
    if not isinstance(grammar, JsonSchema) or not isinstance(grammar.schema, str):
        return grammar
    try:
        return structs.replace(grammar, schema=json.loads(grammar.schema))
    except (ValueError, RecursionError):
        return grammar
