"""What an answer of /completion and /infill looks like: llama.cpp's JSON, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.api import FinishReason, SamplingParams
from server.generate.generation import Choice, Generation
from server.generate.logprobs import Entry
from server.generate.timings import Timings
from server.http.schema import Json
from server.http.wire_fields import DrawFields, RepeatFields
from server.models.model import LoadedModel
from server.models.tokenizer import Tokenizer

_DRAWN = [info for info in msgspec.structs.fields(RepeatFields) if info.name in DrawFields.__struct_fields__]
_LOWEST = -9999.0  # minus infinity has no JSON


def settings(loaded: LoadedModel, params: SamplingParams, stop: Sequence[str], *, stream: bool) -> Json:
    """How an answer was made: what the request says, and the model's defaults."""
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


def timings_json(generation: Generation, index: int, timings: Timings) -> Json:
    """Of one choice, in milliseconds. `prompt_n` are the prompt's tokens that were computed."""
    choice = generation.choices[index]
    num_cached = choice.num_cached_tokens
    num_prompt = len(generation.requests[index].prompt_ids) - num_cached
    return {
        "cache_n": num_cached,
        **_rates("prompt", num_prompt, timings.prompt_s),
        **_rates("predicted", choice.num_tokens, timings.answer_s),
    }


def _rates(name: str, num_tokens: int, seconds: float) -> Json:
    milliseconds = max(seconds * 1000, 0.001)  # by which clients divide
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / max(1, num_tokens),
        f"{name}_per_second": num_tokens / milliseconds * 1000,
    }


def stopped(choice: Choice) -> Json:
    if choice.finish_reason == FinishReason.LENGTH:
        return {"stop_type": "limit", "stopping_word": ""}
    if isinstance(choice.stop_reason, str):
        return {"stop_type": "word", "stopping_word": choice.stop_reason}
    return {"stop_type": "eos", "stopping_word": ""}


def probabilities(tokenizer: Tokenizer, entries: Sequence[Entry]) -> list[Json]:
    def token(id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(id)
        return {"id": id, "token": raw.decode(errors="replace"), "bytes": list(raw), "logprob": max(logprob, _LOWEST)}

    return [
        {**token(id, found.logprob), "top_logprobs": [token(other, logprob) for other, logprob in found.top]}
        for id, found in entries
        if found is not None
    ]


def counts(generation: Generation, index: int) -> Json:
    return {
        "tokens_predicted": generation.choices[index].num_tokens,
        "tokens_evaluated": len(generation.requests[index].prompt_ids),
    }


def last(
    loaded: LoadedModel, generation: Generation, index: int, timings: Timings, stop: Sequence[str], *,
    content: str, prompt: str, has_new_line: bool, stream: bool,
) -> Json:  # fmt: skip
    """The whole answer, or a stream's last chunk. `index`: of the choice."""
    choice = generation.choices[index]
    found = {
        "index": index,
        "content": content,
        "tokens": choice.take_token_ids(),
        "id_slot": index,
        "stop": True,
        "model": loaded.name,
        **counts(generation, index),
        "generation_settings": settings(loaded, generation.requests[index].sampling, stop, stream=stream),
        "prompt": prompt,
        "has_new_line": has_new_line,
        "truncated": False,
        **stopped(choice),
        "tokens_cached": choice.num_cached_tokens,
        "timings": timings_json(generation, index, timings),
    }
    if generation.options.logprobs is not None:
        found["completion_probabilities"] = probabilities(generation.tokenizer, choice.take_logprobs())
    return found


def selected(answer: Json, fields: Sequence[str] | None) -> Json:
    """The `response_fields` of an answer, all of it where there are none; of "a/b" the inner one. What is not there is left out."""
    if not fields:
        return answer
    found: Json = {}
    for field in fields:
        value: object = answer
        *_, name = path = field.split("/")
        for step in path:
            value = value.get(step, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found


_MISSING = object()
