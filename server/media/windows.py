"""Windows of log-mel features of a request's audio, computed on threads. A window may begin at any frame; zeros pad its end."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from runtime.api import MediaItem, SpeechInfo
from server.http.call import Call
from server.http.offload import Offload, Pieces
from server.media.log_mel import Float32s, LogMel
from server.media.sound import read_sound

COST: Final = 1 << 20  # of work on a thread, as texts are counted: much


class Sound:
    """Mono audio at the model's sampling rate, split into windows of features. `num_frames`: number of frames without padding."""

    def __init__(self, samples: Float32s, info: SpeechInfo, mel: LogMel) -> None:
        self._mel = mel
        self._window = info.num_frames
        size = info.num_frames * info.hop_length
        self._is_short = len(samples) <= size
        # Short sound is padded before its features are made, as the model was trained; long sound behind them.
        self._samples = np.pad(samples, (0, size - len(samples))) if self._is_short else samples
        self.num_frames = -(-len(samples) // info.hop_length) if self._is_short else len(samples) // info.hop_length
        self._whole: Float32s | None = None
        self._loudest: float | None = None

    def window(self, start: int) -> Pieces[MediaItem]:
        """Compute the features of the window that begins at frame `start`. Return them as a media item."""
        features = yield from (self._of_short(start) if self._is_short else self._of_long(start))
        digest = hashlib.sha256(b"speech" + features.tobytes()).digest()
        return MediaItem("audio", digest, np.zeros(1, np.int32), {"input_features": features})

    def _of_short(self, start: int) -> Pieces[Float32s]:
        if self._whole is None:
            self._whole = self._mel.features(self._samples, 0, self._window)
        if not start:
            return self._whole
        yield
        features = np.zeros_like(self._whole)
        features[:, : self._window - start] = self._whole[:, start:]
        return features

    def _of_long(self, start: int) -> Pieces[Float32s]:
        if self._loudest is None:
            loudest = -np.inf
            for piece in self._mel.pieces(len(self._samples)):
                loudest = max(loudest, self._mel.loudest(self._samples, piece))
                yield
            self._loudest = loudest
        return self._mel.features(self._samples, start, self._window, self._loudest)


def joined(pieces: Sequence[Float32s]) -> Float32s:
    """Concatenate pieces of audio, each [N], to one array."""
    return np.concatenate([np.zeros(0, np.float32), *pieces])


async def read_samples(
    workers: Offload, call: Call, read: Callable[[], bytes], where: str, *, rate: int, max_seconds: float
) -> Float32s:
    """Decode an audio file on a thread. Return its samples, float32 [N], at `rate` Hz. `read`: returns the file's bytes. `where`:
    name of the file's field in the request.

    Raises InvalidMedia, MediaNotInstalled or TooManyRequests."""

    def work() -> Pieces[Float32s]:
        return (yield from read_sound(read(), where, rate=rate, max_seconds=max_seconds))

    return await workers.run_pieces(COST, work(), call.caller)
