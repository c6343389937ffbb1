"""Display of a streamed answer at a terminal. Reasoning is folded to one line, Markdown is rendered."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TextIO

from server.cli.answerers import AnswerPiece
from server.cli.markdown import DIM, RESET, Markdown

CLEARED = "\r\x1b[K"  # back to the beginning of the line, which is empty then


class ShownAnswer:
    """Display of one answer. `styled`: the terminal supports escape sequences. `unfolded`: show reasoning in full. `clock`:
    returns seconds."""

    def __init__(
        self, out: TextIO, *, styled: bool, unfolded: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out, self._styled, self._unfolded, self._clock = out, styled, unfolded, clock
        self._markdown = Markdown() if styled else None
        self._began_s = clock()
        self._first_s: float | None = None
        self._num_pieces = 0
        self.text = self.reasoning = ""
        self.num_tokens = 0

    async def show(self, answer: AsyncGenerator[AnswerPiece, None]) -> None:
        """Write the pieces of `answer` as they arrive. Raises the errors of `answer`, after writing text that was held back."""
        try:
            async with contextlib.aclosing(answer) as pieces:
                async for piece in pieces:
                    self._take(piece)
        finally:
            if self.reasoning and not self.text:
                self._end_of_reasoning()
            if self._markdown is not None:
                self._write(self._markdown.flush())

    def _take(self, piece: AnswerPiece) -> None:
        self.num_tokens += piece.num_tokens
        if piece.reasoning or piece.text:
            self._num_pieces += 1
            self._first_s = self._clock() if self._first_s is None else self._first_s
        if piece.reasoning:
            self.reasoning += piece.reasoning
            if self._unfolded:
                self._write(self.dim(printable(piece.reasoning)))
            elif self._styled:
                self._write(f"{CLEARED}{self.dim(f'thinking … {len(self.reasoning.split())} words')}")
        if piece.text:
            if self.reasoning and not self.text:
                self._end_of_reasoning()
            self.text += piece.text
            text = printable(piece.text)
            self._write(text if self._markdown is None else self._markdown.feed(text))

    def _end_of_reasoning(self) -> None:
        if self._unfolded:
            self._write("\n\n")
        elif self._styled:
            folded = f"thought in {len(self.reasoning.split())} words (/reasoning shows them)"
            self._write(f"{CLEARED}{self.dim(folded)}\n")

    def figures(self) -> str:
        """Return a line with the number of tokens, tokens per second and the time to the first token."""
        seconds = max(self._clock() - self._began_s, 1e-9)
        first = "" if self._first_s is None else f", the first after {1000 * (self._first_s - self._began_s):.0f} ms"
        # An endpoint that counts tokens in its last event only has not counted those of a stopped answer; most stream one a piece.
        num, about = (self.num_tokens, "") if self.num_tokens else (self._num_pieces, "about ")
        return f"{about}{num} tokens, {num / seconds:.1f} a second{first}"

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self._styled else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def printable(text: str) -> str:
    """Return `text` without control characters, which could command a terminal; newline and tab stay."""
    return "".join(char if char in "\n\t" or not (char < " " or "\x7f" <= char < "\xa0") else "�" for char in text)


def is_styled(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether `out` accepts escape sequences: a terminal, unless NO_COLOR (no-color.org) or TERM=dumb is set."""
    return out.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
