"""Output constraints: what a request asks of its answer's text, calls, reasoning and words, as the matchers that hold it to that.

A constraint of a chat is one of what follows the reasoning; calls in it are in the model's own format."""

from __future__ import annotations

from functools import partial

from runtime.api import MatcherFactory
from server.errors import Field, InvalidRequest
from server.generate.bad_words import forbid
from server.generate.request import CONTINUE, TOOL_CHOICE, TOOLS, Chat, GenerateRequest, OnlyFunction, OutputConstraint
from server.loaded.chat_format import OutputParser
from server.loaded.model import Grammar, LoadedModel
from server.schema import StructuredOutputs
from server.structured.after_reasoning import after_reasoning
from server.structured.budget import ReasoningMarkers, thinking_budget
from server.structured.chats import ChatGrammar, Function
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


def structured_grammar(wanted: StructuredOutputs) -> Grammar:
    """The grammar that `wanted`, which has been checked, describes."""
    space = WHITESPACE if wanted.whitespace_pattern is None else wanted.whitespace_pattern
    if wanted.disable_any_whitespace:
        space = ""
    closed = bool(wanted.disable_additional_properties)
    if wanted.json is not None:
        return JsonSchema(wanted.json, space, closed)
    if wanted.regex is not None:
        return Regex(wanted.regex)
    if wanted.choice is not None:
        return Choice(tuple(wanted.choice))
    if wanted.grammar is not None:
        return Rules(wanted.grammar)
    if wanted.structural_tag is not None:
        return StructuralTag(wanted.structural_tag, space)
    return JsonSchema(ANY_OBJECT.schema, space)


async def constraints_for(
    served: LoadedModel, request: GenerateRequest, output_parser: OutputParser | None = None
) -> tuple[MatcherFactory, ...]:
    """What holds an answer to what `request` wants of it, none where it leaves that open. `output_parser`: how it will be
    read, where it is more than text.

    Raises InvalidRequest."""
    constraint = request.constraint
    if output_parser is not None and isinstance(request.prompt, Chat):
        constraint = _in_chat(request.prompt, output_parser, constraint)
    found: list[MatcherFactory] = []
    if constraint is not None:
        try:
            found.append(_after_reasoning(await served.grammars.factory(constraint.grammar), served, output_parser))
        except GrammarError as error:
            raise InvalidRequest(constraint.param, f": {error}", param=constraint.param) from None
    budget = request.thinking_token_budget
    if budget is not None and budget >= 0:
        markers = None if output_parser is None else _reasoning_markers(output_parser)
        if markers is not None:
            found.append(thinking_budget(budget, markers, served.tokenizer, served.engine.model.vocab_size))
    if request.sampling.bad_words:
        encode = partial(served.tokenizer.encode, add_special_tokens=False)
        found.append(forbid(request.sampling.bad_words, encode, served.engine.model.vocab_size))
    return tuple(found)


# --- chats --------------------------------------------------------------------------------------------------------


def _in_chat(chat: Chat, output_parser: OutputParser, answer: OutputConstraint | None) -> OutputConstraint | None:
    """The constraint of a message, which may hold calls. `answer`: of its text."""
    tool_parser, must_call = output_parser.tool_parser, chat.must_call
    if tool_parser is None:
        return answer
    if must_call and answer is not None:
        raise InvalidRequest(TOOL_CHOICE, " wants a call and ", answer.param, " a text", param=TOOL_CHOICE)
    called = chat.callable_functions if output_parser.tools else ()
    strict = any(function.strict for function in called)
    param: Field | None = TOOL_CHOICE if must_call else TOOLS if strict else None
    if tool_parser.channels and chat.continue_final_message:
        if param is not None:
            raise InvalidRequest(param, " wants a call where ", CONTINUE, " wants more of an answer", param=param)
        return answer
    if param is None and answer is None:
        return None
    grammar = ChatGrammar(
        name_of(tool_parser),
        tuple(Function(function.name, function.parameters or {"type": "object"}) for function in called),
        must_call,
        output_parser.parallel and not isinstance(chat.tool_choice, OnlyFunction),
        None if answer is None else answer.grammar,
    )
    return OutputConstraint(grammar, answer.param if answer is not None else param or TOOLS)


def _after_reasoning(make: MatcherFactory, served: LoadedModel, output_parser: OutputParser | None) -> MatcherFactory:
    """`make`'s matchers, which let reasoning pass."""
    if output_parser is None or output_parser.tags is None:
        return make
    tags = output_parser.tags
    model, is_open = served.engine.model, output_parser.reasoning_open
    return after_reasoning(make, served.tokenizer, model, opens=tags.opens, closes=tags.closes, reasoning_open=is_open)


def _reasoning_markers(output_parser: OutputParser) -> ReasoningMarkers | None:
    if output_parser.tags is not None:
        pairs = tuple(zip(output_parser.tags.opens, output_parser.tags.closes, strict=True))
        return ReasoningMarkers(pairs, reasoning_open=output_parser.reasoning_open)
    channels = None if output_parser.tool_parser is None else output_parser.tool_parser.channels
    if channels is None:
        return None
    return ReasoningMarkers(((channels.reasoning, channels.end),), again=channels.begin)
