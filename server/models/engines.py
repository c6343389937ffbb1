"""The engines of a process as one: how they are, how they end. Mostly there is one; a model served beside another has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from runtime.api import Busy, EngineClient, EngineHealth


def health(engines: Sequence[EngineClient]) -> EngineHealth:
    """Of all, as `EngineHealth.of_all` has it."""
    return EngineHealth.of_all([engine.health() for engine in engines])


def check_room(engines: Sequence[EngineClient], caller: bytes | None) -> None:
    """Before it is known whom a request is for. Raises Busy where none has room for the caller."""
    *others, last = engines
    for engine in others:
        with suppress(Busy):
            engine.check_room(caller)
            return
    last.check_room(caller)


async def drain(engines: Sequence[EngineClient], limit_s: float) -> int:
    """How many requests were aborted when the limit was used up."""
    return sum(await asyncio.gather(*(engine.drain(limit_s) for engine in engines)))


async def close(engines: Sequence[EngineClient]) -> bool:
    """Whether all ended."""
    return all([await engine.close() for engine in engines])
