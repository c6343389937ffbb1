"""Markdown in a terminal: replaces Markdown syntax by terminal styles while an answer streams.

The codec has feed and flush, and never redraws written text. Headings, bold, italic, code, fences, bullets and quotes are
styled; other Markdown is shown as is."""

from __future__ import annotations

import re

RESET, BOLD, DIM, ITALIC, UNDERLINED, CYAN = (f"\x1b[{code}m" for code in (0, 1, 2, 3, 4, 36))
_FENCE = "```"
_UNDECIDED = re.compile(r"\s*(#{1,6}|[-*+>]|`{1,2}|```[^\n]*)?")  # beginnings of a line that may become a mark
_HEADING, _BULLET, _QUOTE = re.compile(r"(#{1,6}) +"), re.compile(r"(\s*)[-*+] +"), re.compile(r"\s*> ?")


class Markdown:
    def __init__(self) -> None:
        self._pending = ""  # text that may be the beginning of a mark
        self._begins_line = True
        self._in_fence = False
        self._block = ""  # style of the line
        self._inline: list[str] = []  # marks that are open

    def feed(self, text: str) -> str:
        """Add `text`, and return the styled text that is complete now."""
        self._pending += text
        written = []
        while self._pending:
            piece = self._line_start() if self._begins_line else self._next()
            if piece is None:
                break
            written.append(piece)
        return "".join(written)

    def flush(self) -> str:
        """Return the rest of the styled text. Called at the end of the answer."""
        rest, self._pending = self._pending, ""
        if rest.strip() == _FENCE and self._begins_line:
            rest = ""
        styled = self._block or self._inline or self._in_fence
        return rest + (RESET if styled else "")

    def _line_start(self) -> str | None:
        """Consume the Markdown mark at the start of a line, such as `# `, and return the terminal text for the mark. Return None
        if more text is needed to recognise the mark."""
        pending = self._pending
        line, newline, rest = pending.partition("\n")
        if line.lstrip().startswith(_FENCE):
            if not newline:
                return None
            self._pending = rest
            self._in_fence = not self._in_fence
            return CYAN if self._in_fence else RESET
        if not newline and _UNDECIDED.fullmatch(pending) and not (self._in_fence and pending.strip(" `")):
            return None
        self._begins_line = False
        if self._in_fence:
            return ""
        if found := _HEADING.match(pending):
            self._block, shown = BOLD + (UNDERLINED if len(found[1]) == 1 else ""), ""
        elif found := _BULLET.match(pending):
            shown = f"{found[1]}• "
        elif found := _QUOTE.match(pending):
            self._block, shown = DIM, "│ "
        else:
            return ""
        self._pending = pending[found.end() :]
        return self._block + shown

    def _next(self) -> str | None:
        """Consume one mark, or the text before the next mark, and return the styled text; None if more text is needed."""
        pending = self._pending
        char = pending[0]
        if char == "\n":
            self._pending, self._begins_line = pending[1:], True
            styled = (self._block or self._inline) and not self._in_fence
            self._block, self._inline = "", []
            return (RESET if styled else "") + "\n"
        if self._in_fence:
            return self._take(len(pending.partition("\n")[0]))
        if char == "`":
            return self._toggle("`", CYAN, 1)
        if char == "*" and "`" not in self._inline:
            if len(pending) == 1:
                return None
            if pending[1] == "*":
                italic_last = self._inline[-1:] == ["*"]
                if italic_last and len(pending) == 2:
                    return None
                closes_both = italic_last and pending[2] == "*"
                return self._toggle("*", ITALIC, 1) if closes_both else self._toggle("**", BOLD, 2)
            if "*" in self._inline or not pending[1].isspace():
                return self._toggle("*", ITALIC, 1)
            return self._take(1)
        return self._take(next((index for index, each in enumerate(pending) if each in "\n`*"), len(pending)) or 1)

    def _take(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        return text

    def _toggle(self, mark: str, style: str, length: int) -> str:
        self._pending = self._pending[length:]
        if mark not in self._inline:
            self._inline.append(mark)
            return style
        self._inline.remove(mark)
        styles = {"`": CYAN, "**": BOLD, "*": ITALIC}
        return RESET + self._block + "".join(styles[each] for each in self._inline)
