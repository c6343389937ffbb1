"""Beam search: extends the most likely beams token by token, until no beam can still win.

In each step, the engine computes the next token of every beam with its most likely alternatives. The prefix cache holds the
tokens that a beam shares with its parent, so a step computes at most one block of tokens per beam. Candidates, end and selection
follow transformers' generate (num_beams, length_penalty, early_stopping). Nothing is sampled, so results are deterministic.
BeamSearch is a TokenStream that returns each answer as a whole. This module works on token ids only."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from runtime.api import EngineClient, FinishReason, Output, Request, SamplingParams, TokenLogprobs, TokenStream

FREED_AT_ONCE = 16  # replies, each with the alternatives of a token
ASKED_AT_ONCE = 32  # questions, some tenths of a millisecond
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of beam search. `width`: number of beams. `num_best`: number of answers returned. An answer's score is its
    log-probability divided by length ** `length_penalty`; a positive `length_penalty` favours longer answers.

    `early_stopping`: True stops when `width` answers are complete. False stops when no beam would beat the worst complete answer
    if the beam ended now; "never" stops when no beam could beat it at maximum length."""

    width: int
    num_best: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class BeamSearch(TokenStream):
    """TokenStream of a beam search. `requests`: one per prompt, of which max_tokens, min_tokens, stop_token_ids, ignore_eos,
    logprobs and prompt_logprobs are used. The vocabulary must have at least `width` tokens that do not end an answer.

    Outputs are indexed by prompt, then by rank: `num_best` per prompt. Raises EngineError if the engine accepts no request."""

    def __init__(self, engine: EngineClient, requests: Sequence[Request], params: BeamParams) -> None:
        self._engine = engine
        self._params = params
        eos = engine.model.eos_token_ids
        self._searches = [_Search(number, request, params, eos) for number, request in enumerate(requests)]
        self._open_questions = [*self._questions()]
        self._stream = engine.submit([request for _, request in self._open_questions])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stream.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        while self._open_questions:
            replies = await self._replies()
            await asyncio.sleep(0)
            outputs = list(self._settle(replies))
            while (
                replies
            ):  # others have their turn in between: freeing alternatives by the ten thousand takes milliseconds
                del replies[-FREED_AT_ONCE:]
                await asyncio.sleep(0)
            self._open_questions = []
            for question in self._questions():
                self._open_questions.append(question)
                if not len(self._open_questions) % ASKED_AT_ONCE:
                    await asyncio.sleep(0)
            if self._open_questions:
                self._stream = self._engine.submit([request for _, request in self._open_questions], continues=True)
            if outputs:
                return outputs
        raise StopAsyncIteration

    def stop(self, index: int) -> None:
        """Do nothing, because answers are returned only when they are complete."""

    def _questions(self) -> Iterator[tuple[_Search, Request]]:
        """Yield (search, request) for every beam of the unfinished searches."""
        return ((search, request) for search in self._searches if not search.over for request in search.questions())

    async def _replies(self) -> list[Output]:
        """Return the output of each request, in the order of the requests."""
        replies: dict[int, Output] = {}
        async for outputs in self._stream:
            replies |= {output.index: output for output in outputs}  # of one token, so there is one each
        return [replies[index] for index in range(len(self._open_questions))]

    def _settle(self, replies: Sequence[Output]) -> Iterator[Output]:
        """Extend the beams of every search by one token. Yield the answers of searches that are now finished."""
        of_search: dict[_Search, list[Output]] = {}
        for (search, _), reply in zip(self._open_questions, replies, strict=True):
            of_search.setdefault(search, []).append(reply)
        for search, own in of_search.items():
            search.advance(own)
            if search.over:
                yield from search.answers()


