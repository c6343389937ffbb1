"""Open requests: delivers tokens to their streams and ends their sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Several
from typing import NamedTuple

from runtime.api import FinishReason, Output, TokenLogprobs
from runtime.constrain.mask_maker import MaskMaker
from runtime.engine.admission import Admission
from runtime.engine.observers import Observers
from runtime.engine.token_stream import EngineTokenStream, StreamNotifier
from runtime.scheduler import Scheduler
from runtime.scheduling.settling import Settled
from runtime.sequence import Sequence

log = logging.getLogger("oneloop.engine")

NOT_FINITE_ERROR = "the model's output for this request is not finite"


class OpenRequest(NamedTuple):
    """An open sequence and its stream. `place`: index of its request in the stream's `submit` call."""

    sequence: Sequence
    stream: EngineTokenStream
    place: int


class OpenRequests:
    """Sequences that have not ended, by number, with their streams. `changed` is called with each sequence that ends."""

    def __init__(
        self, scheduler: Scheduler, admission: Admission, observers: Observers, mask_maker: MaskMaker,
        changed: Callable[[Sequence], None], stream_interval: int,
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._admission = admission
        self._observers = observers
        self._mask_maker = mask_maker
        self._changed = changed
        self._stream_interval = stream_interval
        self._notifier = StreamNotifier()
        self.by_number: dict[int, OpenRequest] = {}

    def __bool__(self) -> bool:
        return bool(self.by_number)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _, _ in self.by_number.values()])

    def open(self, sequences: Several[Sequence]) -> EngineTokenStream:
        """Add `sequences`, which were submitted together, to the queue. Return the stream of their outputs."""
        stream = EngineTokenStream(
            len(sequences),
            lambda index, reason: self._leave(sequences[index], reason),
            self._stream_interval,
            lambda index: self._observers.delivered(sequences[index], stream.held_s),
            notifier=self._notifier,
            left=lambda indices: _log_left([sequences[index] for index in indices]),
        )
        for index, sequence in enumerate(sequences):
            self.by_number[sequence.number] = OpenRequest(sequence, stream, index)
            self._mask_maker.add(sequence)
            self._scheduler.add(sequence)
        return stream

    # --- what a step brought --------------------------------------------------------------------------------------

    def deliver(self, all_settled: Several[Settled], logprobs: Several[list[TokenLogprobs] | None]) -> None:
        """Deliver the results of a step to streams. `logprobs`: per sampling row; empty if no row requested any."""
        by_number, notes_all = self.by_number, self._admission.counts_tokens
        for settled in all_settled:
            sequence, token_ids, finish, place, _ = settled
            if finish is None and not logprobs:  # the usual case
                _, stream, index = by_number[sequence.number]
                if stream.put_ids(index, token_ids):
                    if notes_all or sequence.has_matchers:
                        self._note_gained(sequence, token_ids)
                    continue
            self._put(settled, logprobs[place] if logprobs and token_ids else None)

    def deliver_prompt_logprobs(self, number: int, entries: list[TokenLogprobs] | None) -> None:
        """Deliver prompt log-probabilities of sequence `number`. If `entries` is None (logits not finite), end the request."""
        if entries is None:
            self.end(number, FinishReason.ERROR, NOT_FINITE_ERROR)
        elif number in self.by_number:
            _, stream, index = self.by_number[number]
            stream.hold_prompt_logprobs(index, entries)

    def _put(self, settled: Settled, logprobs: list[TokenLogprobs] | None) -> None:
        sequence, token_ids, finish, _, pooled = settled
        _, stream, index = self.by_number[sequence.number]
        if finish is None and logprobs is None:
            output = Output(index, token_ids, None, None, sequence.num_cached_tokens)
        else:
            stop_token_id = None
            if token_ids and finish is FinishReason.STOP and token_ids[-1] in sequence.sampling.stop_token_ids:
                stop_token_id = token_ids[-1]
            error = NOT_FINITE_ERROR if finish is FinishReason.ERROR else None
            output = Output(index, token_ids, finish, stop_token_id, sequence.num_cached_tokens, error, pooled=pooled)
            if logprobs is not None:
                output.logprobs = logprobs[: len(token_ids)]
        output.num_draft_tokens, output.num_accepted_tokens = sequence.num_draft_tokens, sequence.num_accepted_tokens
        if token_ids:
            self._note_gained(sequence, token_ids)
        if finish is not None:
            self._forget(sequence)
        stream.put(output)

    def _note_gained(self, sequence: Sequence, token_ids: list[int]) -> None:
        if self._admission.counts_tokens:
            self._admission.gained(sequence.request.caller, len(token_ids))
        if sequence.has_matchers:
            self._mask_maker.note(sequence.number, token_ids)

    # --- ends -----------------------------------------------------------------------------------------------------

    def end(
        self, number: int, reason: FinishReason, error: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """End sequence `number`, unless it has ended, for a reason of the server. Its stream receives `reason` and `error`."""
        if number not in self.by_number:
            return
        sequence, stream, index = self.by_number[number]
        self._scheduler.finish(sequence, reason)
        self._forget(sequence)
        complete = reason is FinishReason.STOP
        if not complete:
            is_ours = reason not in (FinishReason.TIMEOUT, FinishReason.INVALID)
            level = logging.WARNING if is_ours else logging.INFO
            log.log(
                level, "request %s ended by the server: %s", sequence.request.id, error or reason, extra=_of(sequence)
            )  # fmt: skip
        output = Output(
            index, [], reason, None, sequence.num_cached_tokens, error, complete=complete, retry_after_s=retry_after_s,
            num_draft_tokens=sequence.num_draft_tokens, num_accepted_tokens=sequence.num_accepted_tokens,
        )  # fmt: skip
        stream.put(output)

    def end_all(self, reason: FinishReason, error: str | None = None) -> int:
        """End all open sequences as `end` does. Return the number of sequences."""
        numbers = list(self.by_number)
        for number in numbers:
            self.end(number, reason, error)
        return len(numbers)

    def abort(self, ids: Collection[str] | None) -> int:
        """End the requests with an id in `ids`, or all if `ids` is None, except probes. Return the number of requests."""
        asked = [
            sequence.number
            for sequence in self
            if not sequence.request.is_probe and (ids is None or not sequence.request.names.isdisjoint(ids))
        ]
        for number in asked:
            self.end(number, FinishReason.ABORT)
        return len(asked)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence because its reader needs no more tokens (STOP) or disconnected (ABORT)."""
        if sequence.number in self.by_number:
            self._scheduler.finish(sequence, reason)
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self.by_number[sequence.number]
        self._admission.ended(sequence.request.caller)
        self._mask_maker.forget(sequence)
        self._observers.finished(sequence)
        self._changed(sequence)


def _of(sequence: Sequence) -> dict[str, str]:
    """Return log fields of a sequence: the id of the client's request."""
    return {"request_id": sequence.request.parent_id or sequence.request.id}


def _log_left(sequences: Several[Sequence]) -> None:
    """Log one line: the client of `sequences` disconnected before they ended."""
    num_tokens = sum([sequence.num_output_tokens for sequence in sequences])
    others = f" and {len(sequences) - 1} more of it" if len(sequences) > 1 else ""
    log.info(
        "request %s%s aborted after %d tokens", sequences[0].request.id, others, num_tokens, extra=_of(sequences[0])
    )
