"""Log-mel spectrograms for Whisper (Radford et al. 2022), equal to those of transformers' WhisperFeatureExtractor.

Only numpy is used: it computes a 30 s window faster than the extractor, whose import alone takes seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Float32s = NDArray[np.float32]

_LEAST: Final = 1e-10  # of a band's energy: silence is -10
_RANGE: Final = 8.0  # decades below the loudest band that are kept
_PIECE_FRAMES: Final = 3000
_LINEAR_HZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27.0  # of Slaney's scale


class LogMel:
    """Log-mel spectrogram of audio at `sample_rate` Hz: `num_mel_bins` bands from windows of `n_fft` samples, one window every
    `hop_length` samples."""

    def __init__(self, num_mel_bins: int, sample_rate: int = 16_000, n_fft: int = 400, hop_length: int = 160) -> None:
        self._n_fft = n_fft
        self._hop = hop_length
        self._filters = _filters(num_mel_bins, n_fft, sample_rate)
        self._window = np.hanning(n_fft + 1)[:-1].astype(np.float32)

    def num_frames(self, num_samples: int) -> int:
        return num_samples // self._hop

    def loudest(self, samples: Float32s, start: int = 0) -> float:
        """Return the maximum log10 energy in the _PIECE_FRAMES frames of `samples` that begin with frame `start`."""
        return float(self._frames(samples, start, _PIECE_FRAMES).max(initial=np.log10(_LEAST)))

    def pieces(self, num_samples: int) -> range:
        """Return the `start` values for which calls of `loudest` cover all frames of `num_samples` samples."""
        return range(0, self.num_frames(num_samples), _PIECE_FRAMES)

    def features(self, samples: Float32s, start: int, num_frames: int, loudest: float | None = None) -> Float32s:
        """Return the features [num_mel_bins, num_frames] of frames `start` to `start + num_frames - 1` of `samples` [N]. Frames
        after the end of the audio are zero.

        `loudest`: maximum log10 energy of the whole audio, None for the maximum of these frames. Energies more than 8 decades
        below `loudest` are raised to that level."""
        frames = self._frames(samples, start, num_frames)
        if loudest is None:
            loudest = float(frames.max(initial=np.log10(_LEAST)))
        found = np.zeros((len(frames), num_frames), np.float32)
        found[:, : frames.shape[1]] = (np.maximum(frames, np.float32(loudest - _RANGE)) + 4.0) / 4.0
        return found

    def _frames(self, samples: Float32s, start: int, num_frames: int) -> Float32s:
        """Return log10 energies [num_mel_bins, n], n <= `num_frames`, of the frames that begin with frame `start`. Frame f is
        centred at sample f * hop_length. The audio is padded by reflection at both ends."""
        num = max(0, min(num_frames, self.num_frames(len(samples)) - start))
        half = self._n_fft // 2
        first, last = start * self._hop - half, (start + num - 1) * self._hop + half
        piece = samples[max(0, first) : max(0, last)]
        if num and (first < 0 or last > len(samples)):
            piece = np.pad(piece, (max(0, -first), max(0, last - len(samples))), mode="reflect")
        if not num:
            return np.zeros((self._filters.shape[0], 0), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(piece, self._n_fft)[:: self._hop] * self._window
        spectrum = np.fft.rfft(windows, axis=1)
        energy = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
        found: Float32s = np.log10(np.maximum(self._filters @ energy.T, np.float32(_LEAST)))
        return found


@lru_cache
def _filters(num_mel_bins: int, n_fft: int, sample_rate: int) -> Float32s:
    """Return triangular filters [num_mel_bins, n_fft / 2 + 1] on Slaney's mel scale. All filters have the same area."""
    edges = _hertz(np.linspace(0.0, _mels(sample_rate / 2), num_mel_bins + 2))
    bins = np.linspace(0.0, sample_rate / 2, n_fft // 2 + 1)
    slopes = edges[:, None] - bins
    widths = np.diff(edges)
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    areas = 2.0 / (edges[2:] - edges[:-2])
    found: Float32s = (np.maximum(0.0, np.minimum(rising, falling)) * areas[:, None]).astype(np.float32)
    return found


def _mels(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz * _LINEAR_MELS / _LINEAR_HZ
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    logarithmic = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _LINEAR_HZ / _LINEAR_MELS, logarithmic)
