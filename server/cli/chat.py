"""Commands `oneloop run`, `chat` and `complete`: use a model at the terminal, in this process or at an OpenAI endpoint.

On a terminal they hold a conversation, with slash commands. From a pipe they read one question, and only the answer goes to
standard output. Ctrl-C stops an answer and keeps the text so far."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from server.cli.answerers import Answerer, AnswerFailed, AnswerPiece
from server.cli.arguments import ChatArguments, answering, arguments_or_exit_code, read_value
from server.cli.attachments import part_of
from server.cli.conversation import ChatSession, Content
from server.cli.shown import ShownAnswer, is_styled, printable
from server.config.server_config import ServerConfig
from server.config.server_options import ConfigError

QUESTION, MORE, QUOTES = "> ", ". ", '"""'
HELP = """\
  /new             start a new conversation     /system TEXT     set the system prompt; without TEXT, remove it
  /retry           regenerate the last answer   /undo            remove the last question and its answer
  /file PATH       send an image, audio, video or text file with the next question
  /set NAME VALUE  set temperature, top_p, max_tokens, seed …; without arguments, show what is set
  /reasoning       show the reasoning of the last answer; on or off: show it as it comes, or fold it
  /save FILE       save the conversation        /load FILE       continue a saved conversation
  /help            show this help               /exit            end the chat (or Ctrl-D)

To write several lines, begin and end with \"\"\", or end each line with a backslash. Ctrl-C stops an answer."""


class Session:
    """Conversation of one user with an answerer. `read`: returns a line, raises EOFError at the end. `clock`: returns seconds."""

    def __init__(
        self, answerer: Answerer, chat: ChatSession, out: TextIO, read: Callable[[str], str], *, styled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._answerer, self._chat, self._out, self._read = answerer, chat, out, read
        self._styled, self._clock = styled, clock
        self._unfolded = False
        self._reasoning = ""  # of the last answer

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
                self._ask(runner, question)
            elif line.strip():
                self._ask(runner, self._chat.question(line))

    def _question(self) -> str:
        line = self._read(QUESTION)
        lines = []
        if line.lstrip().startswith(QUOTES):
            more = line.lstrip().removeprefix(QUOTES)
            while not more.rstrip().endswith(QUOTES):
                lines.append(more)
                more = self._read(MORE)
            return "\n".join([*lines, more.rstrip().removesuffix(QUOTES)]).strip("\n")
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read(MORE)
        return "\n".join([*lines, line])

    def _ask(self, runner: asyncio.Runner, question: Content) -> None:
        chat = self._chat
        chat.messages.append({"role": "user", "content": question})
        shown = ShownAnswer(self._out, styled=self._styled, unfolded=self._unfolded, clock=self._clock)
        try:
            runner.run(shown.show(self._answerer.chat(chat.messages, chat.fields)))
        except AnswerFailed as error:
            chat.take_back()
            if not isinstance(question, str):
                chat.attached = [*question[:-1]]  # the files go with the next try
            self._print(f"\n{error}")
            return
        except KeyboardInterrupt:
            self._print("\n  (stopped)")
        else:
            self._print()
        self._reasoning = shown.reasoning
        chat.messages.append({"role": "assistant", "content": shown.text})
        self._print(shown.dim(f"  {shown.figures()}"))

    def _command(self, line: str) -> Content | None:
        """Run the slash command in `line`. Return the next question, "" to end the session, or None to read another line."""
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
                self._print("there is no earlier question")
            case "file":
                self._attach(rest)
            case "reasoning":
                self._show_reasoning(rest)
            case "set":
                self._set(rest)
            case "save" | "load":
                self._file(name, rest)
            case _:
                self._print(f"there is no /{name}; /help lists the commands")
        return None

    def _attach(self, path: str) -> None:
        if not path:
            self._print("/file PATH")
            return
        try:
            self._chat.attached.append(part_of(path))
        except (OSError, ValueError) as error:
            self._print(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
            return
        self._print(f"{Path(path).name} is sent with the next question")

    def _show_reasoning(self, word: str) -> None:
        if word in ("on", "off"):
            self._unfolded = word == "on"
        elif word:
            self._print("/reasoning, /reasoning on or /reasoning off")
        else:
            self._print(printable(self._reasoning) or "the last answer has no reasoning")

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
            "  ".join(f"{name}={value}" for name, value in fields.items()) or "none: the model's defaults apply"
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


def main(argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    """Run the command `chat`. Return the exit code: 0 at the end, 1 if an answer fails, 2 for invalid options. `check`: raises
    ConfigError for invalid options of a model in this process."""
    return _chat("chat", argv, check)


def run(argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    """Chat with the model that the first argument names. Exit code and `check` are those of `main`."""
    return _chat("run", argv, check)


def _chat(command: str, argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    arguments = arguments_or_exit_code(command, argv, check)
    if isinstance(arguments, int):
        return arguments
    chat = ChatSession(fields=dict(arguments.fields), attached=list(arguments.attached))
    chat.set_system(arguments.system)
    with asyncio.Runner() as runner, answering(runner, arguments) as answerer:
        if answerer is None:
            return 1
        if arguments.prompt or not sys.stdin.isatty():
            return answer_once(
                runner,
                lambda text: answerer.chat(
                    [*chat.messages, {"role": "user", "content": chat.question(text)}], chat.fields
                ),
                arguments,
            )
        with _history():
            print(f"{answerer.name}: type a message, or /help")
            Session(answerer, chat, sys.stdout, input, styled=is_styled(sys.stdout, os.environ)).run(runner)
    return 0


def complete(argv: Sequence[str], check: Callable[[ServerConfig], None]) -> int:
    """Continue a text. Exit code and `check` are those of `main`."""
    arguments = arguments_or_exit_code("complete", argv, check)
    if isinstance(arguments, int):
        return arguments
    if not arguments.prompt and sys.stdin.isatty():
        print("oneloop: no prompt: run oneloop complete PROMPT, or pipe a text to it", file=sys.stderr)
        return 2
    with asyncio.Runner() as runner, answering(runner, arguments) as answerer:
        if answerer is None:
            return 1
        return answer_once(runner, lambda text: answerer.complete(text, arguments.fields), arguments)


def answer_once(
    runner: asyncio.Runner, ask: Callable[[str], AsyncGenerator[AnswerPiece, None]], arguments: ChatArguments
) -> int:
    """Print only the answer to one question to standard output. Return the exit code. `ask`: returns the pieces."""
    question = arguments.prompt or sys.stdin.read()
    shown = ShownAnswer(sys.stdout, styled=is_styled(sys.stdout, os.environ))
    try:
        runner.run(shown.show(ask(question)))
    except AnswerFailed as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(flush=True)
    return 0


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Context in which arrow keys recall earlier questions, if Python has readline."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_history_length(1000)
    yield
