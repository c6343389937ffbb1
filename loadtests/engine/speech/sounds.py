"""Audio of the speech benchmark, as float32 samples at 16 kHz: generated, or read from WAV files with the standard library."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
Samples = NDArray[np.float32]


def generated(seconds: float, seed: int) -> Samples:
    """Return noise in syllables: four per second, each of a different pitch, with short pauses."""
    random, time = np.random.default_rng(seed), np.arange(int(seconds * RATE)) / RATE
    pitches = random.uniform(90.0, 300.0, int(seconds * 4) + 1)[(time * 4).astype(int)]
    voice = np.sin(2 * np.pi * np.cumsum(pitches) / RATE) + 0.3 * random.standard_normal(len(time))
    return (0.2 * voice * np.abs(np.sin(4 * np.pi * time))).astype(np.float32)


def read(path: Path) -> Samples:
    """Return the samples of a WAV file. Raises ValueError for other formats than 16 kHz, mono, 16 bits."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise ValueError(f"{path}: expected a WAV file of {RATE} Hz, one channel and 16 bits")
        return (np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768).astype(np.float32)


def of_round(whole: Sequence[Samples], num_files: int, number: int) -> list[Samples]:
    """Return the audio of round `number`. Each file of each round has a different volume, so that no result can be cached."""
    gains = 1.0 - 0.002 * (number * num_files + np.arange(num_files) % 100)
    return [whole[file % len(whole)] * np.float32(gains[file]) for file in range(num_files)]
