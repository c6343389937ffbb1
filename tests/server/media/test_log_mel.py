"""Log-mel frames: equal to transformers' extractor, whole and window by window; and where long sound is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from server.media.log_mel import LogMel
from server.media.silence import cuts

RATE = 16_000


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1
    return (samples * np.sin(np.arange(len(samples)) / 9000.0)).astype(np.float32)


@pytest.mark.parametrize("bands", [80, 128])
def test_short_sound_equals_the_extractor(bands):
    samples = noise(3.3)
    wanted = WhisperFeatureExtractor(feature_size=bands)(samples, sampling_rate=RATE).input_features[0]
    mel, padded = LogMel(bands), np.zeros(30 * RATE, np.float32)
    padded[: len(samples)] = samples
    found = mel.features(padded, 0, 3000)
    assert found.shape == wanted.shape
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-4)


def test_windows_of_long_sound_are_parts_of_the_extractors_frames():
    samples = noise(95.37)
    whole = WhisperFeatureExtractor()(samples, sampling_rate=RATE, truncation=False, padding="longest").input_features[
        0
    ]
    mel = LogMel(80)
    assert whole.shape[1] == mel.num_frames(len(samples))
    loudest = max(mel.loudest(samples, start) for start in mel.pieces(len(samples)))
    for start in (0, 1, 2870, 7777):
        found = mel.features(samples, start, 3000, loudest)
        wanted = whole[:, start : start + 3000]
        np.testing.assert_allclose(found[:, : wanted.shape[1]], wanted, atol=2e-4)
        assert not found[:, wanted.shape[1] :].any()


def test_frames_behind_the_end_are_zeros():
    assert not LogMel(80).features(noise(1.0), 500, 3000, 0.0).any()


def test_long_sound_is_cut_in_its_pauses():
    samples = noise(100.0, seed=1)
    pauses = [(26.0, 26.5), (52.0, 52.5), (75.0, 75.6)]
    for begin, end in pauses:
        samples[int(begin * RATE) : int(end * RATE)] = 0.0
    spans = cuts(samples, RATE, 30.0, 10.0)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(samples)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert all(end - start <= 30 * RATE for start, end in spans)
    assert all(begin <= end / RATE <= until for (_, end), (begin, until) in zip(spans, pauses, strict=False))


def test_short_sound_is_not_cut():
    assert cuts(noise(30.0), RATE, 30.0, 10.0) == [(0, 30 * RATE)]
    assert cuts(noise(0.01), RATE, 30.0, 10.0) == [(0, 160)]
