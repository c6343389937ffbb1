"""ContentFrames: a streamed answer as llama.cpp's events: pieces of content, and for each choice a last one that says the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orjson import dumps

from runtime.api import FinishReason, Output
from server.api.llamacpp.answers import counts, last, probabilities, selected, timings_json
from server.generate.generation import Generation
from server.generate.timings import Timings
from server.http.errors import Aborted, as_api_error
from server.http.schema import Json
from server.models.model import LoadedModel


class ContentFrames:
    """Frames of one streamed answer. `with_timings`: in every piece. `fields`: of the last ones, see `selected`."""

    def __init__(
        self,
        loaded: LoadedModel,
        request_id: str,
        generation: Generation,
        timings: Sequence[Timings],
        stop: Sequence[str],
        *,
        with_timings: bool,
        fields: Sequence[str] | None,
    ) -> None:
        self._loaded = loaded
        self._request_id = request_id
        self._generation = generation
        self._timings = timings
        self._stop = stop
        self._with_timings = with_timings
        self._fields = fields
        self._with_new_line: set[int] = set()

    def feed(self, outputs: Sequence[Output]) -> bytes:
        return b"".join(b"data: " + dumps(body) + b"\n\n" for output in outputs for body in self._bodies(output))

    def _bodies(self, output: Output) -> Iterator[Json]:
        index, generation = output.index, self._generation
        choice, timings = generation.choices[index], self._timings[index]
        timings.note()
        text = choice.feed(output)
        if choice.finish_reason == FinishReason.ABORT:
            raise Aborted
        if "\n" in text:
            self._with_new_line.add(index)
        if text:
            piece: Json = {
                "index": index,
                "content": text,
                "tokens": choice.take_token_ids(),
                "stop": False,
                "id_slot": index,
                **counts(generation, index),
            }
            if generation.options.logprobs is not None:
                piece["completion_probabilities"] = probabilities(generation.tokenizer, choice.take_logprobs())
            if self._with_timings:
                piece["timings"] = timings_json(generation, index, timings)
            yield piece
        if choice.finish_reason is not None:
            whole = last(
                self._loaded, generation, index, timings, self._stop,
                content="", prompt="", has_new_line=index in self._with_new_line, stream=True,
            )  # fmt: skip
            yield selected(whole, self._fields)

    def end(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return b"data: " + as_api_error(error, self._request_id).body() + b"\n\n"
