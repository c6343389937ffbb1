"""CompletionShape: the JSON of one choice of /v1/completions, whole and in chunks."""

from __future__ import annotations

from server.generate.logprobs import Style, Writer, completion_writer
from server.generate.transcript import Transcript
from server.http.schema import Json
from server.models.tokenizer import Tokenizer
from server.text.events import Event, Text


class CompletionShape:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, event: Event, logprobs: Json | None = None) -> Json:
        assert isinstance(event, Text), "nothing else is looked for"
        return self.last(index, event.text, None, None, logprobs)

    def whole(
        self,
        index: int,
        transcript: Transcript,
        finish_reason: str | None,
        stop_reason: str | int | None,
        logprobs: Json | None,
    ) -> Json:
        return self.last(index, transcript.text, finish_reason, stop_reason, logprobs)

    def last(
        self, index: int, text: str, finish_reason: str | None, stop_reason: str | int | None, logprobs: Json | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def logprobs_writer(self, tokenizer: Tokenizer, style: Style) -> Writer:
        return completion_writer(tokenizer, style)


SHAPE = CompletionShape()
