"""Decoder of audio windows: detects the language, generates tokens, and retries at other temperatures.

Thresholds and temperature fallback are Whisper's (Radford et al. 2022, section 4.5)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from runtime import api
from server.config.server_config import ServerConfig
from server.generate.generation import FAILED, failure_of
from server.generate.request import GenerateRequest, Texts
from server.generate.sampling import sampling_params
from server.generate.speech.request import TranscribeRequest
from server.generate.start import Terms
from server.http.call import Call
from server.http.errors import Aborted
from server.models.model import LoadedModel
from server.models.speech import ServedSpeech

NoteIds = Callable[[Sequence[int]], object]
Drawn = list[tuple[int, api.TokenLogprobs]]


@dataclass(frozen=True, slots=True)
class DecodedWindow:
    """Generated tokens and text of a window, without the end token. If `is_speech` is False, the text must be ignored."""

    drawn: Drawn
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None
    is_speech: bool = True

    @property
    def ids(self) -> list[int]:
        return [id for id, _ in self.drawn]


class WindowDecoder:
    """Decoder of the windows of one request. `num_prompt_tokens`, `num_output_tokens`: totals over all windows and attempts."""

    def __init__(
        self,
        config: ServerConfig,
        call: Call,
        loaded: LoadedModel,
        speech: ServedSpeech,
        request: TranscribeRequest,
        id: str,
    ) -> None:
        self._terms = Terms.of(
            config, call, priority=request.priority, timeout_s=request.timeout_s, cache_salt=request.cache_salt
        )
        self._call = call
        self._loaded = loaded
        self._format = speech.format
        self._request = request
        self._id = id
        self._num_requests = 0
        self._rules = self._format.rules(timestamps=request.timestamps)
        self.num_prompt_tokens = self.num_output_tokens = 0

    async def enter(self) -> None:
        """Load the model if it is not loaded. Raises the same errors as `LoadedModel.enter`."""
        await self._loaded.enter(self._call, self._terms.deadline_s)

    @property
    def max_before(self) -> int:
        """Maximum number of tokens of earlier text in a prompt."""
        return self._loaded.engine.model.max_model_len // 2 - 1

    def prompt_ids(self, text: str | None) -> list[int]:
        """Return the token ids of the client's `prompt`: the last ones if there are more than `max_before`."""
        if not text or not text.strip():
            return []
        ids = self._loaded.tokenizer.encode(f" {text.strip()}", add_special_tokens=False, plain=True)
        return ids[-self.max_before :]

    async def language(self, item: api.MediaItem) -> str:
        """Return the code of the most likely language of a window. Raises ApiError or EngineError."""
        codes = {id: code for code, id in self._format.languages.items()}
        ((_, drawn),) = await self._run(self._probe(item, [self._format.start], tuple(codes)))
        return codes[max(drawn.top, key=lambda each: each[1])[0]]

    async def decode(
        self, item: api.MediaItem, language: str | None, before: Sequence[int], note: NoteIds | None = None,
        *, prefix: Sequence[int] = (),
    ) -> DecodedWindow:  # fmt: skip
        """Decode a window. `before`: token ids of the text before the window. `prefix`: token ids with which the window's text
        begins; the result does not repeat them. `note`: called with new token ids; there is then only one attempt.

        Raises ApiError or EngineError."""
        request = self._request
        prompt = self._format.prompt_ids(language, request.task, timestamps=request.timestamps, before=before)
        prompt += prefix
        *retried, last = request.temperatures if note is None else request.temperatures[:1]
        no_speech: float | None = None
        if request.measures_speech:
            no_speech = await self._no_speech(item, before)
        for temperature in (*retried, last):
            params = self._params(prompt, temperature, is_begun=bool(prefix))
            drawn = await self._run(self._engine_request(item, prompt, params), note)
            window = self._judged(drawn, temperature, no_speech)
            if note is not None:
                return window
            limits = request.thresholds
            is_unlikely = limits.logprob is not None and window.avg_logprob < limits.logprob
            if is_unlikely and limits.no_speech is not None:
                if no_speech is None:
                    no_speech = await self._no_speech(item, before)
                if no_speech > limits.no_speech:
                    return replace(window, no_speech_prob=no_speech, is_speech=False)
            repeats = limits.compression_ratio is not None and window.compression_ratio > limits.compression_ratio
            if temperature == last or not (is_unlikely or repeats):
                break
        return window

    def _judged(self, drawn: Drawn, temperature: float, no_speech: float | None) -> DecodedWindow:
        logprobs = [each.logprob for _, each in drawn]
        average = sum(logprobs) / max(1, len(logprobs))
        if drawn and drawn[-1][0] in self._loaded.engine.model.eos_token_ids:
            drawn = drawn[:-1]
        text = self.text(id for id, _ in drawn)
        data = text.encode()
        ratio = len(data) / len(zlib.compress(data)) if data else 0.0
        return DecodedWindow(drawn, text, temperature, average, ratio, no_speech)

    def text(self, ids: Iterable[int]) -> str:
        """Decode `ids` to text, without timestamps and control tokens."""
        return self._loaded.tokenizer.decode([id for id in ids if id < self._format.end])

    async def _no_speech(self, item: api.MediaItem, before: Sequence[int]) -> float:
        ((_, drawn),) = await self._run(self._probe(item, self._format.start_ids(before), (self._format.no_speech,)))
        return math.exp(drawn.top[0][1])

    def _params(self, prompt: Sequence[int], temperature: float, *, is_begun: bool) -> api.SamplingParams:
        model, request = self._loaded.engine.model, self._request
        room = model.max_model_len - len(prompt)
        max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
        sampling = structs.replace(request.sampling, temperature=temperature)
        core = GenerateRequest(prompt=Texts([list(prompt)]), sampling=sampling, max_tokens=max_tokens)
        (params,) = sampling_params(core, len(prompt), (), self._loaded.defaults, model)
        rules = replace(self._rules, first_suppressed_ids=frozenset()) if is_begun else self._rules
        return replace(params, logprobs=0, transcript=rules)

    def _probe(self, item: api.MediaItem, prompt: Sequence[int], ids: tuple[int, ...]) -> api.Request:
        """Return an engine request for the log-probabilities of `ids` as the next token after `prompt`."""
        params = api.SamplingParams(1, temperature=0.0, ignore_eos=True, logprobs=len(ids), logprob_token_ids=ids)
        return self._engine_request(item, prompt, params)

    def _engine_request(self, item: api.MediaItem, prompt: Sequence[int], params: api.SamplingParams) -> api.Request:
        self._num_requests += 1
        self.num_prompt_tokens += len(prompt)
        id = f"{self._id}-{self._num_requests - 1}"
        return self._terms.engine_request(id, prompt, params, self._loaded.adapter, media=(item,), speculative=False)

    async def _run(self, request: api.Request, note: NoteIds | None = None) -> Drawn:
        drawn: Drawn = []
        async with self._loaded.engine.submit([request], continues=self._num_requests > 1) as stream:
            async for outputs in stream:
                for output in outputs:
                    if output.finish in FAILED:
                        raise failure_of(output)
                    if output.finish is api.FinishReason.ABORT:
                        raise Aborted
                    if note is not None:
                        note(output.token_ids)
                    drawn += zip(output.token_ids, output.logprobs or (), strict=True)
        self.num_output_tokens += len(drawn)
        return drawn
