"""Encoding: encoder outputs of images, audio and video on the device. Steps use them as embeddings at the media's positions.

Encoders run in parallel with steps. A step uses only outputs that are complete at its launch. A dropped output stays in memory
until earlier steps have finished. An item that cannot be encoded ends only its own sequence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ops
from ops.transfer import index_on
from runtime.api.media import EMBEDS, MediaItem
from runtime.batch import EncoderWork, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed
from runtime.models.forward_step import CrossStep, DeepstackStep, ForwardStep
from runtime.models.model import Model
from runtime.runner.host_tables import Int32s
from runtime.runner.lane import Lane

log = logging.getLogger("oneloop.engine")

EncoderOutputs = Mapping[bytes, Tensor]


@dataclass(slots=True, eq=False)
class _Item:
    """A media item that is being encoded or was encoded. `outputs` [N, W]: encoder outputs, set when `done` has completed."""

    work: EncoderWork
    done: asyncio.Future[None]
    is_wanted: bool = True
    outputs: Tensor | None = None


class Encoding:
    """Encoder outputs of a runner. Call all methods on the event loop, except `embedded`."""

    def __init__(self, model: Model, lane: Lane, device: torch.device) -> None:
        self._model = model
        self._lane = lane
        self._device = device
        self._items: dict[bytes, _Item] = {}

    def refuse(self, batch: ScheduledBatch) -> None:
        """Raise ValueError if `batch` has encoder work but the model has no encoder."""
        if self._model.encoder is None and any(EMBEDS not in work.item.inputs for work in batch.encoder_work):
            numbers = sorted({work.number for work in batch.encoder_work})
            raise ValueError(f"encoder work for sequences {numbers}: this model has no encoder")

    def start(self, batch: ScheduledBatch) -> list[asyncio.Future[None]]:
        """Drop the outputs of `batch.encoder_drops`, and submit the encoder work of `batch`.

        Return one future per EncoderWork, in order, done when its outputs are ready. A future raises RowFailed if the item
        cannot be encoded, or the device's error."""
        self.refuse(batch)
        for key in batch.encoder_drops:
            dropped = self._items.pop(key, None)
            if dropped is not None:
                dropped.is_wanted = False
        loop = asyncio.get_running_loop()
        items = [_Item(work, loop.create_future()) for work in batch.encoder_work]
        self._items |= {item.work.key: item for item in items}
        for _, same in groupby(items, key=lambda item: (item.work.item.modality, EMBEDS in item.work.item.inputs)):
            self._begin(list(same))
        return [item.done for item in items]

    def _begin(self, items: list[_Item]) -> None:
        """Start encoding `items`, which have the same modality. Either all of them are embeddings (EMBEDS), or none is."""

        def encode() -> list[Tensor]:
            wanted = [item for item in items if item.is_wanted]
            found = self._encoded([item.work.item for item in wanted]) if wanted else []
            for item, outputs in zip(wanted, found, strict=True):
                item.outputs = outputs
            return found

        self._lane.beside(encode).add_done_callback(partial(self._end, items))

    def _encoded(self, items: Sequence[MediaItem]) -> list[Tensor]:
        if EMBEDS in items[0].inputs:
            dtype = getattr(torch, self._model.dtype)
            return [torch.from_numpy(item.inputs[EMBEDS]).to(self._device, dtype) for item in items]
        assert self._model.encoder is not None
        return self._model.encoder.encode(items)

    def _end(self, items: list[_Item], ended: asyncio.Future[Any]) -> None:
        error = ended.exception()
        if error is None:
            for item in items:
                item.done.set_result(None)
            return
        is_lost = self._lane.fault_beside(error) is Fault.LOST
        if len(items) > 1 and not is_lost:  # the failing item is unknown, so each is encoded alone
            for item in items:
                self._begin([item])
            return
        for item in items:
            if not is_lost:
                log.warning("an item of sequence %d cannot be encoded", item.work.number, exc_info=error)
            item.done.set_exception(error if is_lost else RowFailed(item.work.number))

    def outputs(self, batch: ScheduledBatch) -> EncoderOutputs:
        """Return the encoder outputs that the rows of `batch` need, by key."""
        of_rows = [row.media for row in batch.rows if row.media is not None]
        keys = [span.key for media in of_rows for span in media.spans]
        keys += [media.crossed for media in of_rows if media.crossed is not None]
        found = {}
        for key in keys:
            outputs = self._items[key].outputs
            assert outputs is not None, "a row came before what it needs"
            found[key] = outputs
        return found

    def embedded(self, step: ForwardStep, rows: Sequence[ScheduledRow], given: EncoderOutputs) -> ForwardStep:
        """Return `step` with the encoder outputs `given` added: as embeddings at their positions, or for cross-attention. Also
        set the groups of tokens that all attend to each other."""
        step = _crossed(step, rows, given)
        tokens: list[int] = []
        outputs: list[Tensor] = []
        blocks: list[ops.TokenBlock] = []
        whole = self._model.encoder is not None and self._model.encoder.spec.whole_items
        stops = accumulate(row.num_tokens for row in rows)
        for index, (row, stop) in enumerate(zip(rows, stops, strict=True)):
            if row.media is not None:
                first = stop - row.num_tokens - row.start
                for key, start, positions in row.media.spans:
                    tokens += (positions + first).tolist()
                    outputs.append(given[key][start : start + len(positions)])
                    if whole:
                        table = _table(step, row, index)
                        blocks += [
                            ops.TokenBlock(table, begin + first, end + first, begin) for begin, end in _runs(positions)
                        ]
                if row.media.prompt_len:
                    table, first = _table(step, row, index), stop - row.num_tokens
                    blocks.append(ops.TokenBlock(table, first, first + row.media.prompt_len, 0, in_window=False))
        if not tokens:
            return replace(step, blocks=blocks) if blocks else step
        embeds = self._model.embed(step.input_ids, step.adapters)
        places, vectors = index_on(embeds.device, tokens), torch.cat(outputs)
        size = embeds.shape[1]
        embeds[places] = vectors[:, :size]
        deepstack = None
        if vectors.shape[1] > size:
            deepstack = DeepstackStep(places, vectors[:, size:].view(len(vectors), -1, size).transpose(0, 1))
        return replace(step, input_embeds=embeds, deepstack=deepstack, blocks=blocks)


def _crossed(step: ForwardStep, rows: Sequence[ScheduledRow], given: EncoderOutputs) -> ForwardStep:
    """Return `step` with the encoder outputs that its rows store for cross-attention."""
    stops = accumulate(row.num_tokens for row in rows)
    begun = [
        (given[row.media.crossed], _table(step, row, stop - row.num_tokens))
        for row, stop in zip(rows, stops, strict=True)
        if row.media is not None and row.media.crossed is not None
    ]
    if not begun:
        return step
    tables = index_on(step.positions.device, [table for _, table in begun])
    return replace(step, cross=CrossStep(torch.stack([outputs for outputs, _ in begun]), tables))


def _table(step: ForwardStep, row: ScheduledRow, index: int) -> int:
    """Return the index of the row's block table in a step."""
    return index if step.attn_metadata[0].rows is None else row.row


def _runs(positions: Int32s) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of consecutive positions."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        yield int(run[0]), int(run[-1]) + 1
