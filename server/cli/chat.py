"""Commands `oneloop chat` and `oneloop complete PROMPT`: a model at the terminal, in this process or at an OpenAI endpoint
(--url).

On a terminal a conversation, with commands that begin with a slash; from a pipe one question and its answer, and only the
answer on standard output. Ctrl-C stops an answer and keeps its text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from server.cli.answerers import Answerer, AnswerFailed, Message, Piece
from server.cli.arguments import Arguments, answering, arguments_or_exit_code, read_value
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

QUESTION, MORE, QUOTES = "> ", ". ", '"""'
HELP = """\
  /new             start a new conversation     /system TEXT     set the system prompt; without TEXT, remove it
  /retry           regenerate the last answer   /undo            remove the last question and its answer
  /set NAME VALUE  set temperature, top_p, max_tokens, seed …; without arguments, show what is set
  /save FILE       save the conversation        /load FILE       continue a saved conversation
  /help            show this help               /exit            end the chat (or Ctrl-D)

To write several lines, begin and end with a line of \"\"\", or end each line with a backslash. Ctrl-C stops an answer."""


@dataclass(slots=True)
class Chat:
    """State of a conversation: its messages, and the fields that are sent with them. Knows no terminal."""

    messages: list[Message] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def system(self) -> str:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        said = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": text}, *said] if text else said

    def forget(self) -> None:
        self.messages = self.messages[:1] if self.system else []

    def take_back(self) -> str | None:
        """The last question, which was never asked then; None where there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def load(self, text: str) -> None:
        """Raises ValueError."""
        given = json.loads(text)
        messages = given.get("messages") if isinstance(given, dict) else given
        if not isinstance(messages, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        ):
            raise ValueError("it is no list of messages with role and content")
        self.messages = messages


class Session:
    """One person, one answerer. `read` gives a line for a prompt, and raises EOFError behind the last; `clock`: seconds."""

    def __init__(
        self, answerer: Answerer, chat: Chat, out: TextIO, read: Callable[[str], str], *, styled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._answerer, self._chat, self._out, self._read = answerer, chat, out, read
        self._styled, self._clock = styled, clock

    def run(self, runner: asyncio.Runner) -> None:
        while True:
            try:
                line = self._question()
            except EOFError:
                self._print()
                return
            except KeyboardInterrupt:
                self._print("  (Ctrl-D or /exit ends)")
                continue
            if line.startswith("/"):
                question = self._command(line)
                if question is None:
                    continue
                if not question:
                    return
                line = question
            if line.strip():
                self._ask(runner, line)

    def _question(self) -> str:
        line = self._read(QUESTION)
        lines = []
        if line.strip() == QUOTES:
            while (more := self._read(MORE)).strip() != QUOTES:
                lines.append(more)
            return "\n".join(lines)
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read(MORE)
        return "\n".join([*lines, line])

    def _ask(self, runner: asyncio.Runner, question: str) -> None:
        chat = self._chat
        chat.messages.append({"role": "user", "content": question})
        shown = Shown(self._out, self._styled, self._clock)
        try:
            runner.run(shown.show(self._answerer.chat(chat.messages, chat.fields)))
        except AnswerFailed as error:
            chat.take_back()
            self._print(f"\n{error}")
            return
        except KeyboardInterrupt:
            self._print("\n  (stopped)")
        else:
            self._print()
        chat.messages.append({"role": "assistant", "content": shown.text})
        self._print(shown.dim(f"  {shown.figures()}"))

    def _command(self, line: str) -> str | None:
        """Run a command. Return the next question, "" to end, or None."""
        name, _, rest = line[1:].partition(" ")
        rest, chat = rest.strip(), self._chat
        match name:
            case "exit" | "bye" | "quit" | "q":
                return ""
            case "help" | "?":
                self._print(HELP)
            case "new" | "clear":
                chat.forget()
            case "system":
                chat.set_system(rest)
            case "undo":
                self._print("taken back" if chat.take_back() is not None else "there is nothing to take back")
            case "retry":
                question = chat.take_back()
                if question is not None:
                    return question
                self._print("nothing was asked yet")
            case "set":
                self._set(rest)
            case "save" | "load":
                self._file(name, rest)
            case _:
                self._print(f"there is no /{name}; /help lists what there is")
        return None

    def _set(self, rest: str) -> None:
        fields = self._chat.fields
        name, _, value = rest.partition(" ")
        try:
            if name:
                fields |= read_value(name, value.strip())
        except ConfigError as error:
            self._print(str(error))
            return
        self._print(
            "  ".join(f"{name}={value}" for name, value in fields.items()) or "all as the model's authors advise"
        )

    def _file(self, name: str, path: str) -> None:
        if not path:
            self._print(f"/{name} FILE")
            return
        try:
            file = Path(path).expanduser()
            if name == "save":
                file.write_text(json.dumps({"messages": self._chat.messages}, ensure_ascii=False, indent=1))
            else:
                self._chat.load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._print(f"{path}: {error}")
            return
        self._print(f"{len(self._chat.messages)} messages")

    def _print(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)


class Shown:
    """An answer on its way to a terminal, as far as it has come."""

    def __init__(self, out: TextIO, styled: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._styled, self._clock = out, styled, clock
        self._began_s = clock()
        self._first_s: float | None = None
        self._thinks = False
        self.text = ""
        self.num_tokens = self._num_pieces = 0

    async def show(self, answer: AsyncGenerator[Piece, None]) -> None:
        async with contextlib.aclosing(answer) as pieces:
            async for piece in pieces:
                self.num_tokens += piece.num_tokens
                if piece.reasoning or piece.text:
                    self._num_pieces += 1
                    self._first_s = self._clock() if self._first_s is None else self._first_s
                if piece.reasoning:
                    self._write(self.dim(printable(piece.reasoning)))
                    self._thinks = True
                if piece.text:
                    if self._thinks and not self.text:
                        self._write("\n\n")
                    self._write(printable(piece.text))
                    self.text += piece.text

    def figures(self) -> str:
        seconds = max(self._clock() - self._began_s, 1e-9)
        first = "" if self._first_s is None else f", the first after {1000 * (self._first_s - self._began_s):.0f} ms"
        # An endpoint counts tokens in its last event, which does not come when the answer is stopped; most stream one a piece.
        num, about = (self.num_tokens, "") if self.num_tokens else (self._num_pieces, "about ")
        return f"{about}{num} tokens, {num / seconds:.1f} a second{first}"

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._styled else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def printable(text: str) -> str:
    """Replace control characters, except newline and tab, which could command a terminal."""
    return "".join(char if char in "\n\t" or not (char < " " or "\x7f" <= char < "\xa0") else "�" for char in text)


def main(argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    """The exit code: 0 at the end, 1 where there is no answer, 2 for options that cannot be honoured. `check`: raises ConfigError
    for options of a model in this process that cannot be honoured."""
    arguments = arguments_or_exit_code("chat", argv, check)
    if isinstance(arguments, int):
        return arguments
    chat = Chat(fields=dict(arguments.fields))
    chat.set_system(arguments.system)
    with asyncio.Runner() as runner, answering(runner, arguments) as answerer:
        if answerer is None:
            return 1
        if arguments.prompt or not sys.stdin.isatty():
            return answer_once(
                runner, lambda question: answerer.chat([*chat.messages, question], chat.fields), arguments
            )
        with _history():
            print(f"{answerer.name}: ask, or /help")
            Session(answerer, chat, sys.stdout, input, styled=is_styled(sys.stdout, os.environ)).run(runner)
    return 0


def complete(argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    """Continue a text; the exit code and `check` as of `main`."""
    arguments = arguments_or_exit_code("complete", argv, check)
    if isinstance(arguments, int):
        return arguments
    if not arguments.prompt and sys.stdin.isatty():
        print("oneloop: complete what? oneloop complete PROMPT, or a text by a pipe", file=sys.stderr)
        return 2
    with asyncio.Runner() as runner, answering(runner, arguments) as answerer:
        if answerer is None:
            return 1
        return answer_once(runner, lambda text: answerer.complete(text["content"], arguments.fields), arguments)


def answer_once(
    runner: asyncio.Runner, ask: Callable[[Message], AsyncGenerator[Piece, None]], arguments: Arguments
) -> int:
    """The answer, and nothing else, on standard output."""
    question = arguments.prompt or sys.stdin.read()
    shown = Shown(sys.stdout, is_styled(sys.stdout, os.environ))
    try:
        runner.run(shown.show(ask({"role": "user", "content": question})))
    except AnswerFailed as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(flush=True)
    return 0


def is_styled(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether escape sequences may be written: to a terminal, unless NO_COLOR (no-color.org) or TERM=dumb is set."""
    return out.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Arrow keys go through earlier questions, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_history_length(1000)
    yield
