"""Parser of harmony, the output format of gpt-oss: a list of messages, each with a header and a content, on a channel.

Example: <|start|>assistant<|channel|>analysis<|message|>…<|end|>. The channel "analysis" is reasoning. The channels "final" and
"commentary" are text. A message with a recipient (to=functions.name, in the role or the channel) is a tool call. The prompt ends
with <|start|>assistant, so the output begins inside a header; otherwise the output continues the prompt's message. <|call|> and
<|return|> are stop tokens, so the end of the output replaces them."""

from __future__ import annotations

import re
from functools import partial
from types import MappingProxyType

from server.text.events import Reasoning
from server.text.markers import Markers, Parse
from server.text.tools.call_format import CallFormat, Channels
from server.text.tools.tool_parser import ToolParser, ignore

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HEADER_ENDS = Markers(_MESSAGE, _START, "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NOBODY = ("assistant", "user", "all")


class Harmony(ToolParser):
    starts = Markers(_START, _CHANNEL)
    ends = Markers("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)  # models leave out <|end|>
    inner = (_MESSAGE, "<|constrain|>")
    stops = ("<|call|>", "<|return|>")
    reasons = True
    call_formats = (CallFormat("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", several=False),)
    channels = Channels(
        begin="<|channel|>",
        reasoning="<|channel|>analysis<|message|>",
        remark="<|channel|>commentary<|message|>",
        answer="<|channel|>final<|message|>",
        end="<|end|>",
        again="<|start|>assistant",
    )
    efforts = MappingProxyType(
        {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
    )

    def _parse(self) -> Parse[None]:
        self.source.record()
        marker = yield from self._first()
        while True:
            if marker not in (_START, _CHANNEL):
                marker = yield from self.source.until(self.starts, self._emit_text)
                self.source.record(marker)
            if not marker:
                return
            marker = yield from self._message()
            if marker in (_START, _CHANNEL):
                self.source.record(marker)

    def _first(self) -> Parse[str]:
        """Return the marker with which the output begins. The prompt contains <|start|>, so <|start|> is also returned for
        "to="."""
        yield from self.source.space()
        for beginning in (_CHANNEL, _START):
            if (yield from self.source.literal(beginning)):
                return beginning
        if (yield from self.source.literal("to=")):
            return _START
        self._emit_text(self.source.recorded())
        return ""

    def _message(self) -> Parse[str]:
        """Parse a message whose start marker is recorded. Return the marker that ended the message."""
        ended = yield from self.source.until(_HEADER_ENDS, ignore)
        head = self.source.recorded()
        if ended != _MESSAGE:
            self._emit_text(head.removesuffix(_START) if ended == _START else head)
            return ended
        recipient = _RECIPIENT.search(head)
        if recipient and recipient[1] not in _NOBODY:
            self.source.record(head)
            return (yield from self._content_of_call(recipient[1].removeprefix("functions.")))
        channel = head.rpartition(_CHANNEL)[2].split("<")[0].split()
        self.reasoning = channel[:1] == ["analysis"]
        ended = yield from self.source.until(self.ends, self._think if self.reasoning else self._emit_text)
        self.reasoning = False
        return ended

    def _content_of_call(self, name: str) -> Parse[str]:
        begin = partial(self._begin, name)
        junk: list[str] = []
        if (yield from self.source.space()) == "<":
            ended = yield from self.source.until(self.ends, junk.append)
            whole = bool(ended) and not junk
            if whole:
                begin()
                self._emit_arguments("{}")
        else:
            whole = yield from self._arguments(begin, self._emit_arguments)
            if not whole and not self._open:
                self._emit_text(self.source.recorded())
                return (yield from self.source.until(self.ends, self._emit_text))
            ended = yield from self.source.until(self.ends, junk.append)
        if whole and not "".join(junk).strip():
            self._end()
        else:
            self._break_off()
        return ended

    def _think(self, text: str) -> None:
        self._events.append(Reasoning(text))
