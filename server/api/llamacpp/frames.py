"""Answers of /completion and /infill, whole or streamed. A stream consists of pieces of content, then one final object per
choice with the remaining fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType, structs, to_builtins

from runtime.api import FinishReason, Output, SamplingParams
from server.api.frames import AnswerFrames, check_not_aborted, event
from server.api.llamacpp.api_types import LlamaCompletion, LlamaProbability, LlamaTimings, LlamaToken
from server.generate.generation import Generation
from server.generate.logprobs import Entry
from server.generate.timings import Timings
from server.http.schema import Json
from server.http.wire_fields import DrawFields, RepeatFields
from server.models.model import LoadedModel
from server.models.tokenizer import Tokenizer

_DRAWN = [info for info in structs.fields(RepeatFields) if info.name in DrawFields.__struct_fields__]
_LOWEST = -9999.0  # minus infinity has no JSON


def settings(loaded: LoadedModel, params: SamplingParams, stop: Sequence[str], *, stream: bool) -> Json:
    """Return the response field `generation_settings`: the sampling parameters of the request, including the model's defaults."""
    return {
        "n_ctx": loaded.engine.model.max_model_len,
        "model": loaded.name,
        "n_predict": params.max_tokens,
        "max_tokens": params.max_tokens,
        **{info.encode_name: getattr(params, info.name) for info in _DRAWN},
        "seed": -1 if params.seed is None else params.seed,
        "repeat_last_n": -1,
        "stop": list(stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "stream": stream,
    }


def _probabilities(tokenizer: Tokenizer, entries: Sequence[Entry]) -> list[LlamaProbability]:
    def token(id: int, logprob: float) -> tuple[int, str, list[int], float]:
        raw = tokenizer.token_bytes(id)
        return id, raw.decode(errors="replace"), list(raw), max(logprob, _LOWEST)

    return [
        LlamaProbability(*token(id, found.logprob), [LlamaToken(*token(*other)) for other in found.top])
        for id, found in entries
        if found is not None
    ]


def _piece(generation: Generation, index: int, content: str, *, stop: bool) -> LlamaCompletion:
    choice = generation.choices[index]
    probabilities: list[LlamaProbability] | UnsetType = UNSET
    if generation.options.logprobs is not None:
        probabilities = _probabilities(generation.tokenizer, choice.take_logprobs())
    return LlamaCompletion(
        index=index,
        content=content,
        tokens=choice.take_token_ids(),
        id_slot=index,
        stop=stop,
        tokens_predicted=choice.num_tokens,
        tokens_evaluated=len(generation.requests[index].prompt_ids),
        completion_probabilities=probabilities,
    )


def last(
    loaded: LoadedModel, generation: Generation, index: int, timings: Timings, stop: Sequence[str], *,
    content: str, prompt: str, has_new_line: bool, stream: bool,
) -> LlamaCompletion:  # fmt: skip
    """Return the final object of choice `index`. If the answer is not streamed, it contains the whole `content`."""
    choice = generation.choices[index]
    found = _piece(generation, index, content, stop=True)
    found.model = loaded.name
    found.generation_settings = settings(loaded, generation.requests[index].sampling, stop, stream=stream)
    found.prompt = prompt
    found.has_new_line = has_new_line
    found.truncated = False
    found.stop_type, found.stopping_word = "eos", ""
    if choice.finish_reason == FinishReason.LENGTH:
        found.stop_type = "limit"
    elif isinstance(choice.stop_reason, str):
        found.stop_type, found.stopping_word = "word", choice.stop_reason
    found.tokens_cached = choice.num_cached_tokens
    found.timings = LlamaTimings.of(generation, index, timings)
    return found


def selected(answer: LlamaCompletion | Json, fields: Sequence[str] | None) -> LlamaCompletion | Json:
    """Return the keys `fields` of `answer`; all if `fields` is empty. "a/b" selects key b of object a. Missing keys are skipped."""
    if not fields:
        return answer
    whole: Json = to_builtins(answer)
    found: Json = {}
    for field in fields:
        value: object = whole
        *_, name = path = field.split("/")
        for step in path:
            value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found


_MISSING = object()


class ContentFrames(AnswerFrames):
    """Converter of one streamed answer to events. `with_timings`: every piece has timings. `fields`: keys of the last object."""

    def __init__(
        self, loaded: LoadedModel, request_id: str, generation: Generation, timings: Sequence[Timings], stop: Sequence[str],
        *, with_timings: bool, fields: Sequence[str] | None,
    ) -> None:  # fmt: skip
        super().__init__(generation, request_id, lambda error: b"data: " + error.body() + b"\n\n")
        self._loaded = loaded
        self._timings = timings
        self._stop = stop
        self._with_timings = with_timings
        self._fields = fields
        self._with_new_line: set[int] = set()

    def _frames(self, output: Output) -> Iterator[bytes]:
        index, generation = output.index, self._generation
        choice, timings = generation.choices[index], self._timings[index]
        timings.note()
        text = choice.feed(output)
        check_not_aborted(choice)
        if "\n" in text:
            self._with_new_line.add(index)
        if text:
            piece = _piece(generation, index, text, stop=False)
            if self._with_timings:
                piece.timings = LlamaTimings.of(generation, index, timings)
            yield event(piece)
        if choice.finish_reason is not None:
            whole = last(
                self._loaded, generation, index, timings, self._stop,
                content="", prompt="", has_new_line=index in self._with_new_line, stream=True,
            )  # fmt: skip
            yield event(selected(whole, self._fields))