@dataclass(slots=True)
class _Beam:
    """Beam, treated as immutable. It is not a frozen dataclass, because hundreds of beams are created per token."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0  # the sum of their log-probabilities
    logprobs: tuple[TokenLogprobs, ...] = ()  # as far as the answer tells
    finish: FinishReason | None = None


class _Search:
    """Beam search for one prompt. `over`: the search is finished."""

    def __init__(self, number: int, request: Request, params: BeamParams, eos_token_ids: frozenset[int]) -> None:
        sampling = request.sampling
        self._request = request
        self._params = params
        self._first_index = number * params.num_best
        self._ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
        # Enough that `width` are left which end nothing.
        self._num_candidates = max(2, 1 + len(self._ends)) * params.width
        self._running = [_Beam()]
        self._complete: list[tuple[float, _Beam]] = []  # the best so far, best first
        self._length = 0
        self._first_reply: Output | None = None
        self._failed: Output | None = None

    @property
    def over(self) -> bool:
        if self._failed is not None or not self._running:
            return True
        if len(self._complete) < self._params.width:
            return False
        if self._params.early_stopping is True:
            return True
        grows = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._request.sampling.max_tokens if grows else self._length
        return self._score(self._running[0].score, length) <= self._complete[-1][0]

    def questions(self) -> Iterator[Request]:
        """Yield one engine request per beam, which computes the beam's next token."""
        request, banned = self._request, len(self._ends) if self._must_go_on else 0
        params = SamplingParams(1, temperature=0.0, ignore_eos=True, logprobs=self._num_candidates + banned)
        if not self._length:
            yield replace(request, params=replace(params, prompt_logprobs=request.sampling.prompt_logprobs))
            return
        now = time.monotonic()
        for number, beam in enumerate(self._running):
            prompt_ids = (*request.prompt_ids, *beam.token_ids)
            yield replace(
                request,
                id=f"{request.id}.{self._length}.{number}",
                prompt_ids=prompt_ids,
                params=params,
                arrival_s=now,
                prepared=None if request.prepared is None else request.prepared.extended(prompt_ids),
            )

    def advance(self, replies: Sequence[Output]) -> None:
        """Extend the beams by one token. `replies`: the engine's output for each beam, in order."""
        self._first_reply = self._first_reply or replies[0]
        self._failed = next((reply for reply in replies if reply.finish is not FinishReason.LENGTH), None)
        if self._failed is not None:
            return
        banned = self._ends if self._must_go_on else frozenset[int]()
        self._length += 1
        going_on = []
        for place, beam in enumerate(self._grown(replies, banned)):
            if beam.finish is None:
                going_on.append(beam)
            elif place < self._params.width:
                self._complete.append((self._score(beam.score, self._length), beam))
            if len(going_on) == self._params.width and place + 1 >= self._params.width:
                break  # of the others none would go on or be among the answers
        self._running = going_on[: self._params.width]
        self._complete.sort(key=lambda scored: -scored[0])
        del self._complete[self._params.width :]

    def answers(self) -> Iterator[Output]:
        assert self._first_reply is not None, "it has advanced"
        cached, prompt_logprobs = self._first_reply.num_cached_tokens, self._first_reply.prompt_logprobs
        for place in range(self._params.num_best):
            index = self._first_index + place
            if self._failed is not None:
                yield replace(self._failed, index=index, token_ids=[], num_cached_tokens=cached)
                continue
            beam = self._complete[place][1]
            last, sampling = beam.token_ids[-1], self._request.sampling
            yield Output(
                index, list(beam.token_ids), beam.finish,
                last if beam.finish is FinishReason.STOP and last in sampling.stop_token_ids else None,
                cached, None,
                None if sampling.logprobs is None else list(beam.logprobs),
                prompt_logprobs=None if place else prompt_logprobs,
            )  # fmt: skip

    @property
    def _must_go_on(self) -> bool:
        return self._length < self._request.sampling.min_tokens

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _grown(self, replies: Sequence[Output], banned: frozenset[int]) -> Iterator[_Beam]:
        """Yield the best extensions of all beams, most likely first, up to the number of candidates. Equally likely extensions are
        in the order of their beams.

        Each extension is created only when it is yielded, because most are not needed."""
        tops = []
        for reply in replies:
            assert reply.logprobs, "they were asked for"
            tops.append(reply.logprobs[0].top)
        told = self._request.sampling.logprobs
        is_last = self._length == self._request.sampling.max_tokens
        heads: list[
            tuple[float, int, int]
        ] = []  # of each beam its likeliest token that is left: minus the score, beam, place
        for number, beam in enumerate(self._running):
            self._push(heads, beam, number, tops[number], 0, banned)
        for _ in range(self._num_candidates):
            if not heads:
                return
            score, number, place = heapq.heappop(heads)
            beam, top = self._running[number], tops[number]
            token_id, logprob = top[place]
            logprobs = beam.logprobs
            if told is not None:
                logprobs = (*logprobs, TokenLogprobs(logprob, place + 1, top[:told]))
            finish = FinishReason.STOP if token_id in self._ends else FinishReason.LENGTH if is_last else None
            yield _Beam((*beam.token_ids, token_id), -score, logprobs, finish)
            self._push(heads, beam, number, top, place + 1, banned)

    @staticmethod
    def _push(
        heads: list[tuple[float, int, int]], beam: _Beam, number: int, top: Sequence[tuple[int, float]], place: int,
        banned: frozenset[int],
    ) -> None:  # fmt: skip
        """Push the first token of `top` that is not in `banned`, from index `place` on, to the heap `heads`."""
        while place < len(top) and top[place][0] in banned:
            place += 1
        if place < len(top):
            heapq.heappush(heads, (-(beam.score + top[place][1]), number, place))
