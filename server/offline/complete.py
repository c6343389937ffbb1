"""`oneloop complete PROMPT`: a text goes on, by a model in this process or any OpenAI endpoint (--url)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from server.config import ConfigError
from server.offline.asked import answering, read_asked
from server.offline.chat import answer_once


def main(argv: Sequence[str]) -> int:
    """The exit code, as `oneloop chat`'s."""
    try:
        asked = read_asked("complete", argv, os.environ)
    except ConfigError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    if asked is None:
        return 0
    if not asked.prompt and sys.stdin.isatty():
        print("oneloop: complete what? oneloop complete PROMPT, or a text by a pipe", file=sys.stderr)
        return 2
    with asyncio.Runner() as runner, answering(runner, asked) as answerer:
        if answerer is None:
            return 1
        return answer_once(runner, lambda text: answerer.complete(text["content"], asked.fields), asked)
