"""Warm-up of encoders in parallel with steps, so that no request waits for compilation or allocation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from runtime.api import LoadProgress
from runtime.api.media import MediaItem
from runtime.batch import EncoderWork, MediaSpan, RowMedia, ScheduledBatch
from runtime.fault import RowFailed
from runtime.step import Runner

log = logging.getLogger("oneloop.start")


async def encode_first(
    runner: Runner,
    groups: Sequence[Sequence[MediaItem]],
    prompt: ScheduledBatch | None,
    report: Callable[[LoadProgress], None],
    *,
    crosses: bool = False,
) -> None:
    """Encode each group of items in one call and discard the outputs.

    `prompt`: a step with one row, which is then computed with the first item's outputs; None for no step. The outputs are the row's
    embeddings, or read by cross-attention if `crosses`. An item that cannot be encoded is skipped; its error will be that of the
    first such request. Other device errors are raised."""
    for index, items in enumerate(groups):
        report(LoadProgress("encoder", index, len(groups), "steps"))
        work = tuple(EncoderWork(number, item.digest, item) for number, item in enumerate(items))
        try:
            await _all(runner.encode(ScheduledBatch((), 0, 0, encoder_work=work)))
            if prompt is not None and not index:
                await runner.launch(_seeing(prompt, items[0], crosses=crosses)).result()
        except RowFailed:
            log.warning("%d %ss at a time cannot be encoded", len(items), items[0].modality)
        finally:
            runner.encode(ScheduledBatch((), 0, 0, encoder_drops=tuple(item.digest for item in items)))
    report(LoadProgress("encoder", len(groups), len(groups), "steps"))


async def _all(ends: Sequence[Awaitable[None]]) -> None:
    errors = [each for each in await asyncio.gather(*ends, return_exceptions=True) if each is not None]
    if errors:
        raise next((each for each in errors if not isinstance(each, RowFailed)), errors[0])


def _seeing(prompt: ScheduledBatch, item: MediaItem, *, crosses: bool) -> ScheduledBatch:
    (row,) = prompt.rows
    spans = () if crosses else (MediaSpan(item.digest, 0, item.positions[: row.num_tokens]),)
    media = RowMedia(spans, crossed=item.digest if crosses else None)
    return replace(prompt, rows=(row._replace(media=media),))
