"""Separation of a model's reasoning from its answer.

Tags are recognised only before the answer; a tag within the answer is text. White space around a reasoning block belongs to the
tags and is dropped. Without a block the text is unchanged; a block without an end tag is all reasoning. In a `CodecChain` this
codec precedes the tool parser, so reasoning is not searched for tool calls.

Reasoning of gpt-oss is parsed in tools/harmony.py, because its channels contain both reasoning and calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from server.text.events import Reasoning, Text
from server.text.markers import Markers, Parse
from server.text.parsing import ParsingCodec


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Opening and closing tags of a model's reasoning. `answer`: the tags around the answer, if the model family has them."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    answer: tuple[str, str] | None = None

    def opened_by(self, prompt: str) -> bool:
        """Return True if `prompt` ends with an opening tag. The model then writes only the closing tag."""
        return prompt.rstrip().endswith(self.opens)

    def opened_in(self, answer: str) -> bool:
        """Return True if `answer`, the beginning of an answer, ends inside the reasoning block."""
        opened = answer.lstrip().startswith(self.opens)
        return opened and not any(close in answer for close in self.closes)

    def strings(self) -> frozenset[str]:
        """Return the tags. The detokenizer must keep them in the text even if they are special tokens."""
        return frozenset((*self.opens, *self.closes, *(self.answer or ())))


THINK: Final = ReasoningTags(("<think>",), ("</think>",))
MISTRAL: Final = ReasoningTags(("[THINK]",), ("[/THINK]",))
GRANITE: Final = ReasoningTags(  # 3.2 in words, 3.3 in tags
    ("<think>", "Here is my thought process:", "Here's my thought process:"),
    ("</think>", "Here is my response:", "Here's my response:"),
    answer=("<response>", "</response>"),
)

FAMILIES: Final[Mapping[str, ReasoningTags]] = MappingProxyType(
    dict.fromkeys(("think", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "olmo3"), THINK)
    | {"mistral": MISTRAL, "granite": GRANITE}
)


def detect_reasoning(template: str) -> str | None:
    """Return the name of the reasoning tags that a chat template uses. Return None if no tags match, or for harmony's channels."""
    if "[THINK]" in template:
        return "mistral"
    if "Here is my thought process:" in template or ("<response>" in template and "<think>" in template):
        return "granite"
    return "think" if "<think>" in template or "</think>" in template else None


class ReasoningCodec(ParsingCodec):
    """Codec that splits text into reasoning and answer. `reasoning_open`: the prompt ends inside a reasoning block."""

    def __init__(self, tags: ReasoningTags, *, reasoning_open: bool = False) -> None:
        self._tags = tags
        self._reasoning_open = reasoning_open
        self._space: list[str] = []  # at the end of the reasoning so far
        super().__init__()

    def _parse(self) -> Parse[None]:
        source, tags = self.source, self._tags
        self.reasoning = self._reasoning_open
        source.record()
        yield from source.space()
        opened = yield from self._any(tags.opens)
        white = source.recorded()
        self.reasoning = opened or self._reasoning_open
        if not self.reasoning:
            self._say(white)
            yield from source.rest(self._say)
            return
        yield from source.space()
        if not (yield from source.until(Markers(*tags.closes), self._think)):
            self._think_aloud()
            return
        self.reasoning = False
        yield from source.space()
        if tags.answer is None or not (yield from source.literal(tags.answer[0])):
            yield from source.rest(self._say)
            return
        yield from source.space()
        yield from source.until(Markers(tags.answer[1]), self._say)
        yield from source.rest(self._say)

    def _any(self, strings: tuple[str, ...]) -> Parse[bool]:
        for string in strings:
            if (yield from self.source.literal(string)):
                return True
        return False

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _think(self, text: str) -> None:
        thought = text.rstrip()
        if thought:
            self._events.append(Reasoning("".join(self._space) + thought))
            self._space = []
        self._space.append(text[len(thought) :])

    def _think_aloud(self) -> None:
        space = "".join(self._space)
        if space:
            self._events.append(Reasoning(space))
