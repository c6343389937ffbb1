"""Encoding: what encoders have made of pictures and sounds, kept on the device by key, and put where a step's tokens stand.

Enqueued in launch order, like everything a step reads: what a batch drops was read by steps before it. An item that cannot be
encoded ends its own sequence alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

import ops
from runtime.batch import EncoderWork, ScheduledBatch, ScheduledRow
from runtime.fault import Fault, RowFailed
from runtime.models.forward_step import DeepstackStep, ForwardStep
from runtime.models.model import Model
from runtime.runner.host_tables import Int32s
from runtime.transfer import index_on

log = logging.getLogger("oneloop.engine")


class Encoding:
    """`fault`: of what kind an error is."""

    def __init__(self, model: Model, fault: Callable[[BaseException], Fault]) -> None:
        self._model = model
        self._fault = fault
        self._outputs: dict[bytes, Tensor] = {}

    def refuse(self, batch: ScheduledBatch) -> None:
        """Raises ValueError for work that there is no encoder for."""
        if batch.encoder_work and self._model.encoder is None:
            numbers = sorted({work.number for work in batch.encoder_work})
            raise ValueError(f"encoder work for sequences {numbers}: no encoder runs beside this model")

    def run(self, batch: ScheduledBatch) -> None:
        """Enqueue the batch's encoder work. Raises RowFailed for the first item that cannot be encoded."""
        for key in batch.encoder_drops:
            self._outputs.pop(key, None)
        for _, same in groupby(batch.encoder_work, key=lambda work: work.item.modality):
            works = tuple(same)
            if not self._encode(works):  # one of them is to blame, and nobody knows which
                for work in works:
                    if not self._encode((work,)):
                        raise RowFailed(work.number)

    def _encode(self, works: Sequence[EncoderWork]) -> bool:
        """False where what they bring cannot be encoded."""
        encoder = self._model.encoder
        assert encoder is not None
        try:
            found = encoder.encode([work.item for work in works])
        except Exception as error:
            if self._fault(error) is not Fault.STEP:
                raise
            log.warning("%d items cannot be encoded", len(works), exc_info=error)
            return False
        self._outputs.update(zip([work.key for work in works], found, strict=True))
        return True

    def embedded(self, step: ForwardStep, rows: Sequence[ScheduledRow]) -> ForwardStep:
        """`step` of `rows`, arranged, with outputs in the place of embeddings where their prompts say so."""
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
                    outputs.append(self._outputs[key][start : start + len(positions)])
                    if whole:
                        table = index if step.attn_metadata[0].rows is None else row.row
                        blocks += [
                            ops.TokenBlock(table, begin + first, end + first, begin) for begin, end in _runs(positions)
                        ]
        if not tokens:
            return step
        places, given = index_on(step.input_ids.device, tokens), torch.cat(outputs)
        embeds = self._model.embed(step.input_ids)
        size = embeds.shape[1]
        embeds[places] = given[:, :size]
        deepstack = None
        if given.shape[1] > size:
            deepstack = DeepstackStep(places, given[:, size:].view(len(given), -1, size).transpose(0, 1))
        return replace(step, input_embeds=embeds, deepstack=deepstack, blocks=blocks)


def _runs(positions: Int32s) -> Iterator[tuple[int, int]]:
    """Beginning and end of each run of positions that stand side by side."""
    for run in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        yield int(run[0]), int(run[-1]) + 1
