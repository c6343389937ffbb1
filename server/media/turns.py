"""Voice activity detection: finds where speech starts and ends in streamed audio, from the energy of short frames.

A frame is speech if it is louder than a threshold and clearly louder than the background. The background level is the minimum of
recent frames (Martin 2001). Time is counted in samples, so the result does not depend on how the audio is split."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from server.media.log_mel import Float32s
from server.media.silence import FRAME_S

MIN_SPEECH_FRAMES: Final = 3  # a shorter sound is a click
MARGIN_DB: Final = 10.0  # above the background
CLIMB_DB: Final = 0.02  # of the background's level with each frame: 1 dB a second
QUIETEST_DB, LOUDEST_DB = -70.0, -20.0  # thresholds 0 and 1
_LEAST: Final = 1e-12


@dataclass(frozen=True, slots=True)
class Began:
    """Event: speech has started. `at`: index of its first sample, counted from the start of the audio stream."""

    at: int


@dataclass(frozen=True, slots=True)
class SpeechAudio:
    """Event: audio samples [N] of the current speech."""

    samples: Float32s


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: speech has ended. `at`: index of the sample after its last sample."""

    at: int


Turn = Began | SpeechAudio | Ended


class Turns:
    """Voice activity detector. `threshold`: loudness from 0 to 1; 0.5 is -45 dB of full scale. `silence_ms`: silence that ends
    speech. `prefix_ms`: audio before the first loud frame that is included in the speech."""

    def __init__(self, rate: int, threshold: float, silence_ms: int, prefix_ms: int, at: int = 0) -> None:
        """Create the detector. `at`: index of the first sample that `feed` will receive."""
        self._size = int(rate * FRAME_S)
        self._threshold_db = QUIETEST_DB + threshold * (LOUDEST_DB - QUIETEST_DB)
        frame_ms = 1000 * FRAME_S
        self._max_silent = max(1, round(silence_ms / frame_ms))
        self._recent: deque[Float32s] = deque(maxlen=MIN_SPEECH_FRAMES + round(prefix_ms / frame_ms))
        self._rest = np.zeros(0, np.float32)
        self._num_samples = at  # of whole frames, and before
        self._num_loud = self._num_silent = 0
        self._background_db = self._threshold_db - MARGIN_DB
        self.is_speech = False

    def feed(self, samples: Float32s) -> Iterator[Turn]:
        """Yield the starts, ends and audio of speech in `samples` [N], which continue the samples of the previous call."""
        samples = np.concatenate([self._rest, samples])
        num_frames = len(samples) // self._size
        frames = samples[: num_frames * self._size].reshape(num_frames, self._size)
        self._rest = samples[num_frames * self._size :]
        energies = np.einsum("ij,ij->i", frames, frames) / self._size
        for frame, level_db in zip(frames, 10.0 * np.log10(np.maximum(energies, _LEAST)), strict=True):
            self._num_samples += self._size
            yield from self._frame(frame, float(level_db))

    def end(self) -> Iterator[Turn]:
        """End the current speech, if any. Yield its last samples, less than one frame, and its end."""
        if self.is_speech:
            rest, self._rest = self._rest, self._rest[:0]
            self._num_samples += len(rest)
            yield SpeechAudio(rest)
            yield self._ended()

    def _frame(self, frame: Float32s, level_db: float) -> Iterator[Turn]:
        is_loud = level_db > max(self._threshold_db, self._background_db + MARGIN_DB)
        self._background_db = max(min(level_db, self._background_db + CLIMB_DB), self._threshold_db - MARGIN_DB)
        if self.is_speech:
            self._num_silent = 0 if is_loud else self._num_silent + 1
            yield SpeechAudio(frame)
            if self._num_silent >= self._max_silent:
                yield self._ended()
            return
        self._recent.append(frame)
        self._num_loud = self._num_loud + 1 if is_loud else 0
        if self._num_loud >= MIN_SPEECH_FRAMES:
            before = np.concatenate(self._recent)
            self._recent.clear()
            self.is_speech, self._num_silent = True, 0
            yield Began(self._num_samples - len(before))
            yield SpeechAudio(before)

    def _ended(self) -> Ended:
        self.is_speech, self._num_loud = False, 0
        return Ended(self._num_samples)


def joined(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Yield `turns` with each sequence of consecutive SpeechAudio events concatenated to one."""
    pieces: list[Float32s] = []
    for turn in turns:
        if isinstance(turn, SpeechAudio):
            pieces.append(turn.samples)
            continue
        if pieces:
            yield SpeechAudio(np.concatenate(pieces))
            pieces = []
        yield turn
    if pieces:
        yield SpeechAudio(np.concatenate(pieces))
