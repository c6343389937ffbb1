"""Chat templates: a conversation as the text its model was trained on.

A template is a program that came with a model's files: it runs in Jinja's immutable sandbox, with the options, filters and
globals transformers gives it, so that what renders there renders the same here; within bounds (`template_bounds.py`). It sees
plain JSON data only. Compiled once; rendering is safe in any thread. Knows no token ids and no HTTP: what a template refuses
becomes a PromptError."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from server.models.control_tokens import Shield
from server.models.template_bounds import MAX_RENDER_S, BoundedEnvironment, TemplateTooLong

Message = Mapping[str, Any]
N = TypeVar("N", bound=nodes.Node)

NO_TEMPLATE: Final = (
    "this model has no chat template: send a prompt to /v1/completions, "
    "or serve the model by itself with --chat-template FILE"
)


class PromptError(ValueError):
    """A conversation that cannot become a prompt, for a reason the client can read."""


class EndlessTemplate(PromptError):
    """The template takes longer than it may, or writes more: a fault of its own."""


class ChatTemplate:
    """`source`: a template, several by name ("default", "tool_use", …), or None for a model without.
    `named_tokens`: the tokenizer's special tokens by name, which templates write ("bos_token": "<s>").
    `now`: what `strftime_now` reads. `clock`: seconds of the thread that renders.

    Raises PromptError for a source that is no template."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        named_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self.source = sources.get("default", "")  # of the template that conversations without tools get
        environment = _environment(now, clock)
        self.is_slow = False  # whether it was seen to take long on little
        self._named_tokens = dict(named_tokens or {})
        self._templates = {name: self._compiled(environment, name, text) for name, text in sources.items()}

    def __bool__(self) -> bool:
        """Whether there is any template."""
        return bool(self._templates)

    def reads(self, *variables: str, with_tools: bool = False) -> bool:
        """Whether the template (the one for tools, if asked for) looks at any of these variables."""
        template = self._find(with_tools)
        return template is not None and not template.variables.isdisjoint(variables)

    def render(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **kwargs: Any,
    ) -> str:
        """`messages`: OpenAI's, as parsed JSON: content a string or a list of text parts, tool-call arguments a JSON
        string or an object. With `tools`, the template named "tool_use" is taken where there is one. `kwargs` are further
        variables for the template (chat_template_kwargs); those it does not read do nothing. `continue_final`: the text
        ends where the last message's content does.

        The text holds whatever the template writes of BOS: encode it with `add_special_tokens=False`.
        Raises PromptError where there is no template, or it refuses or fails on these messages."""
        text, _ = self.render_shielded(
            None, messages, MAX_RENDER_S, tools, add_generation_prompt, documents, continue_final, **kwargs
        )
        return text

    def render_shielded(
        self,
        shield: Shield | None,
        messages: Sequence[Message],
        limit_s: float = MAX_RENDER_S,
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        **kwargs: Any,
    ) -> tuple[str, str | None]:
        """What `render` gives; and the same with aliases for the template's control tokens, where the client wrote some.
        `limit_s`: of the thread's time, that it may take."""
        template = self._choose(with_tools=bool(tools))
        if "messages" in kwargs:
            raise PromptError("chat_template_kwargs may not replace the messages")
        if not messages:
            raise PromptError("the conversation is empty: at least one message is needed")
        seen = [_as_seen(message, template) for message in messages]

        def written(given: Any) -> str:
            seen, tools, documents, kwargs = given
            if continue_final:
                seen[-1] = _with_end(seen[-1])
            variables = {**self._named_tokens, **kwargs}
            variables |= {
                "messages": seen, "tools": tools, "documents": documents,
                "add_generation_prompt": add_generation_prompt and not continue_final,
            }  # fmt: skip
            try:
                text = template.render(variables, limit_s)
            except PromptError as error:
                raise type(error)(str(error) if shield is None else shield.reveal(str(error))[0]) from error
            if continue_final:
                text, end, _ = text.rpartition(_END)
                if not end:
                    raise PromptError(
                        "the chat template does not write the last message's content, so it cannot be continued"
                    )
            return text

        given = [seen, tools, documents, kwargs]
        return (written(given), None) if shield is None else shield.around(given, written)

    def writes(self, text: str, messages: Sequence[Message]) -> bool:
        """Whether the template takes `messages`, and `text`, which stands in one of them, comes out."""
        try:
            return text in self.render_shielded(None, messages, _PROBE_S)[0]
        except PromptError:
            return False

    def _compiled(self, environment: BoundedEnvironment, name: str, source: str) -> _Compiled:
        compiled = _Compiled.of(environment, name, source)
        if "tool_calls" not in compiled.words or compiled.writes_probe(self._named_tokens):
            return compiled
        other = dataclasses.replace(compiled, arguments_as_text=True)
        return other if other.writes_probe(self._named_tokens) else compiled

    def _find(self, with_tools: bool) -> _Compiled | None:
        names = ("tool_use", "default") if with_tools else ("default",)
        return next((self._templates[name] for name in names if name in self._templates), None)

    def _choose(self, with_tools: bool) -> _Compiled:
        if not self._templates:
            raise PromptError(NO_TEMPLATE)
        if found := self._find(with_tools):
            return found
        names = ", ".join(sorted(self._templates))
        raise PromptError(
            f"the model's chat templates ({names}) include no default one: serve it by itself with --chat-template FILE"
        )


