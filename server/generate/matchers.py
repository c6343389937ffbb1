"""Matchers for a request's output constraints: text format, tool calls, reasoning budget and bad words.

In a chat, a constraint applies after the reasoning, and tool calls have the model's own format."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from runtime.api import MatcherFactory
from server.generate.bad_words import forbid
from server.generate.request import CONTINUE, TOOL_CHOICE, TOOLS, Chat, GenerateRequest, OnlyFunction, OutputConstraint
from server.generate.structured.after_reasoning import after_reasoning
from server.generate.structured.budget import ReasoningMarkers, thinking_budget
from server.generate.structured.chats import ChatGrammar, FunctionRule
from server.generate.structured.grammar import GrammarError
from server.http.call import Call
from server.http.errors import Field, InvalidRequest
from server.models.chat_format import OutputParser
from server.models.model import LoadedModel
from server.text.tools.registry import name_of


class Matchers(NamedTuple):
    """Matcher factories of one request. `param`: name of the field that constrains the output, or None."""

    factories: tuple[MatcherFactory, ...]
    param: str | None


async def matchers_for(
    loaded: LoadedModel, call: Call, request: GenerateRequest, output_parser: OutputParser | None = None
) -> Matchers:
    """Return the matcher factories for the constraints of `request`. `output_parser`: parser of the answer, None for plain text.

    Raises InvalidRequest."""
    constraint = request.constraint
    if output_parser is not None and isinstance(request.prompt, Chat):
        constraint = _in_chat(request.prompt, output_parser, constraint)
    found: list[MatcherFactory] = []
    if constraint is not None:
        try:
            make = await loaded.grammars.factory(constraint.grammar, call.caller)
            found.append(_after_reasoning(make, loaded, output_parser))
        except GrammarError as error:
            raise InvalidRequest(constraint.param, f": {error}", param=constraint.param) from None
    budget = request.thinking_token_budget
    if budget is not None and budget >= 0:
        markers = None if output_parser is None else _reasoning_markers(output_parser)
        if markers is not None:
            found.append(thinking_budget(budget, markers, loaded.tokenizer, loaded.engine.model.vocab_size))
    if request.sampling.bad_words:
        encode = partial(loaded.tokenizer.encode, add_special_tokens=False)
        found.append(forbid(request.sampling.bad_words, encode, loaded.engine.model.vocab_size))
    return Matchers(tuple(found), None if constraint is None else constraint.param)


# --- chats --------------------------------------------------------------------------------------------------------


def _in_chat(chat: Chat, output_parser: OutputParser, answer: OutputConstraint | None) -> OutputConstraint | None:
    """Return the constraint of a chat answer that may contain tool calls. `answer`: constraint of the answer's text."""
    tool_parser, must_call = output_parser.tool_parser, chat.must_call
    if tool_parser is None:
        return answer
    if must_call:
        answer = None  # it is a form for text, of which there will be none
    called = chat.callable_functions if output_parser.tools else ()
    strict = any(function.strict for function in called)
    param: Field | None = TOOL_CHOICE if must_call else TOOLS if strict else None
    if tool_parser.channels and chat.continue_final_message:
        if param is not None:
            raise InvalidRequest(param, " forces a call, which contradicts ", CONTINUE, param=param)
        return answer
    if param is None and answer is None:
        return None
    grammar = ChatGrammar(
        name_of(tool_parser),
        tuple(
            FunctionRule(function.name, function.parameters or {"type": "object"}, function.input_grammar)
            for function in called
        ),
        must_call,
        output_parser.parallel and not isinstance(chat.tool_choice, OnlyFunction),
        None if answer is None else answer.grammar,
    )
    return OutputConstraint(grammar, answer.param if answer is not None else param or TOOLS)


def _after_reasoning(make: MatcherFactory, loaded: LoadedModel, output_parser: OutputParser | None) -> MatcherFactory:
    """Wrap `make` so that its matchers apply only after the reasoning."""
    if output_parser is None or output_parser.tags is None:
        return make
    tags = output_parser.tags
    model, is_open = loaded.engine.model, output_parser.reasoning_open
    return after_reasoning(make, loaded.tokenizer, model, opens=tags.opens, closes=tags.closes, reasoning_open=is_open)


def _reasoning_markers(output_parser: OutputParser) -> ReasoningMarkers | None:
    if output_parser.tags is not None:
        pairs = tuple(zip(output_parser.tags.opens, output_parser.tags.closes, strict=True))
        return ReasoningMarkers(pairs, reasoning_open=output_parser.reasoning_open)
    channels = None if output_parser.tool_parser is None else output_parser.tool_parser.channels
    if channels is None:
        return None
    return ReasoningMarkers(((channels.reasoning, channels.end),), again=channels.begin)
