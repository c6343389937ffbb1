"""Form fields of /v1/audio, and their conversion to a TranscribeRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from server.generate.speech.request import FALLBACK, TranscribeRequest
from server.http.errors import InvalidRequest, UnsupportedParameter
from server.http.schema import INT64, Name, refusal_of
from server.http.wire_fields import CallerFields, DrawFields, QueueFields, sampling_of
from server.models.speech import Task

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_WITH_TIMES: tuple[Format, ...] = ("srt", "verbose_json", "vtt")
_STREAMED: tuple[Format, ...] = ("json", "text")
LISTS = ("timestamp_granularities", "include")  # fields that may come several times, as `name[]`


class TranslationForm(DrawFields, QueueFields, CallerFields, kw_only=True):
    """Form of a translation into English. `file`: audio file. `prompt`: text before the audio, whose style and names the model
    follows. If `temperature` is 0 or missing, a window that fails the thresholds is decoded again at higher temperatures."""

    file: str
    model: Name | None = None
    prompt: str | None = None
    response_format: Format = "json"
    stream: bool | None = None
    stream_include_usage: bool | None = None  # vLLM's: the last event has the usage in any case
    max_completion_tokens: Annotated[int, Meta(ge=1, le=INT64)] | None = None  # of each window of 30 s
    condition_on_previous_text: bool | None = None  # each window continues the text of those before, in order
    chunking_strategy: Literal["auto"] | None = None  # long audio is cut in its pauses in any case

    @property
    def wants_logprobs(self) -> bool:
        return False

    def check(self) -> None:
        """Raise InvalidRequest if fields contradict each other."""
        if self.stream and self.response_format not in _STREAMED:
            raise InvalidRequest(
                f"stream: events carry text alone: response_format {self.response_format} comes whole",
                param="response_format",
            )

    def to_request(self, task: Task) -> TranscribeRequest:
        """Convert the form to a TranscribeRequest."""
        return TranscribeRequest(
            task=task,
            prompt=self.prompt,
            temperatures=(self.temperature,) if self.temperature else FALLBACK,
            timestamps=self.response_format in _WITH_TIMES,
            in_order=bool(self.condition_on_previous_text),
            after_text=bool(self.condition_on_previous_text),
            measures_speech=self.response_format == "verbose_json",
            sampling=sampling_of(self),
            max_tokens=self.max_completion_tokens,
            **self.queue_terms,
        )


class TranscriptionForm(TranslationForm, kw_only=True):
    """Form of a transcription. `language`: ISO 639-1 code, detected by default. `include`: may contain "logprobs"."""

    language: Annotated[str, Meta(max_length=16)] | None = None
    timestamp_granularities: Sequence[Literal["word", "segment"]] = ()
    include: Sequence[Literal["logprobs"]] = ()

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.include)

    def check(self) -> None:
        super().check()
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                "timestamp_granularities needs response_format verbose_json", param="timestamp_granularities"
            )
        if "word" in self.timestamp_granularities:
            raise UnsupportedParameter(
                "timestamp_granularities word", param="timestamp_granularities", instead="segment"
            )
        if self.include and self.response_format != "json":
            raise InvalidRequest("include logprobs needs response_format json", param="include")

    def to_request(self, task: Task) -> TranscribeRequest:
        language = self.language.lower() if self.language else None
        return msgspec.structs.replace(super().to_request(task), language=language)


T = TypeVar("T", bound=TranslationForm)


def read_form(kind: type[T], values: Mapping[str, Sequence[str]]) -> tuple[T, list[str]]:
    """Convert form values to `kind`. Return the form, and the names of unknown fields. If a field that is not in LISTS is repeated,
    its last value is used.

    Raises InvalidRequest."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    given: dict[str, str | list[str]] = {"file": ""}
    unknown: list[str] = []
    for key, found in values.items():
        name = key.removesuffix("[]")
        if name not in known:
            unknown.append(key)
        elif name in LISTS:
            given[name] = list(found)
        elif found[-1] or name == "prompt":  # clients send empty strings for fields that they leave out
            given[name] = found[-1]
    try:
        form = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
    form.check()
    return form, unknown
