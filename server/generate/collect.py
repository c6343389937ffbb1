"""Collection of a whole answer: reads all outputs of a generation, unless the client disconnects first."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from runtime.api import Output
from server.generate.generation import Generation
from server.generate.transcript import Transcript
from server.http.errors import Aborted, ClientLeft


class Presence(Protocol):
    """Context manager that watches the client's connection. If the client disconnects, the block is cancelled and `gone` is
    true."""

    gone: bool

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool: ...


async def collect_transcripts(generation: Generation, client: Presence) -> list[Transcript]:
    """Run the generation to its end. Return one transcript per choice. Raises the same errors as `collect`."""
    found = [Transcript() for _ in generation.requests]
    await collect(
        generation, client, lambda output: found[output.index].add(generation.choices[output.index].events(output))
    )
    return found


async def collect(generation: Generation, client: Presence, feed: Callable[[Output], object]) -> None:
    """Run the generation to its end, and call `feed` with every Output. Raises ApiError, or ClientLeft if the client
    disconnects."""
    async with generation.open() as stream, client:
        async for outputs in stream:
            for output in outputs:
                feed(output)
    if client.gone:
        raise ClientLeft
    if generation.aborted:
        # Half an answer without a word about it would pass for a whole one.
        raise Aborted
