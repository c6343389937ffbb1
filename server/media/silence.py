"""Splitter of long audio at its quietest points, from the energy of short frames, without a model."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

FRAME_S: Final = 0.02
SMOOTH_FRAMES: Final = 15  # 0.3 s: a pause between words, not the closure of a consonant


def cuts(samples: NDArray[np.float32], rate: int, max_s: float, search_s: float) -> list[tuple[int, int]]:
    """Split `samples` [N] into spans of at most `max_s` seconds, returned as (start, end) sample indices. Each span ends at the
    quietest point in the last `search_s` seconds before its maximum length."""
    size = int(rate * FRAME_S)
    longest, search = int(max_s / FRAME_S) * size, int(search_s / FRAME_S)
    spans: list[tuple[int, int]] = []
    start = 0
    while len(samples) - start > longest:
        latest = start + longest
        frames = samples[latest - search * size : latest].reshape(search, size)
        energy = np.einsum("ij,ij->i", frames, frames)
        smooth = np.convolve(energy, np.ones(SMOOTH_FRAMES, np.float32), mode="valid")
        quietest = len(smooth) - 1 - int(smooth[::-1].argmin())  # the last of equals: long windows
        end = latest - (search - quietest - SMOOTH_FRAMES // 2) * size
        spans.append((start, end))
        start = end
    return [*spans, (start, len(samples))]


def loudness(samples: NDArray[np.float32]) -> float:
    """Return the root mean square of `samples` [N] in dB of full scale, at least -120."""
    mean = float(np.dot(samples, samples)) / max(1, len(samples))
    return 10.0 * float(np.log10(max(mean, 1e-12)))