# --- Jinja as transformers sets it up -----------------------------------------------------------------------------


class _Refusal(jinja2.TemplateError):
    """`raise_exception` in a template."""


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """`{% generation %}` marks what training masks; for a prompt it is a scope and nothing more."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment(now: Callable[[], datetime], clock: Callable[[], float]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        clock, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


@dataclass(frozen=True, slots=True)
class _Compiled:
    """`content`: the form of message content the template reads. `variables`: names it reads, its own among them.
    `words`: every word of its source. `arguments_as_text`: it writes a call's arguments as they are, and so wants JSON
    where others want an object."""

    environment: BoundedEnvironment
    template: jinja2.Template
    content: ContentForm
    variables: frozenset[str]
    words: frozenset[str]
    arguments_as_text: bool = False

    @classmethod
    def of(cls, environment: BoundedEnvironment, name: str, source: str) -> _Compiled:
        try:
            tree = environment.parse(source)
            variables = frozenset(node.name for node in _of(tree, nodes.Name) if node.ctx == "load")
            words = frozenset(re.findall(r"\w+", source))
            content = ContentForm.of(tree)
            return cls(environment, environment.template(tree), content, variables, words)
        except jinja2.TemplateSyntaxError as error:
            raise PromptError(f"the chat template {name!r} is broken, line {error.lineno}: {error.message}") from error

    def render(self, variables: dict[str, Any], limit_s: float) -> str:
        try:
            return self.environment.render(self.template, variables, limit_s)
        except TemplateTooLong as error:
            raise EndlessTemplate(f"the chat template does not come to an end on these messages: {error}") from error
        except _Refusal as error:
            raise PromptError(error.message or "the chat template refuses these messages") from error
        except Exception as error:  # a template is a program: it may fail with anything
            raise PromptError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error

    def writes_probe(self, named_tokens: Mapping[str, str]) -> bool:
        """Whether a call's arguments come out as they should: what that takes is seen by trying."""
        seen = [_as_seen(message, self) for message in _PROBE]
        variables = {**named_tokens, "messages": seen, "tools": _PROBE_TOOLS, "add_generation_prompt": True}
        try:
            text = self.render(variables, _PROBE_S)
        except PromptError:
            return False
        # Not JSON inside a string, and not what Python makes of an object.
        return _PROBE_KEY in text and f'\\"{_PROBE_KEY}' not in text and f"'{_PROBE_KEY}" not in text


_PROBE_S: Final = 1.0  # whoever takes longer fails the same way when asked, and holds no start up
_PROBE_KEY: Final = "probed_argument"
_PROBE: Final[Sequence[Message]] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "probe", "arguments": f'{{"{_PROBE_KEY}": 1}}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "b"},
)
_PROBE_TOOLS: Final = (
    {
        "type": "function",
        "function": {"name": "probe", "description": "c", "parameters": {"type": "object", "properties": {}}},
    },
)


