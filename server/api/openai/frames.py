"""OpenAI's JSON around generated text: whole bodies, and chunks as server-sent events.

A ResponseShape says what one choice of a route looks like; ids, usage, order and framing are the same for every route and stand
here once. Order for a choice: its opening chunk (chat: the role), text, then the last text with finish_reason and
stop_reason; after all of them the usage chunk if asked for. Almost every frame is text between two constants, so those are
rendered once per choice and a token costs one string's JSON and a join.

Where answers are events, each has a chunk of its own, in the order the model wrote them, and the finish_reason another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orjson import dumps

from runtime.api import Output, TokenWriter
from server.generate.generation import Choice, Generation, PromptChoice
from server.generate.logprobs import Style, Writer, prompt_table
from server.generate.transcript import Transcript
from server.http.errors import as_api_error
from server.http.schema import Json
from server.models.tokenizer import Tokenizer
from server.text.events import Event, Text


class ResponseShape(Protocol):
    """The JSON of one choice. All but `whole` are choices of a chunk."""

    id_prefix: str
    object: str
    chunk_object: str
    has_one_prompt: bool  # what is transcript of it stands beside the choices, not in each

    def opening(self, index: int) -> Json | None: ...
    def delta(self, index: int, event: Event, logprobs: Json | None = None) -> Json: ...
    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json: ...
    def whole(
        self,
        index: int,
        transcript: Transcript,
        finish_reason: str | None,
        stop_reason: str | int | None,
        logprobs: Json | None,
    ) -> Json: ...
    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and every chunk of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    shape: ResponseShape

    def body(self, generation: Generation, transcript: Sequence[Transcript]) -> Json:
        """The whole answer, for a request that does not stream. `transcript`: by each choice."""
        one_prompt = self.shape.has_one_prompt
        indices = generation.best[:1] if one_prompt else generation.best
        of_prompts = [self._of_prompt(generation, index) for index in indices]
        choices = [
            self._whole(generation, index, transcript[index], place) | ({} if one_prompt else of_prompts[place])
            for place, index in enumerate(generation.best)
        ]
        return {
            "id": self.id,
            "object": self.shape.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(generation),
            "system_fingerprint": self.fingerprint,
            **(of_prompts[0] if one_prompt else {}),
        }

    def _whole(self, generation: Generation, index: int, transcript: Transcript, place: int) -> Json:
        """Choice `index`, which stands at `place` of the answer."""
        choice, options = generation.choices[index], generation.options
        logprobs = None
        if options.logprobs is not None:
            write = self.shape.logprobs_writer(generation.tokenizer, generation.style(index))
            logprobs = write(choice.take_logprobs())
        shown = self.shape.whole(place, transcript, choice.finish_reason, choice.stop_reason, logprobs)
        if options.token_ids:
            shown |= {
                "prompt_token_ids": [*generation.requests[index].prompt_ids],
                "token_ids": choice.take_token_ids(),
            }
        return shown

    def _of_prompt(self, generation: Generation, index: int) -> Json:
        """What is transcript of the prompt of choice `index`, if anything."""
        choice, options = generation.choices[index], generation.options
        if options.prompt_logprobs is None or not isinstance(choice, PromptChoice):
            return {}
        table = prompt_table(
            generation.tokenizer, choice.prompt_logprobs, options.prompt_logprobs, as_ids=options.tokens_as_ids
        )
        return {"prompt_logprobs": table}

    def chunk(self, choices: list[Json], **more: Any) -> bytes:
        body = {"id": self.id, "object": self.shape.chunk_object, "created": self.created, "model": self.model}
        return b"data: " + dumps({**body, "choices": choices, **more}) + b"\n\n"


def media_tokens(generation: Generation) -> Json:
    """Of the prompt's tokens those that are pictures, sounds and videos: image_tokens, audio_tokens, video_tokens."""
    return {f"{modality}_tokens": count for modality, count in generation.num_media_tokens.items()}


def usage(generation: Generation) -> Json:
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    used: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens, **media_tokens(generation)},
    }
    details: Json = {}
    if generation.reasons:
        details["reasoning_tokens"] = generation.num_reasoning_tokens
    if generation.guesses:
        accepted = generation.num_accepted_tokens
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = generation.num_draft_tokens - accepted
    if details:
        used["completion_tokens_details"] = details
    return used


_HOLE = "\x00text\x00"


