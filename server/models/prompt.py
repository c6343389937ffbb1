"""Chat templates: render a conversation in the text format on which a model was trained.

A template is untrusted code. It runs in Jinja's immutable sandbox with the options, filters and globals of transformers, so its
output is the same as in transformers. CPU time and output size of a rendering are limited. The template receives plain JSON data
only. It is compiled once; rendering is thread-safe. This module is independent of token ids and HTTP. An error that a template
raises becomes a PromptError."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.models.control_tokens import Shield
from server.models.template_source import ContentForm, GenerationTag, TemplateRefusal, nodes_of, raise_exception, tojson

Message = Mapping[str, Any]

MAX_RENDER_S = 10.0  # 500,000 messages take half of it
MAX_CHARS = 64 << 20  # four times the largest body
MAX_BITS = 1 << 16  # of a power
_TICKS = 64  # turns and calls between two looks at the clock
NO_TEMPLATE: Final = (
    "this model has no chat template: send a prompt to /v1/completions, "
    "or serve the model by itself with --chat-template FILE"
)


class PromptError(ValueError):
    """Error: a conversation cannot be rendered as a prompt. The message is for the client."""


class EndlessTemplate(PromptError):
    """Error: the template exceeds its time or output limit."""


class ChatTemplate:
    """Chat template of a model. `source`: a template, several templates by name ("default", "tool_use", …), or None.
    `named_tokens`: the tokenizer's special tokens by name ("bos_token": "<s>"). `now`: returns the time for `strftime_now`.
    `clock`: returns CPU seconds of the rendering thread. Raises PromptError for an invalid template."""

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
        """Return whether the model has any template."""
        return bool(self._templates)

    def reads(self, *variables: str, with_tools: bool = False) -> bool:
        """Return whether the template reads any of these variables. `with_tools`: check the template that is used with tools."""
        template = self._find(with_tools)
        return template is not None and not template.variables.isdisjoint(variables)

    def switches(self, is_on: bool, *, with_tools: bool) -> dict[str, bool]:
        """Return the variables that turn reasoning on or off in this template, each set to `is_on`."""
        return {name: is_on for name in ("enable_thinking", "thinking") if self.reads(name, with_tools=with_tools)}

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """Return the text of `messages`, without a shield. `options`: keyword arguments of `render_shielded`."""
        return self.render_shielded(None, messages, MAX_RENDER_S, **options)[0]

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
        """Return two texts: `messages` as text, and the same text with aliases for the template's control tokens. The second is
        None unless the client's texts contain control tokens.

        `messages`: messages in OpenAI's format, as parsed JSON. Content is a string or a list of texts and media placeholders.
        Tool-call arguments are a JSON string or an object. `limit_s`: limit of the thread's CPU time, in seconds. With `tools`, the
        template named "tool_use" is used if the model has one. `continue_final`: the text ends after the last message's content.
        `kwargs`: further variables of the template (chat_template_kwargs); unknown variables are ignored.

        The text contains any BOS that the template writes: encode it with `add_special_tokens=False`. Raises PromptError if
        there is no template, or if it rejects the messages or fails."""
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
        """Return whether the template accepts `messages` and its output contains `text`, which is part of a message."""
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


# --- bounds -------------------------------------------------------------------------------------------------------
# There is no `while` in Jinja, and the sandbox bounds a `range`; but loops within loops, macros that call each other, and powers
# have no end that anybody lives to see. So each turn of a loop and each call looks at the clock now and then, and products are
# looked at before they are made. Not bounded: a text that a template doubles again and again by concatenation.


class TemplateTooLong(Exception):
    """Error: a rendering exceeds its limit of time or output."""


class _Effort:
    """CPU time used and text written so far by one rendering."""

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._end_s = clock() + limit_s
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _TICKS == 0 and self._clock() > self._end_s:
            raise TemplateTooLong(f"it takes more than {self._limit_s:g} s")


_EFFORT: ContextVar[_Effort] = ContextVar("effort")


class _Turns:
    """Sequence of a template's loop. It checks the limits at each iteration and has the length of the original sequence."""

    def __init__(self, through: Iterable[Any]) -> None:
        self._through = through

    def __iter__(self) -> Iterator[Any]:
        effort = _EFFORT.get()
        for each in self._through:
            effort.tick()
            yield each

    def __len__(self) -> int:
        return len(self._through)  # type: ignore[arg-type]  # where it has none Jinja expects the TypeError


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Immutable Jinja sandbox with limits of time and output. `clock`: returns CPU seconds of the calling thread."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Callable[[], float] = time.thread_time, **options: Any) -> None:
        super().__init__(**options)
        self._clock = clock
        self.filters["turns"] = _Turns

    def template(self, tree: nodes.Template) -> jinja2.Template:
        """Compile the syntax tree `tree`. The loops in `tree` are changed in place, to check limits."""
        for loop in [*tree.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "turns", [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: dict[str, Any], limit_s: float) -> str:
        """Return the output of `template`. `limit_s`: limit of CPU time in seconds. Raises TemplateTooLong, and errors of the
        template."""
        effort = _Effort(self._clock, limit_s)
        token = _EFFORT.set(effort)
        try:
            pieces, num_chars = [], 0
            for piece in template.generate(variables):
                effort.tick()
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise TemplateTooLong(f"it writes more than {MAX_CHARS} characters")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _EFFORT.reset(token)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _EFFORT.get().tick()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise TemplateTooLong(f"it takes a power of more than {MAX_BITS} bits")
        else:
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(text, str | list | tuple) and len(text) * times > MAX_CHARS:
                    raise TemplateTooLong(f"it repeats a text beyond {MAX_CHARS} characters")
        return super().call_binop(context, operator, left, right)


# --- compiled templates -------------------------------------------------------------------------------------------


def _environment(now: Callable[[], datetime], clock: Callable[[], float]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        clock, trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled template. `content`: form in which it reads message content. `variables`: names that it reads, including names
    that it sets. `words`: every word of its source. `arguments_as_text`: it writes tool-call arguments unchanged, so they must
    be JSON text instead of an object."""

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
            variables = frozenset(node.name for node in nodes_of(tree, nodes.Name) if node.ctx == "load")
            words = frozenset(re.findall(r"\w+", source))
            content = ContentForm.of(tree)
            return cls(environment, environment.template(tree), content, variables, words)
        except jinja2.TemplateSyntaxError as error:
            raise PromptError(f"the chat template {name!r} is broken, line {error.lineno}: {error.message}") from error

    def render(self, variables: dict[str, Any], limit_s: float) -> str:
        try:
            return self.environment.render(self.template, variables, limit_s)
        except TemplateTooLong as error:
            raise EndlessTemplate(f"the chat template exceeds its limits on these messages: {error}") from error
        except TemplateRefusal as error:
            raise PromptError(error.message or "the chat template refuses these messages") from error
        except Exception as error:  # a template is a program: it may fail with anything
            raise PromptError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error

    def writes_probe(self, named_tokens: Mapping[str, str]) -> bool:
        """Render a probe message, and return whether the arguments of its tool call are written correctly."""
        seen = [_as_seen(message, self) for message in _PROBE]
        variables = {**named_tokens, "messages": seen, "tools": _PROBE_TOOLS, "add_generation_prompt": True}
        try:
            text = self.render(variables, _PROBE_S)
        except PromptError:
            return False
        # Not JSON inside a string, and not what Python makes of an object.
        return _PROBE_KEY in text and f'\\"{_PROBE_KEY}' not in text and f"'{_PROBE_KEY}" not in text


_PROBE_S: Final = 1.0  # a slower template also fails in requests, and must not delay the start
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


def _as_seen(message: Message, template: _Compiled) -> dict[str, Any]:
    """Return `message` in the form that `template` reads, for content and tool-call arguments. Null fields are removed, because
    templates test for missing keys, not for None."""
    form = template.content
    seen = {key: value for key, value in message.items() if value is not None}
    content = seen.get("content")
    if isinstance(content, str):
        if not form.strings:
            seen["content"] = [{"type": "text", "text": content}]
    elif content is not None and not form.parts:
        texts = (part["text"] if part["type"] == "text" else MEDIA_MARKS[part["type"]] for part in content)
        seen["content"] = "\n".join(texts)
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
    """Return `message` with a mark at the end of its content. The mark shows where the content ends in the rendered text."""
    content = message.get("content", "")
    if isinstance(content, str):
        return {**message, "content": content + _END}
    if not content:
        return {**message, "content": [{"type": "text", "text": _END}]}
    last = content[-1]
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + _END}]}


def _with_text(call: Message) -> Message:
    """Return `call` with its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}}


def _with_object(call: Message) -> Message:
    """Return `call` with its arguments as an object, which most templates write with `tojson`. Clients send JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with its reasoning under both names that templates read. Clients use one of three names."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
