"""SpeechFormat: format of a speech model's prompts and outputs: control tokens, languages, timestamps, suppressed tokens.

The format is Whisper's (Radford et al. 2022). It is read from the tokenizer and generation_config.json, or CTranslate2's
config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from runtime.api import SpeechInfo, TranscriptRules
from server.http.errors import TooManyRequests
from server.http.offload import RETRY_AFTER_S, Offload
from server.media.log_mel import LogMel
from server.models.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
TIMESTAMP_S: Final = 0.02  # between two timestamps
MAX_INITIAL_TIMESTAMP: Final = 50  # the first is 1.00 s at most, where the model's files do not say
THREADS: Final = 3  # one of which is left to what is short
MIN_MULTILINGUAL_VOCABULARY: Final = 51_865  # of OpenAI's models, where their files do not say
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


class SpeechFormatError(ValueError):
    """Error: the tokenizer lacks a token that the speech format requires."""


@dataclass(frozen=True, slots=True)
class SpeechFormat:
    """Format of a speech model. `start`, `previous`, `no_timestamps`, `end`, `no_speech`: ids of control tokens.
    `timestamp_begin`: id of the timestamp 0.00 s. `languages`: token ids by language code; {} for an English-only model, whose
    prompts contain neither language nor task."""

    info: SpeechInfo
    start: int
    end: int
    previous: int
    no_timestamps: int
    no_speech: int
    timestamp_begin: int
    tasks: Mapping[Task, int]
    languages: Mapping[str, int]
    suppressed: frozenset[int]
    first_suppressed: frozenset[int]
    max_initial_timestamp: int | None

    @classmethod
    def read(
        cls,
        info: SpeechInfo,
        tokenizer: Tokenizer,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        folder: Path,
    ) -> Self:
        """Return the format of a model. `config`, `generation`: contents of config.json and generation_config.json. `folder`:
        folder of the model's files. Raises SpeechFormatError."""
        converted = _read_json(folder / "config.json")
        no_timestamps = _id(tokenizer, "<|notimestamps|>")
        tasks: dict[Task, int] = {
            "transcribe": _id(tokenizer, "<|transcribe|>"),
            "translate": _id(tokenizer, "<|translate|>"),
        }
        multilingual = generation.get("is_multilingual")
        if multilingual is None:
            multilingual = config.get("vocab_size", 0) >= MIN_MULTILINGUAL_VOCABULARY
        suppressed = _first(
            generation.get("suppress_tokens"), config.get("suppress_tokens"), converted.get("suppress_ids")
        )
        at_first = _first(
            generation.get("begin_suppress_tokens"),
            config.get("begin_suppress_tokens"),
            converted.get("suppress_ids_begin"),
        )
        return cls(
            info=info,
            start=_id(tokenizer, "<|startoftranscript|>"),
            end=_id(tokenizer, "<|endoftext|>"),
            previous=_id(tokenizer, "<|startofprev|>"),
            no_timestamps=no_timestamps,
            no_speech=_id(tokenizer, "<|nospeech|>", "<|nocaptions|>"),
            timestamp_begin=no_timestamps + 1,
            tasks=tasks,
            languages=_languages(tokenizer, generation) if multilingual else {},
            suppressed=frozenset(id for id in suppressed if id >= 0),
            first_suppressed=frozenset(id for id in at_first if id >= 0),
            max_initial_timestamp=generation.get("max_initial_timestamp_index", MAX_INITIAL_TIMESTAMP),
        )  # fmt: skip

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    def prompt_ids(
        self, language: str | None, task: Task, *, timestamps: bool, before: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids of the decoder's prompt. `before`: token ids of the text before this audio; the last of them are
        used, up to half of the context. `language`: None only for an English-only model."""
        ids = self.start_ids(before)
        if language is not None and self.is_multilingual:
            ids += [self.languages[language], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]

    def start_ids(self, before: Sequence[int] = ()) -> list[int]:
        """Return the prompt up to the start token. The most likely next token then is the language. `before`: see `prompt_ids`."""
        return [self.previous, *before, self.start] if before else [self.start]

    def rules(self, *, timestamps: bool) -> TranscriptRules:
        """Return the sampling rules for the tokens after a prompt. `timestamps`: whether the model writes timestamps."""
        if not timestamps:
            return TranscriptRules(self.suppressed, self.first_suppressed, text_end=self.end)
        return TranscriptRules(
            self.suppressed | {self.no_timestamps},
            self.first_suppressed,
            self.timestamp_begin,
            self.end,
            self.max_initial_timestamp,
        )


class ServedSpeech:
    """Served speech model: its format, feature extractor, and worker threads. `max_held_bytes`: limit of all audio samples."""

    def __init__(self, format: SpeechFormat, max_held_bytes: int) -> None:
        info = format.info
        self.format = format
        self.mel = LogMel(info.num_mel_bins, info.sample_rate, info.n_fft, info.hop_length)
        self.workers = Offload(threads=THREADS, name="speech")
        self.max_held_bytes = max_held_bytes
        self._held_bytes = 0

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Context in which `num_bytes` of audio samples count towards `max_held_bytes`. Raises TooManyRequests above that limit."""
        if self._held_bytes + num_bytes > self.max_held_bytes:
            raise TooManyRequests("The server is busy: the memory for audio is in use", retry_after_s=RETRY_AFTER_S)
        self._held_bytes += num_bytes
        try:
            yield
        finally:
            self._held_bytes -= num_bytes


def _id(tokenizer: Tokenizer, *names: str) -> int:
    """Return the id of the first of `names` that is in the vocabulary. Raises SpeechFormatError."""
    for name in names:
        if (id := tokenizer.id_of(name)) is not None:
            return id
    raise SpeechFormatError(f"the tokenizer has no token {names[0]}, which transcripts need")


def _languages(tokenizer: Tokenizer, generation: Mapping[str, Any]) -> dict[str, int]:
    named = generation.get("lang_to_id")
    if isinstance(named, Mapping):
        return {token.strip("<|>"): id for token, id in named.items()}
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    return {found[1]: id for token, id in vocabulary.items() if (found := _LANGUAGE.fullmatch(token))}


def _first(*lists: Any) -> Sequence[int]:
    """Return the first of `lists` that is a list; () if there is none."""
    return next((each for each in lists if isinstance(each, list)), ())


def _read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or invalid. The code that requires the file reports the error."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