# --- messages as a template sees them -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContentForm:
    """`parts`: the template goes through a list of parts. `strings`: it takes a string too, or nothing else."""

    parts: bool
    strings: bool

    @classmethod
    def of(cls, tree: nodes.Template) -> ContentForm:
        """Read off the syntax tree: a loop over a message's content, or a look at its first part, means parts; a test
        `content is string` beside it means both."""
        names = _content_names(tree)
        parts = any(_is_content(_looped(loop.iter), names) for loop in _of(tree, nodes.For))
        parts = parts or any(_is_content(node, names) for node in _indexed(tree))
        tests = any(test.name == "string" and _is_content(test.node, names) for test in _of(tree, nodes.Test))
        return cls(parts=parts, strings=tests or not parts)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables that hold a message's content: so called (a macro's parameter, mostly) or assigned from it."""
    names = {"content"}
    assigned = [
        (node.target.name, node.node) for node in _of(tree, nodes.Assign) if isinstance(node.target, nodes.Name)
    ]
    while new := {name for name, value in assigned if _is_content(value, names)} - names:
        names |= new
    return names


_LIST_FILTERS: Final = {"list", "reverse", "selectattr", "rejectattr", "select", "reject", "map", "sort"}


def _looped(node: nodes.Node) -> nodes.Node:
    """What a loop goes through, without the slices and filters that leave a list a list."""
    while True:
        match node:
            case nodes.Filter(node=nodes.Expr() as inner, name=name) if name in _LIST_FILTERS:
                node = inner
            case nodes.Getitem(node=inner, arg=nodes.Slice()):
                node = inner
            case _:
                return node


def _indexed(tree: nodes.Template) -> Iterator[nodes.Node]:
    """X of every X[0].text and X[0]["type"]."""
    for node in [*_of(tree, nodes.Getattr), *_of(tree, nodes.Getitem)]:
        match node:
            case (
                nodes.Getattr(node=nodes.Getitem(node=whole, arg=nodes.Const(value=int())), attr="text" | "type")
                | nodes.Getitem(
                    node=nodes.Getitem(node=whole, arg=nodes.Const(value=int())), arg=nodes.Const(value="text" | "type")
                )
            ):
                yield whole


def _of(tree: nodes.Template, kind: type[N]) -> list[N]:
    return [node for node in tree.find_all(kind) if isinstance(node, kind)]


def _as_seen(message: Message, template: _Compiled) -> dict[str, Any]:
    """A message without its nulls (templates test for missing keys, not for None), content and arguments in the
    template's form."""
    form = template.content
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError("every message must be an object with a role")
    seen = {key: value for key, value in message.items() if value is not None}
    content = seen.get("content")
    if isinstance(content, str):
        if not form.strings:
            seen["content"] = [{"type": "text", "text": content}]
    elif content is not None:
        parts = [_part_of(part) for part in _parts_of(content)]
        texts = (part["text"] if part["type"] == "text" else MEDIA_MARKS[part["type"]] for part in parts)
        seen["content"] = parts if form.parts else "\n".join(texts)
    if "tool_calls" in seen:
        with_arguments = _with_text if template.arguments_as_text else _with_object
        seen["tool_calls"] = [with_arguments(call) for call in seen["tool_calls"]]
        # Templates add the calls to it.
        seen.setdefault("content", "" if form.strings else [])
    return _with_reasoning(seen)


_END: Final = "\ue000continued-here\ue000"
# What stands in a text for a part that is none, where the template takes no parts and so writes no placeholder for it.
MEDIA_MARKS: Final[Mapping[str, str]] = {name: f"\ue000{name}-here\ue000" for name in ("image", "audio", "video")}


def _with_end(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content ends with a mark, by which to find that end in the rendered text."""
    content = message.get("content", "")
    if isinstance(content, str):
        return {**message, "content": content + _END}
    if not content:
        return {**message, "content": [{"type": "text", "text": _END}]}
    last = content[-1]
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + _END}]}


def _parts_of(content: object) -> Sequence[object]:
    if isinstance(content, list | tuple):
        return content
    raise PromptError("message content must be a string or a list of parts")


def _part_of(part: object) -> dict[str, str]:
    """A part as templates read it: a text, or the place of something else."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return {"type": str(kind)} if kind in MEDIA_MARKS else {"type": "text", "text": _text_of(part)}


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise PromptError(f"content parts of type {kind!r} are not supported: only text")
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise PromptError(f"a content part of type {kind!r} has no text")
    return text


def _with_text(call: object) -> object:
    """`call` with its arguments as text, for templates that write them as they come."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}}


def _with_object(call: object) -> object:
    """Clients send a tool call's arguments back as the JSON string they got; most templates write objects with `tojson`."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a turn's reasoning under one of two names, and clients send it under any of three."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
