"""Transcripts of tiny random Whispers have the tokens of transformers' `generate`: one window, several, and text before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from server.generate.speech.request import Thresholds, TranscribeRequest
from server.generate.speech.transcribe import transcribe
from server.http.call import Call
from tests.server.speech.tiny import END, RATE
from tests.server.speech.whisper import WINDOW_S, loaded, written

NEVER = Thresholds(None, None, None)


def noise(seconds: float, seed: int) -> np.ndarray:
    """Noise that swells, in other bands every second."""
    random = np.random.default_rng(seed)
    samples = random.standard_normal(int(seconds * RATE))
    for second in range(int(seconds)):
        part = samples[second * RATE : (second + 1) * RATE]
        kernel = np.sin(np.arange(40) * random.uniform(0.1, 2.0)) * random.uniform(0.01, 0.3)
        part[:] = np.convolve(part, kernel, mode="same")
    return samples.astype(np.float32)


@pytest.fixture(scope="module", params=range(2))
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    return folder, written(folder, request.param)


@torch.inference_mode()
def expected(model, samples: np.ndarray, **options) -> list[int]:
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S)
    length = {"truncation": False, "padding": "longest"} if len(samples) > WINDOW_S * RATE else {}
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt", **length).input_features
    found = model.generate(features, temperature=0.0, task="transcribe", language="en", **options)
    return [id for id in found[0].tolist() if id != END]


async def tokens(folder, samples: np.ndarray, **wanted) -> list[int]:
    request = TranscribeRequest(language="en", temperatures=(0.0,), thresholds=NEVER, **wanted)
    async with loaded(folder) as (config, model):
        spoken = await transcribe(config, Call(), model, samples, request, id="t")
    return [id for segment in spoken.segments for id in segment.tokens]


async def test_one_window_without_timestamps(tiny):
    folder, model = tiny
    samples = noise(2.4, 1)
    found = await tokens(folder, samples)
    assert len(found) > 10
    assert found == expected(model, samples)[: len(found)]  # it goes on where timestamps come unasked


@pytest.mark.parametrize("after_text", [False, True])
async def test_long_form_in_order(tiny, after_text):
    folder, model = tiny
    samples = noise(10.0, 2)
    found = await tokens(folder, samples, timestamps=True, in_order=True, after_text=after_text)
    assert len(found) > 10
    assert found == expected(model, samples, return_timestamps=True, condition_on_prev_tokens=after_text)


async def test_the_language_is_the_likeliest(tiny):
    folder, model = tiny
    samples = noise(3.0, 3)
    features = WhisperFeatureExtractor(chunk_length=WINDOW_S)(samples, sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        wanted = int(model.detect_language(features.input_features)[0])
    async with loaded(folder) as (config, served):
        request = TranscribeRequest(temperatures=(0.0,), thresholds=NEVER)
        spoken = await transcribe(config, Call(), served, samples, request, id="t")
        assert served.speech.format.languages[spoken.language] == wanted
