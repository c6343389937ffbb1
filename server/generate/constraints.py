"""Wishes: the structured output that a request asks for, whichever of its fields says so, as one grammar."""

from __future__ import annotations

from typing import NamedTuple

from runtime.api import MatcherFactory
from server.errors import InvalidRequest
from server.loaded.chat_format import Reading
from server.loaded.model import Grammar, LoadedModel
from server.schema import (
    ChatRequest,
    GenerationRequest,
    JsonObject,
    JsonSchemaFormat,
    NamedTool,
    StructuralTagFormat,
    StructuredOutputs,
)
from server.structured.after_reasoning import after_reasoning
from server.structured.budget import Marks, thinking_budget
from server.structured.chats import ChatForm, Function
from server.structured.grammar import (
    ANY_OBJECT,
    WHITESPACE,
    Choice,
    GrammarError,
    JsonSchema,
    Regex,
    Rules,
)
from server.structured.tags import StructuralTag
from server.text.tools.registry import name_of


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


async def forms_of(
    served: LoadedModel, request: GenerationRequest, reading: Reading | None = None
) -> tuple[MatcherFactory, ...]:
    """What holds an answer to the form that `request` wants, none where it leaves that open. `reading`: how it will be read,
    where it is more than text: the form is that of what follows the reasoning, calls are in the model's dialect.

    Raises InvalidRequest."""
    wish = wish_of(request)
    if reading is not None and isinstance(request, ChatRequest):
        wish = _in_chat(request, reading, wish)
    forms: list[MatcherFactory] = []
    if wish is not None:
        try:
            forms.append(_held_back(await served.grammars.factory(wish.grammar), served, reading))
        except GrammarError as error:
            raise InvalidRequest(f"{wish.param}: {error}", param=wish.param) from None
    if isinstance(request, ChatRequest) and (budget := request.thinking_token_budget) is not None and budget >= 0:
        marks = None if reading is None else _marks(reading)
        if marks is not None:
            forms.append(thinking_budget(budget, marks, served.tokenizer, served.engine.model.vocab_size))
    return tuple(forms)


# --- chats --------------------------------------------------------------------------------------------------------


def _in_chat(request: ChatRequest, reading: Reading, answer: Wish | None) -> Wish | None:
    """The form of a message, which may hold calls. `answer`: the wish for its text."""
    dialect, must_call = reading.dialect, request.must_call
    if dialect is None:
        return answer
    if must_call and answer is not None:
        raise InvalidRequest(f"tool_choice wants a call and {answer.param} a text", param="tool_choice")
    called = request.called_functions if reading.tools else []
    strict = any(function.strict for function in called)
    param = "tool_choice" if must_call else "tools" if strict else None
    if dialect.channels and request.continue_final_message:
        if param is not None:
            raise InvalidRequest(
                f"{param} wants a call where continue_final_message wants more of an answer", param=param
            )
        return answer
    if param is None and answer is None:
        return None
    form = ChatForm(
        name_of(dialect),
        tuple(Function(function.name, function.parameters or {"type": "object"}) for function in called),
        must_call,
        reading.parallel and not isinstance(request.tool_choice, NamedTool),
        None if answer is None else answer.grammar,
    )
    return Wish(form, answer.param if answer is not None else param or "tools")


def _held_back(make: MatcherFactory, served: LoadedModel, reading: Reading | None) -> MatcherFactory:
    """Until the reasoning is over."""
    if reading is None or reading.tags is None:
        return make
    tags = reading.tags
    return after_reasoning(
        make, served.tokenizer, served.engine.model, opens=tags.opens, closes=tags.closes, begun=reading.begun
    )


def _marks(reading: Reading) -> Marks | None:
    if reading.tags is not None:
        pairs = tuple(zip(reading.tags.opens, reading.tags.closes, strict=True))
        return Marks(pairs, begun=reading.begun)
    channels = None if reading.dialect is None else reading.dialect.channels
    if channels is None:
        return None
    return Marks(((channels.reasoning, channels.end),), again=channels.begin)
