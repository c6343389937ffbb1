"""Transcription of a whole audio file: splits the audio at pauses, or decodes its windows in order, for one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from runtime.api import TokenLogprobs
from server.config.server_config import ServerConfig
from server.generate.speech.request import Segment, Spoken, TranscribeRequest
from server.generate.speech.segments import SegmentPiece, split, tokens_before
from server.generate.speech.windows import DecodedWindow, WindowDecoder
from server.http.call import Call
from server.http.errors import Field, InvalidRequest, clip
from server.http.watch import gather_or_cancel
from server.media.log_mel import Float32s
from server.media.silence import cuts
from server.media.windows import COST, Sound
from server.models.model import LoadedModel
from server.models.speech import ServedSpeech

MAX_AT_ONCE: Final = 16  # pieces of a sound
SEARCH_S: Final = 10.0  # of a window, in which a pause is looked for
MIN_REST_S: Final = 0.5  # of a piece, which ends in a pause: less behind its last segment is silence
WARM_TEMPERATURE: Final = 0.5  # text drawn above it is not continued
LANGUAGE, MODEL = Field("language"), Field("model")

NoteText = Callable[[str], object]


async def transcribe(
    config: ServerConfig,
    call: Call,
    loaded: LoadedModel,
    samples: Float32s,
    request: TranscribeRequest,
    *,
    id: str,
    note: NoteText | None = None,
    progress: Callable[[float], object] = lambda seconds: None,
) -> Spoken:
    """Transcribe `samples` [N], at the model's sampling rate. `note`: called with new text while windows are decoded; each window
    then has one attempt only. `progress`: called with the number of seconds of audio completed since its last call.

    Raises ApiError, whose `param` is a Field of the request, or EngineError."""
    speech = loaded.require_speech()
    check_request(loaded, request)
    run = _Run(config, call, loaded, speech, samples, request, id, progress)
    with speech.holding(samples.nbytes):
        return await run.result(note)


def check_request(loaded: LoadedModel, request: TranscribeRequest) -> None:
    """Raise InvalidRequest if the model does not support the task or language of `request`."""
    languages = loaded.require_speech().format.languages
    if request.task == "translate" and not languages:
        raise InvalidRequest("this model knows English alone, so it translates nothing", param=MODEL)
    if request.language is not None and request.language not in (languages or ("en",)):
        known = ", ".join(sorted(languages)) if languages else "en"
        raise InvalidRequest(LANGUAGE, f" {clip(repr(request.language))} is not one of {known}", param=LANGUAGE)


class _Run:
    def __init__(
        self, config: ServerConfig, call: Call, loaded: LoadedModel, speech: ServedSpeech, samples: Float32s,
        request: TranscribeRequest, id: str, progress: Callable[[float], object],
    ) -> None:  # fmt: skip
        self._format = speech.format
        self._call = call
        self._loaded = loaded
        self._speech = speech
        self._samples = samples
        self._request = request
        self._progress = progress
        self._decoder = WindowDecoder(config, call, loaded, speech, request, id)
        self._at_once = min(MAX_AT_ONCE, config.max_num_seqs_per_key or MAX_AT_ONCE)
        self._before = self._decoder.prompt_ids(request.prompt)
        self._language = request.language

    async def result(self, note: NoteText | None) -> Spoken:
        rate = self._format.info.sample_rate
        await self._decoder.enter()
        spans = await self._on_thread(self._spans)
        sounds = {0: self._sound(spans[0])}
        if self._language is None and self._format.is_multilingual:
            first = await self._speech.workers.run_pieces(COST, sounds[0].window(0), self._call.caller)
            self._language = await self._decoder.language(first)
        ordered = None if note is None else _Ordered(note, len(spans))
        found: list[list[tuple[Segment, DecodedWindow]]] = [[] for _ in spans]
        numbers = iter(range(len(spans)))

        async def lane() -> None:
            for number in numbers:
                sound = sounds.pop(number, None) or self._sound(spans[number])
                notes = None if ordered is None else ordered.of(number)
                found[number] = await self._span(sound, spans[number][0] / rate, notes)
                if ordered is not None:
                    ordered.end(number)

        await gather_or_cancel(lane() for _ in range(min(self._at_once, len(spans))))
        return self._spoken([each for span in found for each in span])

    def _sound(self, span: tuple[int, int]) -> Sound:
        return Sound(self._samples[slice(*span)], self._format.info, self._speech.mel)

    def _spans(self) -> list[tuple[int, int]]:
        if self._request.in_order:
            return [(0, len(self._samples))]
        info = self._format.info
        longest_s = info.num_frames * info.hop_length / info.sample_rate
        return cuts(self._samples, info.sample_rate, longest_s, SEARCH_S)

    def _spoken(self, found: Sequence[tuple[Segment, DecodedWindow]]) -> Spoken:
        segments = [segment for segment, _ in found]
        for number, segment in enumerate(segments):
            segment.id = number
        windows = {id(window): window for _, window in found}.values()
        end = self._format.end
        drawn: list[tuple[int, TokenLogprobs]] = [each for window in windows for each in window.drawn if each[0] < end]
        decoder, duration_s = self._decoder, len(self._samples) / self._format.info.sample_rate
        return Spoken(duration_s, self._language, segments, drawn, decoder.num_prompt_tokens, decoder.num_output_tokens)

    # --- one span, window by window -----------------------------------------------------------------------------------

    async def _span(self, sound: Sound, offset_s: float, note: NoteText | None) -> list[tuple[Segment, DecodedWindow]]:
        request, info = self._request, self._format.info
        frames_s = info.hop_length / info.sample_rate
        min_rest = 0 if request.in_order else int(MIN_REST_S / frames_s)
        found: list[tuple[Segment, DecodedWindow]] = []
        before, seek = self._before, 0
        while sound.num_frames - seek > (min_rest if seek else 0):
            item = await self._speech.workers.run_pieces(COST, sound.window(seek), self._call.caller)
            texts = None if note is None else _TextOf(self._loaded, self._format.end, note)
            window = await self._decoder.decode(item, self._language, before, texts)
            if texts is not None:
                texts.end()
            num_frames = min(info.num_frames, sound.num_frames - seek)
            pieces, advance = self._pieces(window, num_frames)
            start_s = offset_s + seek * frames_s
            found += [(self._segment(piece, window, seek, start_s), window) for piece in pieces]
            if request.after_text:
                cold = window.temperature < WARM_TEMPERATURE
                before = [*self._before, *(id for s, _ in found for id in s.tokens)] if cold else self._before
                before = tokens_before([before], self._format.timestamp_begin, self._decoder.max_before)
            advance = advance or num_frames
            self._progress(min(advance, num_frames) * frames_s)
            seek += advance
        if seek < sound.num_frames:
            self._progress((sound.num_frames - seek) * frames_s)
        return found

    def _pieces(self, window: DecodedWindow, num_frames: int) -> tuple[list[SegmentPiece], int]:
        info = self._format.info
        if not window.is_speech:
            return [], num_frames
        if self._request.timestamps:
            return split(window.ids, self._format.timestamp_begin, num_frames)
        return [SegmentPiece(0.0, num_frames * info.hop_length / info.sample_rate, window.ids)], num_frames

    def _segment(self, piece: SegmentPiece, window: DecodedWindow, seek: int, start_s: float) -> Segment:
        return Segment(
            id=0, seek=seek, start=start_s + piece.start, end=start_s + piece.end, text=self._decoder.text(piece.ids),
            tokens=list(piece.ids), temperature=window.temperature, avg_logprob=window.avg_logprob,
            compression_ratio=window.compression_ratio, no_speech_prob=window.no_speech_prob,
        )  # fmt: skip

    async def _on_thread(self, work: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        return await self._speech.workers.run(COST, work, self._call.caller)


class _TextOf:
    """Callback that converts a window's token ids to text while they are generated."""

    def __init__(self, loaded: LoadedModel, end: int, note: NoteText) -> None:
        self._detokenizer = loaded.tokenizer.table.detokenizer(continues=True)
        self._end = end
        self._note = note

    def __call__(self, ids: Sequence[int]) -> None:
        self._tell(self._detokenizer.feed([id for id in ids if id < self._end]))

    def end(self) -> None:
        self._tell(self._detokenizer.flush())

    def _tell(self, text: str) -> None:
        if text:
            self._note(text)


class _Ordered:
    """Merger of the texts of spans that are decoded in parallel. It calls `note` in the order of the spans. Leading white space
    of the whole text is removed."""

    def __init__(self, note: NoteText, num_spans: int) -> None:
        self._note = note
        self._waiting: list[deque[str]] = [deque() for _ in range(num_spans)]
        self._ended = [False] * num_spans
        self._next = 0
        self._began = False

    def of(self, number: int) -> NoteText:
        def note(text: str) -> None:
            self._waiting[number].append(text)
            self._pass_on()

        return note

    def end(self, number: int) -> None:
        self._ended[number] = True
        self._pass_on()

    def _pass_on(self) -> None:
        for text in self._ready():
            shown = text if self._began else text.lstrip()
            self._began = self._began or bool(shown)
            if shown:
                self._note(shown)

    def _ready(self) -> Iterator[str]:
        while self._next < len(self._waiting):
            waiting = self._waiting[self._next]
            while waiting:
                yield waiting.popleft()
            if not self._ended[self._next]:
                return
            self._next += 1
