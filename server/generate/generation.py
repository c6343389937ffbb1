"""Generation: converts the token ids of one HTTP request's answers to text and events.

Each choice is a chain of codecs: Detokenizer, StopStrings (over all text), and a parser of tool calls and reasoning. Callers use
`Choice.feed` to get text or `Choice.events` to get events; `frames` formats them. Each choice ends once, with a finish reason.
The reason is "stop" after a stop string or an excess tool call, "tool_calls" after calls, and otherwise the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from runtime.api import EMBEDS, FinishReason, Output, Request, TokenLogprobs, TokenStream, TokenWriter
from server.generate.beams import BeamParams, BeamSearch
from server.generate.logprobs import Echo, Entry, Style
from server.generate.request import Shown
from server.http.answers import release
from server.http.errors import DeadlineExceeded, InvalidRequest, Unavailable
from server.models.chat_format import OutputParser
from server.models.model import LoadedModel
from server.models.tokenizer import Tokenizer
from server.text import native
from server.text.detokenize import Detokenizer
from server.text.events import CutOff, Event, Malformed, Reasoning, Text, ToolCallStart, joined
from server.text.stop import StopStrings

TOOL_CALLS = "tool_calls"  # why it ended, for whoever is to make them
FAILED = (FinishReason.ERROR, FinishReason.INVALID, FinishReason.TIMEOUT)
_NO_STOPS = StopStrings(())


class TextOptions(Shown, frozen=True, kw_only=True):
    """Options for the text of a request's answers. Options for their tokens are in SamplingParams."""

    min_tokens: int = 0  # stop strings are looked for after this many tokens
    continues_prompt: bool = False  # the text goes on where the prompt's ends, leading spaces and all
    output_parser: OutputParser | None = None  # what the text may hold beside text
    constrained_by: str | None = None  # the field that says what the answer has to look like


