"""The engines of a process as one: how they are, how they end. Mostly there is one; a model served beside another has its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from runtime.api import Busy, EngineClient, EngineHealth


def health(engines: Sequence[EngineClient]) -> EngineHealth:
    """Of all: the one that is least well has the say, what runs and waits is counted together, and they sleep once all do."""
    found = [engine.health() for engine in engines]
    worst = min(found, key=lambda each: (each.ok, not each.hopeless))
    return replace(
        worst,
        num_running=sum(each.num_running for each in found),
        num_waiting=sum(each.num_waiting for each in found),
        failing=any(each.failing for each in found),
        sleep_level=min(each.sleep_level for each in found),
    )


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
