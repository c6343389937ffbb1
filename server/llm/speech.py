"""Transcription in `LLM`: audio inputs for a speech model, and transcripts."""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.api import EngineError
from server.api.service import Service
from server.generate.generation import EngineFailed
from server.generate.speech.request import Segment, TranscribeRequest
from server.generate.speech.subtitles import srt, vtt
from server.generate.speech.transcribe import MAX_AT_ONCE, transcribe
from server.http.call import Call
from server.http.errors import ApiError
from server.http.watch import gather_or_cancel
from server.llm.prepare import naming
from server.llm.progress import Progress
from server.llm.prompts import as_value_error
from server.llm.sequence_limit import SequenceLimit
from server.media.log_mel import Float32s
from server.media.sound import given_samples
from server.media.windows import COST, read_samples
from server.models.model import LoadedModel

READ_AHEAD = 4  # files whose samples are in memory before their transcription starts

Audio = str | os.PathLike[str] | bytes | Any  # a path, a file's bytes, samples, or samples and their rate


@dataclass(frozen=True, slots=True)
class TranscriptionOutput:
    """Transcript of one audio file. `duration`: in seconds. `segments`: their times are exact only if timestamps were requested."""

    text: str
    language: str | None
    duration: float
    segments: Sequence[Segment]

    @property
    def srt(self) -> str:
        return srt(self.segments)

    @property
    def vtt(self) -> str:
        return vtt(self.segments)


Transcribed = TranscriptionOutput | ValueError


def is_samples(audio: Any) -> bool:
    """Return whether `audio` is a pair of samples and their rate. False for a list of several audio inputs."""
    return isinstance(audio, tuple) and len(audio) == 2 and isinstance(audio[1], int)


class Transcriber:
    """Transcription with a loaded speech model. `places`: limit of the windows that are decoded at a time."""

    def __init__(self, service: Service, loaded: LoadedModel, places: SequenceLimit) -> None:
        self._service = service
        self._loaded = loaded
        self._places = places
        self._reading = asyncio.Semaphore(READ_AHEAD)

    async def outputs(
        self, audios: Sequence[Audio], request: TranscribeRequest, progress: Progress, *, return_exceptions: bool
    ) -> list[Transcribed]:
        """Return the transcripts in the order of `audios`. The first failure cancels the other transcripts. With
        `return_exceptions`, a ValueError is returned in place of the transcript instead. Raises ValueError for audio that cannot
        be read or unsupported options, RuntimeError if the engine fails."""
        found: list[Transcribed | None] = [None] * len(audios)
        todo = iter(enumerate(audios))

        async def lane() -> None:
            for number, audio in todo:
                try:
                    with naming("audio", number, len(audios)):
                        found[number] = await self.output(audio, request)
                except ValueError as error:
                    if not return_exceptions:
                        raise
                    found[number] = error
                progress.done(0, failed=isinstance(found[number], ValueError))

        await gather_or_cancel(lane() for _ in range(min(self._places.limit, len(audios))))
        return [output for output in found if output is not None]

    async def output(self, audio: Audio, request: TranscribeRequest) -> TranscriptionOutput:
        """Return the transcript of one audio input. Raises the errors of `outputs`."""
        id = uuid.uuid4().hex
        call = Call(id=id, offload=self._service.offload)
        try:
            async with AsyncExitStack() as stack:
                async with self._reading:
                    samples = await self._samples(call, audio)
                    await stack.enter_async_context(self._places.room_for(self._num_places(samples)))
                spoken = await transcribe(self._service.config, call, self._loaded, samples, request, id=id)
        except ApiError as error:
            raise as_value_error(error) from None
        except (EngineFailed, EngineError) as error:
            raise RuntimeError(f"the engine failed on this audio: {error}") from None
        finally:
            call.end()
        return TranscriptionOutput(spoken.text, spoken.language, spoken.duration_s, spoken.segments)

    def _num_places(self, samples: Float32s) -> int:
        """Return the number of windows to count for a file, more if its samples use much of the memory for audio."""
        speech = self._loaded.require_speech()
        windows = -(-len(samples) // (speech.format.info.num_frames * speech.format.info.hop_length))
        share = self._places.limit * samples.nbytes / speech.max_held_bytes
        return max(min(windows, MAX_AT_ONCE), math.ceil(share))

    async def _samples(self, call: Call, audio: Audio) -> Float32s:
        speech, max_seconds = self._loaded.require_speech(), self._service.config.max_audio_seconds
        rate = speech.format.info.sample_rate
        if isinstance(audio, str | os.PathLike | bytes):
            read = (lambda: audio) if isinstance(audio, bytes) else Path(audio).read_bytes
            try:
                return await read_samples(speech.workers, call, read, "audio", rate=rate, max_seconds=max_seconds)
            except OSError as error:
                raise ValueError(f"audio: {audio!r} cannot be read: {error.strerror or error}") from None
        return await speech.workers.run(COST, lambda: given_samples(audio, "audio", rate=rate, max_seconds=max_seconds))
