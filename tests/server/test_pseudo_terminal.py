"""`oneloop chat` on a pseudo-terminal: what a person sees and types, against a server of the test."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
STYLES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Person:
    """Somebody at a terminal: types, and waits until the screen shows something new."""

    def __init__(self, master: int) -> None:
        self._master = master
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def see(self, words: str) -> str:
        """Wait until `words` have come; the screen up to them, which then is empty."""
        while words not in self.screen:
            piece = await asyncio.to_thread(os.read, self._master, 4096)
            self.screen += STYLES.sub("", piece.decode(errors="replace"))
        seen, _, self.screen = self.screen.partition(words)
        return seen + words


# Takes standard input as the terminal that controls the session, so that Ctrl-C is a signal for it.
PROGRAM = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("server", run_name="__main__")
"""


@contextmanager
def chat(*argv: str):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "ONELOOP_API_KEY": "secret", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "chat", *argv], cwd=ROOT, env=environment, start_new_session=True,
        stdin=slave, stdout=slave, stderr=slave,
    ) as process:  # fmt: skip
        os.close(slave)
        try:
            yield process, Person(master)
        finally:
            process.kill()
            os.close(master)


async def test_a_chat_shows_markdown_and_figures_and_ends_by_its_command(serve):
    server = await serve(says="Hello there", api_key=("secret",))
    with chat("--url", f"http://127.0.0.1:{server.port}") as (process, person):
        await person.see("tiny: type a message, or /help")
        await person.see("> ")
        person.type("hi\r")
        seen = await person.see("ms\r\n")
        assert re.search(r"Hello there\r\n +\d+ tokens, [\d.]+ a second, the first after \d+ ms", seen)
        await person.see("> ")
        person.type("/exit\r")
        assert await asyncio.to_thread(process.wait) == 0


async def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_chat(serve):
    server = await serve(paused=True, api_key=("secret",))
    with chat("--url", f"http://127.0.0.1:{server.port}") as (process, person):
        await person.see("> ")
        person.type("hi\r")
        await server.engine.until(lambda: bool(server.engine.live))
        person.type("\x03")
        await person.see("(stopped)")
        await person.see("0 tokens")
        await person.see("> ")
        person.type("\x03")
        await person.see("(Ctrl-D or /exit ends)")
        await person.see("> ")
        person.type("\x04")
        assert await asyncio.to_thread(process.wait) == 0


async def test_lines_in_quotes_are_one_question(serve):
    server = await serve(says="yes", api_key=("secret",))
    with chat("--url", f"http://127.0.0.1:{server.port}") as (process, person):
        await person.see("> ")
        person.type('"""one\r')
        await person.see(". ")
        person.type('two"""\r')
        await person.see("yes")
        prompt, question = list(server.engine.submitted[0].prompt_ids), server.tokenizer.encode("one\ntwo")
        assert any(prompt[start : start + len(question)] == question for start in range(len(prompt)))
        await person.see("> ")
        person.type("/quit\r")
        assert await asyncio.to_thread(process.wait) == 0