class ChunkFrames:
    """Frames of one streamed answer. `include_usage`: as stream_options has it; other chunks then carry a null usage, or with
    `continuous_usage` what was used so far.

    The first chunk of a choice carries its prompt's ids, and each chunk those it settles, if they are wanted."""

    def __init__(
        self, envelope: Envelope, generation: Generation, *, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        self._envelope = envelope
        self._generation = generation
        self._choices = generation.choices
        self._include_usage = include_usage
        self._null_usage: Json = {"usage": None} if include_usage else {}
        self._continuous_usage = continuous_usage
        # A chunk that says more than its text is made anew each time.
        self._plain = not continuous_usage and not generation.options.token_ids
        self._around: dict[int, tuple[bytes, bytes]] = {}  # index: the constant bytes before and after a text
        # Those that have begun, of which nothing is said but text: nearly all.
        self._plain_choices: dict[int, tuple[Choice, bytes, bytes]] = {}
        self._told_prompt: set[int] = set()
        self._logprob_writers = [
            None
            if generation.options.logprobs is None
            else envelope.shape.logprobs_writer(generation.tokenizer, generation.style(index))
            for index in range(len(generation.choices))
        ]

    def feed(self, outputs: Sequence[Output]) -> bytes:
        if len(outputs) == 1:
            output = outputs[0]
            known = self._plain_choices.get(output.index)
            if known is None:
                return self._frame(output)
            choice, before, after = known
            text = choice.feed(output)
            if choice.finish_reason is not None:
                return self._last(output.index, choice, text, None)
            return before + dumps(text) + after if text else b""
        return b"".join(map(self._frame, outputs))

    def writer(self, index: int, connection: Any) -> TokenWriter | None:
        """What goes on with choice `index` where all there is to say is its text: see `Choice.writer`."""
        known = self._plain_choices.get(index)
        if known is None:
            return None
        choice, before, after = known
        return choice.writer(before, after, connection)

    def _frame(self, output: Output) -> bytes:
        if self._generation.reads_events:
            return self._frames_of_events(output)
        index = output.index
        choice = self._choices[index]
        text = choice.feed(output)
        around = self._around.get(index)
        if around is None:
            opening = self._opening(index)
            around = self._around[index]
        else:
            opening = b""
        logprobs = self._logprobs(index, choice)
        if choice.finish_reason is not None:
            return opening + self._last(index, choice, text, logprobs)
        if logprobs is not None or not self._plain:
            return opening + self._chunk(index, self._envelope.shape.delta(index, Text(text), logprobs))
        return opening + around[0] + dumps(text) + around[1] if text else opening

    def _frames_of_events(self, output: Output) -> bytes:
        index = output.index
        choice = self._choices[index]
        events = choice.events(output)
        frames = [b"" if index in self._around else self._opening(index)]
        logprobs = self._logprobs(index, choice)
        is_last = choice.finish_reason is not None
        if not events and not is_last and (logprobs is not None or not self._plain):
            events = [Text("")]  # tokens of which nothing can be transcript yet have ids and log-probabilities
        before, after = self._around[index]
        for event in events:
            if isinstance(event, Text) and logprobs is None and self._plain:
                frames.append(before + dumps(event.text) + after)
            else:
                frames.append(self._chunk(index, self._envelope.shape.delta(index, event, logprobs)))
            logprobs = None
        if is_last:
            frames.append(self._last(index, choice, "", logprobs))
        return b"".join(frames)

    def _logprobs(self, index: int, choice: Choice) -> Json | None:
        write = self._logprob_writers[index]
        return None if write is None or not (entries := choice.take_logprobs()) else write(entries)

    def _opening(self, index: int) -> bytes:
        shape, envelope = self._envelope.shape, self._envelope
        before, after = envelope.chunk([shape.delta(index, Text(_HOLE))], **self._null_usage).split(dumps(_HOLE))
        self._around[index] = before, after
        if self._plain and self._logprob_writers[index] is None and not self._generation.reads_events:
            self._plain_choices[index] = self._choices[index], before, after
        opening = shape.opening(index)
        return b"" if opening is None else self._chunk(index, opening, is_opening=True)

    def _chunk(self, index: int, shown: Json, *, is_opening: bool = False, **more: Any) -> bytes:
        if self._generation.options.token_ids:
            if index not in self._told_prompt:
                self._told_prompt.add(index)
                shown = {**shown, "prompt_token_ids": [*self._generation.requests[index].prompt_ids]}
            if not is_opening:
                shown = {**shown, "token_ids": self._choices[index].take_token_ids()}
        so_far = {"usage": usage(self._generation)} if self._continuous_usage else self._null_usage
        return self._envelope.chunk([shown], **{**so_far, **more})

    def _last(self, index: int, choice: Choice, text: str, logprobs: Json | None) -> bytes:
        last = self._envelope.shape.last(index, text, choice.finish_reason, choice.stop_reason, logprobs)
        more: Json = {} if self._include_usage else {"system_fingerprint": self._envelope.fingerprint}
        return self._chunk(index, last, **more)

    def end(self) -> bytes:
        if not self._include_usage:
            return b""
        return self._envelope.chunk([], usage=usage(self._generation), system_fingerprint=self._envelope.fingerprint)

    def fail(self, error: Exception) -> bytes:
        return b"data: " + as_api_error(error, self._envelope.id).body() + b"\n\n"
