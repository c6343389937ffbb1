"""Wishes: the structured output that a request asks for, whichever of its fields says so, as one grammar."""

from __future__ import annotations

from typing import NamedTuple

from runtime.api import MatcherFactory
from server.errors import InvalidRequest
from server.schema import GenerationRequest, JsonObject, JsonSchemaFormat, StructuralTagFormat, StructuredOutputs
from server.structured.compiler import Grammars
from server.structured.grammar import (
    ANY_OBJECT,
    WHITESPACE,
    Choice,
    Grammar,
    GrammarError,
    JsonSchema,
    Regex,
    Rules,
)
from server.structured.tags import StructuralTag


class Wish(NamedTuple):
    """`param`: the field it came from."""

    grammar: Grammar
    param: str


def wish_of(request: GenerationRequest) -> Wish | None:
    """What `request`, which has been checked, asks for."""
    format = request.response_format
    if isinstance(format, JsonObject):
        return Wish(ANY_OBJECT, "response_format")
    if isinstance(format, JsonSchemaFormat):
        return Wish(JsonSchema(format.json_schema.schema), "response_format.json_schema.schema")
    if isinstance(format, StructuralTagFormat):
        tag = {"format": format.format} if format.structures is None else {
            "structures": format.structures, "triggers": format.triggers
        }  # fmt: skip
        return Wish(StructuralTag(tag), "response_format")
    if request.structured_outputs is not None:
        name = request.structured_outputs.asked[0]
        return Wish(_grammar(request.structured_outputs), f"structured_outputs.{name}")
    guided = request.guided
    return None if guided is None else Wish(_grammar(guided), f"guided_{guided.asked[0]}")


def _grammar(asked: StructuredOutputs) -> Grammar:
    space = WHITESPACE if asked.whitespace_pattern is None else asked.whitespace_pattern
    if asked.disable_any_whitespace:
        space = ""
    closed = bool(asked.disable_additional_properties)
    if asked.json is not None:
        return JsonSchema(asked.json, space, closed)
    if asked.regex is not None:
        return Regex(asked.regex)
    if asked.choice is not None:
        return Choice(tuple(asked.choice))
    if asked.grammar is not None:
        return Rules(asked.grammar)
    if asked.structural_tag is not None:
        return StructuralTag(asked.structural_tag, space)
    return JsonSchema(ANY_OBJECT.schema, space)


async def forms_of(grammars: Grammars, request: GenerationRequest) -> tuple[MatcherFactory, ...]:
    """One factory, or none where `request` leaves the form of its answer open.

    Raises InvalidRequest."""
    wish = wish_of(request)
    if wish is None:
        return ()
    try:
        return (await grammars.factory(wish.grammar),)
    except GrammarError as error:
        raise InvalidRequest(f"{wish.param}: {error}", param=wish.param) from None