class Choice:
    """One answer in progress. It converts the engine's outputs to text or events, and sets `finish_reason` at the end.

    `end`: function that stops the sequence in the engine. It is called after a stop string, which the engine cannot detect."""

    __slots__ = (
        "_call_ids",
        "_called_enough",
        "_codec",
        "_detokenizer",
        "_end",
        "_logprobs",
        "_num_calls",
        "_options",
        "_stops",
        "_token_ids",
        "_writer",
        "finish_reason",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_reasoning_tokens",
        "num_tokens",
        "stop_reason",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, end: Callable[[], None]) -> None:
        output_parser = options.output_parser
        self._detokenizer: Detokenizer = tokenizer.table.detokenizer(
            skip_special_tokens=options.skip_special_tokens,
            keep_ids=output_parser.keep_ids if output_parser is not None else frozenset(),
            continues=options.continues_prompt,
        )
        self._codec = None if output_parser is None else output_parser.codec()
        self._call_ids: set[str] = set()
        self._num_calls = 0  # whole so far, and the one that has begun
        self._called_enough = False  # a call too many has begun, and nobody listens any more
        self._stops = StopStrings(options.stop, include=options.include_stop) if options.stop else None
        self._options = options
        self._end = end
        self._logprobs: list[Entry] = []
        self._token_ids: list[int] = []
        self._writer: Any = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of them, its marks included
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0  # guessed and checked, and those that were right
        self.num_accepted_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def feed(self, output: Output) -> str:
        """Return the new text of `output` that can be sent now. Set `finish_reason` if `output` is the last.

        Raises EngineFailed, or ApiError if the deadline passed or the output constraint could not be satisfied."""
        ids = output.token_ids
        if self._writer is not None:
            self.num_tokens += self._writer.take_num_tokens()
        self.num_cached_tokens = output.num_cached_tokens
        self.num_draft_tokens, self.num_accepted_tokens = output.num_draft_tokens, output.num_accepted_tokens
        if output.finish is None and (self._stops is None or len(ids) == 1):
            if output.logprobs is None and not self._options.token_ids:
                self.num_tokens += len(ids)
            else:
                self._note(ids, output.logprobs)
            text = self._detokenizer.feed(ids)
            return text if self._stops is None else self._pass(text, self._stops, output)
        if output.finish in FAILED:
            raise failure_of(output, self._options.constrained_by)
        if self._stops is not None:
            return "".join(self._by_token(output, self._stops))
        shown = self._shown(output)
        self._note(shown, output.logprobs)
        self._note(ids[len(shown) :])
        return self._finished(output, self._detokenizer.feed(shown) + self._detokenizer.flush())

    def writer(self, before: bytes, after: bytes, connection: Any) -> TokenWriter | None:
        """Return a writer that sends further text on `connection`, each piece between `before` and `after` (see `ChunkWriter`).
        Return None if events have more than text, or if stop strings are set."""
        options = self._options
        if options.logprobs is not None or options.token_ids or self._codec is not None or self._stops is not None:
            return None
        self._writer = native.token_writer(self._detokenizer, before, after, connection)
        made: TokenWriter = self._writer
        return made

    def _note(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> None:
        """Record `ids` as generated tokens. `logprobs`: log-probabilities of at least these tokens, or None."""
        self.num_tokens += len(ids)
        if self._options.token_ids:
            self._token_ids += ids
        if logprobs is not None:
            self._logprobs += zip(ids, logprobs, strict=False)

    def take_token_ids(self) -> list[int]:
        """Return the token ids generated since the last call, end token included. Empty unless the client requested token ids."""
        taken, self._token_ids = self._token_ids, []
        return taken

    def take_logprobs(self) -> list[Entry]:
        """Return the log-probabilities of tokens generated since the last call. Empty unless the client requested them."""
        taken, self._logprobs = self._logprobs, []
        return taken

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens that `take_logprobs` has not returned yet, or minus infinity without such tokens."""
        found = [entry.logprob for _, entry in self._logprobs if entry is not None]
        return sum(found) / len(found) if found else -math.inf

    def _shown(self, output: Output) -> Sequence[int]:
        hide = output.finish is FinishReason.STOP and not (self._options.include_stop or output.complete)
        return output.token_ids[:-1] if hide else output.token_ids

    def events(self, output: Output) -> list[Event]:
        """Return the events in the new text of `output`. Every tool call has an id. Set `finish_reason` if `output` is the last.

        Raises EngineFailed, or ApiError if the deadline passed or the output constraint could not be satisfied."""
        codec = self._codec
        if codec is None:
            text = self.feed(output)
            return [Text(text)] if text else []
        if output.finish in FAILED:
            raise failure_of(output, self._options.constrained_by)
        self.num_cached_tokens = output.num_cached_tokens
        self.num_draft_tokens, self.num_accepted_tokens = output.num_draft_tokens, output.num_accepted_tokens
        shown: list[Event] = []
        before = self.num_tokens
        for text in self._by_token(output, self._stops or _NO_STOPS):
            thinking = codec.reasoning
            shown += self._wanted(codec.feed(text))
            if thinking or codec.reasoning:
                self.num_reasoning_tokens += self.num_tokens - before
            before = self.num_tokens
            if self._called_enough:
                break
        if self.finish_reason is not None and not self._called_enough:
            shown += self._wanted(codec.flush())
        if self.finish_reason == FinishReason.STOP and self._num_calls:
            self.finish_reason = TOOL_CALLS
        return list(joined(shown)) if len(shown) > 1 else shown

    def _wanted(self, events: list[Event]) -> Iterator[Event]:
        """Yield the events that the client requested. End the answer if a second tool call starts but only one is allowed."""
        output_parser = self._options.output_parser
        assert output_parser is not None, "there is a codec"
        for event in events:
            if isinstance(event, ToolCallStart):
                if self._num_calls and not output_parser.parallel:
                    self._called_enough = True
                    self.finish_reason = FinishReason.STOP.value
                    self._end()
                    return
                self._num_calls += 1
                yield replace(event, id=self._call_id(event))
                continue
            if isinstance(event, Malformed):
                self._num_calls -= 1
                if self.finish_reason == FinishReason.LENGTH:
                    event = CutOff(event.index, event.text)
            if output_parser.show_reasoning or not isinstance(event, Reasoning):
                yield event

    def _call_id(self, call: ToolCallStart) -> str:
        """Return the id that the model wrote for the call, or a new id if it is missing or already used."""
        output_parser = self._options.output_parser
        assert output_parser is not None, "there is a codec"
        assert output_parser.tool_parser is not None, "there is a call"
        id = call.id
        while id is None or id in self._call_ids:
            id = output_parser.tool_parser.new_id()
        self._call_ids.add(id)
        return id

    def _by_token(self, output: Output, stops: StopStrings) -> Iterator[str]:
        """Yield the text of each token of `output` separately, so that tokens after a stop string are not counted."""
        shown = self._shown(output)
        for number, token_id in enumerate(shown):
            self._note((token_id,), output.logprobs and output.logprobs[number:])
            yield self._pass(self._detokenizer.feed((token_id,)), stops, output)
            if stops.stopped is not None:
                return
        self._note(output.token_ids[len(shown) :])
        if output.finish is None:
            return
        text = self._pass(self._detokenizer.flush(), stops, output)
        yield text if stops.stopped is not None else self._finished(output, text + stops.flush())

    def _pass(self, text: str, stops: StopStrings, output: Output) -> str:
        """Return the part of `text` before a stop string. If a stop string is found, end the choice."""
        text = stops.feed(text, self.num_tokens > self._options.min_tokens)
        if stops.stopped is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, stops.stopped
            if output.finish is None:
                self._end()
        return text

    def _finished(self, output: Output, text: str) -> str:
        self.finish_reason, self.stop_reason = str(output.finish), output.stop_token_id
        return text


class PromptChoice(Choice):
    """Choice that also returns prompt log-probabilities and, with `echo`, begins with the prompt's text.

    `source`: choice whose sequence computes the prompt log-probabilities; None means this choice."""

    __slots__ = ("_prompt_ids", "_prompt_logprobs", "_source", "_text", "_untaken")

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, end: Callable[[], None], prompt_ids: Sequence[int],
        echo: Echo | None, source: PromptChoice | None,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, options, end)
        self._prompt_ids = prompt_ids
        self._source = source or self
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._text = "" if echo is None else echo.text  # until it is fed
        self._untaken = echo is not None

    def feed(self, output: Output) -> str:
        self._note_prompt(output)
        prompt, self._text = self._text, ""
        return prompt + super().feed(output)

    def events(self, output: Output) -> list[Event]:
        self._note_prompt(output)
        return super().events(output)

    def _note_prompt(self, output: Output) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs

    def take_logprobs(self) -> list[Entry]:
        taken = super().take_logprobs()
        if not self._untaken:
            return taken
        self._untaken = False
        count = self._options.logprobs
        prompt: list[Entry] = [
            (id, found and replace(found, top=found.top[:count])) for id, found in self.prompt_logprobs
        ]
        return prompt + taken

    @property
    def prompt_logprobs(self) -> list[Entry]:
        """Return the prompt log-probabilities, after `feed` received the first output. Raises EngineFailed if they are missing."""
        first, *others = self._prompt_ids
        if len(self._source._prompt_logprobs) != len(others):
            raise EngineFailed("it ended before the log-probabilities of its prompt were computed")
        return [(first, None), *zip(others, self._source._prompt_logprobs, strict=True)]

    def release(self) -> None:
        release(self._prompt_logprobs)


def failure_of(output: Output, constrained_by: str | None = None) -> Exception:
    """Return the exception for a request that failed. `output`: its last output. `constrained_by`: field of its constraint."""
    if output.finish is FinishReason.INVALID:
        words = output.error or "the answer cannot be held to it"
        return InvalidRequest(words if constrained_by is None else f"{constrained_by}: {words}", param=constrained_by)
    if output.finish is FinishReason.ERROR:
        return EngineFailed(output.error or "no reason given")
    if output.retry_after_s is None:
        return DeadlineExceeded("The answer was not complete when the request's time was over")
    return Unavailable(
        "The server is busy: the request has waited too long to start", retry_after_s=math.ceil(output.retry_after_s)
    )


class EngineFailed(Exception):
    """Error inside the engine. The message is for the server's log and not for the client."""


class _Opened:
    """Holder of a generation's stream. Choices refer to this object instead of the generation, to avoid a reference cycle."""

    stream: TokenStream | None = None

    def stop(self, index: int) -> None:
        assert self.stream is not None, "what is fed comes from the stream"
        self.stream.stop(index)


class Generation:
    """All answers of one request. `requests`: engine requests, equally many per prompt, in the order of the prompts. `n`:
    answers returned per prompt. `echoes`: one per prompt, or empty. `beams`: parameters of beam search, or None."""

    def __init__(
        self, loaded: LoadedModel, requests: Sequence[Request], num_prompts: int, n: int, options: TextOptions,
        echoes: Sequence[Echo] = (), beams: BeamParams | None = None,
    ) -> None:  # fmt: skip
        self.requests = requests
        self.options = options
        self.reads_events = options.output_parser is not None
        self.reasons = options.output_parser is not None and options.output_parser.reasons
        self.tokenizer = loaded.tokenizer
        self.choices: list[Choice] = []
        self._engine = loaded.engine
        self._per_prompt = len(requests) // num_prompts
        self._n = n
        self._echoes = echoes
        self._beams = beams
        self._opened = _Opened()
        for index in range(len(requests)):
            self.choices.append(self._choice(index))

    def _choice(self, index: int) -> Choice:
        request, end = self.requests[index], partial(self._opened.stop, index)
        with_prompt = self.requests[index - index % self._per_prompt].sampling.prompt_logprobs is not None
        echo = self._echoes[index // self._per_prompt] if self._echoes else None
        if not with_prompt and echo is None:
            return Choice(self.tokenizer, self.options, end)
        source = None
        if request.sampling.prompt_logprobs is None and index % self._per_prompt:
            first = self.choices[index - index % self._per_prompt]
            source = first if isinstance(first, PromptChoice) else None
        return PromptChoice(self.tokenizer, self.options, end, request.prompt_ids, echo, source)

    def style(self, index: int) -> Style:
        """Return the format of choice `index`'s log-probabilities."""
        echo = self._echoes[index // self._per_prompt] if self._echoes else None
        return Style(self.options.tokens_as_ids, self.options.skip_special_tokens, echo)

    def open(self) -> TokenStream:
        """Submit the requests to the engine and return the stream of outputs. Raises EngineError if the engine accepts no
        request."""
        if self._beams is not None:
            stream: TokenStream = BeamSearch(self._engine, self.requests[:: self._per_prompt], self._beams)
        else:
            stream = self._engine.submit(self.requests)
        self._opened.stream = stream
        return stream

    def release(self) -> None:
        """Free the memory of prompt log-probabilities. Thread-safe."""
        for choice in self.choices:
            if isinstance(choice, PromptChoice):
                choice.release()

    @property
    def rendering_chars(self) -> int:
        """Estimate the cost of encoding the log-probabilities, as a number of characters to tokenise."""
        tables = 0 if self.options.logprobs is None else (2 + self.options.logprobs) * self.num_completion_tokens
        for request in self.requests[:: self._per_prompt]:
            if request.sampling.prompt_logprobs is not None:
                tables += (2 + request.sampling.prompt_logprobs) * len(request.prompt_ids)
        return 4 * tables

    @property
    def competes(self) -> bool:
        """True if more answers are generated than returned (`best_of` > `n`)."""
        return self._n < self._per_prompt

    @cached_property
    def best(self) -> Sequence[int]:
        """Indices of the choices to return, by prompt. If `competes`, every choice must have ended, and the most likely choice
        of a prompt is first."""
        if not self.competes:
            return range(len(self.choices))
        found: list[int] = []
        for first in range(0, len(self.choices), self._per_prompt):
            own = range(first, first + self._per_prompt)
            found += sorted(own, key=lambda index: -self.choices[index].mean_logprob)[: self._n]
        return found

    @property
    def aborted(self) -> bool:
        """True if the server aborted at least one choice."""
        return any(choice.finish_reason == FinishReason.ABORT for choice in self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests[:: self._per_prompt])

    @property
    def num_media_tokens(self) -> dict[str, int]:
        """Number of placeholder tokens in the prompts, by modality."""
        found: dict[str, int] = {}
        for request in self.requests[:: self._per_prompt]:
            for item in request.media:
                if item.modality == EMBEDS:
                    continue
                found[item.modality] = found.get(item.modality, 0) + len(item.positions)
        return found

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens from the prefix cache, summed over prompts. Only the first choice of each prompt is counted."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self._per_prompt])

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens in all answers."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def guesses(self) -> bool:
        """True if the engine uses speculative decoding, so that usage includes draft tokens."""
        return bool(self._engine.model.speculative)

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens that the engine verified, in all answers."""
        return sum(choice.num_draft_tokens for choice in self.choices)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens, in all answers."""
        return sum(choice.num_accepted_tokens for choice in self.choices)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)
