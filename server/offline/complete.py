"""`oneloop complete PROMPT`: a text goes on, by a model in this process or any OpenAI endpoint (--url)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from server.offline.asked import answering, asked_here
from server.offline.chat import answer_once


def main(argv: Sequence[str]) -> int:
    """The exit code, as `oneloop chat`'s."""
    asked = asked_here("complete", argv)
    if isinstance(asked, int):
        return asked
    if not asked.prompt and sys.stdin.isatty():
        print("oneloop: complete what? oneloop complete PROMPT, or a text by a pipe", file=sys.stderr)
        return 2
    with asyncio.Runner() as runner, answering(runner, asked) as answerer:
        if answerer is None:
            return 1
        return answer_once(runner, lambda text: answerer.complete(text["content"], asked.fields), asked)
