"""LocalModel: source of answers that runs a model in this process, for terminal commands."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from server.cli.answerers import AnswerFailed, AnswerPiece, Message
from server.llm.llm import LLM
from server.llm.outputs import RequestOutput
from server.llm.prepare import SamplingParams


class LocalModel:
    """Answerer that runs an `LLM` in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self._llm = llm
        self.name = name

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        return _pieces(lambda: self._llm.achat([*map(dict, messages)], SamplingParams(**fields)))

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        return _pieces(lambda: self._llm.agenerate(prompt, SamplingParams(**fields)))

    async def close(self) -> None:
        self._llm.close()


async def _pieces(ask: Callable[[], AsyncIterator[RequestOutput]]) -> AsyncGenerator[AnswerPiece, None]:
    try:
        async with contextlib.aclosing(ask()) as increments:  # type: ignore[type-var]
            async for increment in increments:
                for output in increment.outputs:
                    yield AnswerPiece(output.text, output.reasoning, len(output.token_ids))
    except (ValueError, RuntimeError) as error:
        raise AnswerFailed(str(error)) from error
