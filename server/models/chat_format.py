"""ChatFormat: a model's markup of tool calls and reasoning. OutputParser: the parser of one request's output.

The format is chosen once, at start, from the chat template and the tokenizer or by an option. An OutputParser creates a new
chain of codecs for every answer, and lists the special tokens that the codecs need. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from server.models.prompt import ChatTemplate
from server.models.tokenizer import Tokenizer
from server.text.events import Codec, CodecChain
from server.text.reasoning import FAMILIES, ReasoningCodec, ReasoningTags, detect_reasoning
from server.text.tools import prompted
from server.text.tools.harmony import Harmony
from server.text.tools.registry import TOOL_PARSERS, detect, named
from server.text.tools.tool_parser import ToolParser, Tools

AUTO, NONE = "auto", "none"
# Other servers' names for reasoning that a tool parser reads itself.
_OWN_REASONING: Final[Mapping[str, type[ToolParser]]] = {
    "harmony": Harmony, "gpt_oss": Harmony, "openai_gptoss": Harmony,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputParser:
    """Parser of the answers to one request. `reasoning_open`: whether the prompt ends inside reasoning. `keep_ids`: special
    tokens that the codecs receive as text. `parallel`: whether an answer may contain several tool calls."""

    tool_parser: type[ToolParser] | None = None
    tools: Tools = ()
    tags: ReasoningTags | None = None
    reasoning_open: bool = False
    keep_ids: frozenset[int] = frozenset()
    parallel: bool = True
    show_reasoning: bool = True

    @property
    def reasons(self) -> bool:
        """True if an answer may contain reasoning."""
        return self.tags is not None or (self.tool_parser is not None and self.tool_parser.reasons)

    def codec(self) -> Codec:
        tool_parser = None if self.tool_parser is None else self.tool_parser(self.tools)
        if self.tags is None:
            assert tool_parser is not None, "there is no OutputParser where there is nothing to read"
            return tool_parser
        reasoning = ReasoningCodec(self.tags, reasoning_open=self.reasoning_open)
        return reasoning if tool_parser is None else CodecChain(reasoning, tool_parser)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Markup of a model's chats. `prompted`: the template does not render tools, so the messages explain them. `keep_ids`:
    special tokens that mark tool calls and reasoning. `stop_ids`: tokens that end the model's turn, in addition to those in the
    model's files."""

    tool_parser: type[ToolParser] | None = None
    tags: ReasoningTags | None = None
    prompted: bool = False
    call_ids: frozenset[int] = frozenset()
    reasoning_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def choose(
        cls,
        source: str | Mapping[str, str] | None,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> Self:
        """Choose the format. `source`: Jinja source of `template`, or sources by name. `tool_parser`, `reasoning_parser`: parser
        names, AUTO or NONE. Raises ValueError for an unknown name, or two parsers that cannot be combined."""
        special = tokenizer.token_strings(sorted(tokenizer.special_ids))
        found = detect(source, special) if tool_parser == AUTO else tool_parser
        if tool_parser == AUTO and reasoning_parser in _OWN_REASONING:
            found = reasoning_parser
        parser = None if found in (None, NONE) else _OWN_REASONING.get(found) or named(found)
        is_prompted = bool(template) and not template.reads("tools", with_tools=True)
        if is_prompted and tool_parser == AUTO and not (parser and parser.reasons):
            parser = prompted.TOOL_PARSER
        tags = _tags(source, parser, reasoning_parser)
        shown = tokenizer.special_ids - tokenizer.eos_token_ids
        return cls(
            parser,
            tags,
            prompted=is_prompted and parser is prompted.TOOL_PARSER,
            call_ids=tokenizer.ids_of(parser.strings()) & shown if parser else frozenset(),
            reasoning_ids=tokenizer.ids_of(tags.strings()) & shown if tags else frozenset(),
            stop_ids=tokenizer.ids_of(parser.stops) if parser else frozenset(),
        )

    def output_parser(
        self, tools: Tools, *, reasoning_open: bool, parallel: bool = True, show_reasoning: bool = True
    ) -> OutputParser | None:
        """Return the parser for a request with `tools`; None if its answers can only be text. Arguments: see `OutputParser`."""
        tool_parser = self.tool_parser if tools or (self.tool_parser is not None and self.tool_parser.reasons) else None
        if tool_parser is None and self.tags is None:
            return None
        keep_ids = self.reasoning_ids | (self.call_ids if tool_parser is not None else frozenset())
        return OutputParser(tool_parser, tools, self.tags, reasoning_open, keep_ids, parallel, show_reasoning)

    def __str__(self) -> str:
        calls = next((name for name, parser in TOOL_PARSERS.items() if parser is self.tool_parser), "none")
        explained = (
            ", described in the system message because the chat template does not support tools"
            if self.prompted
            else ""
        )
        own = self.tool_parser is not None and self.tool_parser.reasons
        thoughts = calls if own else "none" if self.tags is None else self.tags.opens[0]
        return f"tool calls: {calls}{explained}; reasoning: {thoughts}"


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError for an unknown parser name. Callable before a model is loaded."""
    if tool_parser not in (AUTO, NONE, *_OWN_REASONING):
        named(tool_parser)
    if reasoning_parser not in (AUTO, NONE, *_OWN_REASONING):
        _family(reasoning_parser)


def _family(name: str) -> ReasoningTags:
    """Return the reasoning tags called `name`. Raises ValueError for an unknown name."""
    if name not in FAMILIES:
        names = ", ".join(sorted({*FAMILIES, *_OWN_REASONING}))
        raise ValueError(f"there is no reasoning parser {name!r}: choose one of {names}")
    return FAMILIES[name]


def _tags(
    source: str | Mapping[str, str] | None, tool_parser: type[ToolParser] | None, parser: str
) -> ReasoningTags | None:
    reasons = tool_parser is not None and tool_parser.reasons
    if parser in _OWN_REASONING and not reasons:
        raise ValueError(f"the reasoning parser {parser} requires the tool parser harmony")
    if parser in (AUTO, NONE, *_OWN_REASONING) and reasons:
        return None
    if reasons:
        raise ValueError(f"the tool parser harmony also parses reasoning; leave out the reasoning parser {parser!r}")
    if parser == NONE:
        return None
    found = detect_reasoning(_text(source)) if parser == AUTO else parser
    return None if found is None else _family(found)


def _text(source: str | Mapping[str, str] | None) -> str:
    if source is None or isinstance(source, str):
        return source or ""
    return source.get("default", "")
