"""`oneloop complete PROMPT`: a text goes on, by a model in this process or any OpenAI endpoint (--url)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from server.cli.arguments import answering, arguments_or_exit_code
from server.cli.chat import answer_once


def main(argv: Sequence[str]) -> int:
    """The exit code, as `oneloop chat`'s."""
    arguments = arguments_or_exit_code("complete", argv)
    if isinstance(arguments, int):
        return arguments
    if not arguments.prompt and sys.stdin.isatty():
        print("oneloop: complete what? oneloop complete PROMPT, or a text by a pipe", file=sys.stderr)
        return 2
    with asyncio.Runner() as runner, answering(runner, arguments) as answerer:
        if answerer is None:
            return 1
        return answer_once(runner, lambda text: answerer.complete(text["content"], arguments.fields), arguments)
