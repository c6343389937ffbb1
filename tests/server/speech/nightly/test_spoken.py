"""Whisper tiny.en on ten spoken texts: tokens and timestamps equal transformers', and words are as right as faster-whisper's."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers

from loadtests.engine.speech.systems import advice_of_ctranslate2, state_of_ctranslate2
from runtime.weights.fetch import resolve
from server.llm.llm import LLM
from tests.server.speech.spoken import MISSING, RATE, Spoken, spoken

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} of Debian's packages not installed")

END, WINDOW = 50_256, 30 * RATE
GREEDY = {
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}
MAX_WER_APART = 0.005


@dataclass(frozen=True)
class Peer:
    """transformers with the same weights. `ids`: its tokens, without prompt and end."""

    model: transformers.WhisperForConditionalGeneration

    @torch.inference_mode()
    def ids(self, samples: np.ndarray, **options: bool) -> list[int]:
        extract, is_long = transformers.WhisperFeatureExtractor(), len(samples) > WINDOW
        length = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
        inputs = extract(samples, sampling_rate=RATE, return_tensors="pt", **length)
        found = self.model.generate(**inputs, temperature=0.0, **options)[0].tolist()
        return [id for id in found if id != END and id not in (50_257, 50_362)]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory) -> list[Spoken]:
    return spoken(tmp_path_factory.mktemp("spoken"))


@pytest.fixture(scope="module")
def files():
    return resolve("whisper-tiny.en", None, lambda progress: None)


@pytest.fixture(scope="module")
def peer(files) -> Peer:
    from tokenizers import Tokenizer

    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**files.config)).eval()
    model.load_state_dict(state_of_ctranslate2(files.path))
    advice = advice_of_ctranslate2(files.path, Tokenizer.from_file(str(files.tokenizer_path / "tokenizer.json")))
    model.generation_config = transformers.GenerationConfig(**advice, max_initial_timestamp_index=50)
    return Peer(model)


@pytest.fixture(scope="module")
def llm():
    with LLM("whisper-tiny.en", device="cpu", quantization="none", max_num_seqs=8) as llm:
        yield llm


def ids_of(llm: LLM, samples: np.ndarray, **options: bool) -> list[int]:
    (found,) = llm.transcribe((samples, RATE), language="en", use_tqdm=False, **GREEDY, **options)
    return [id for segment in found.segments for id in segment.tokens]


@pytest.mark.parametrize("timestamps", [False, True])
def test_short_texts_equal_transformers(llm, peer, sounds, timestamps):
    for sound in sounds[:8]:
        wanted = peer.ids(sound.samples, return_timestamps=timestamps)
        assert ids_of(llm, sound.samples, timestamps=timestamps) == wanted, sound.text


def test_long_texts_equal_transformers(llm, peer, sounds):
    """Each window begins where the last segment of the one before ends, and continues its text."""
    for sound in sounds[8:]:
        wanted = peer.ids(sound.samples, return_timestamps=True, condition_on_prev_tokens=True)
        assert ids_of(llm, sound.samples, timestamps=True, condition_on_previous_text=True) == wanted, sound.text


def word_error_rate(sounds: list[Spoken], texts: list[str]) -> float:
    """Return the edit distance in words by the number of words."""

    def words(text: str) -> list[str]:
        return re.sub(r"[^a-z0-9' ]", " ", text.lower().replace("-", " ")).split()

    distance = pytest.importorskip("rapidfuzz.distance.Levenshtein").distance
    pairs = [(words(sound.text), words(text)) for sound, text in zip(sounds, texts, strict=True)]
    return sum(distance(*pair) for pair in pairs) / sum(len(wanted) for wanted, _ in pairs)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_words_are_as_right_as_those_of_faster_whisper(files, sounds, quantization):
    faster_whisper = pytest.importorskip("faster_whisper")
    compute_type = {"none": "float32", "int8": "int8"}[quantization]
    theirs = faster_whisper.WhisperModel(str(files.path), device="cpu", compute_type=compute_type, cpu_threads=2)
    texts = [
        "".join(segment.text for segment in theirs.transcribe(sound.samples, language="en", beam_size=1)[0])
        for sound in sounds
    ]
    with LLM("whisper-tiny.en", device="cpu", quantization=quantization, max_num_seqs=8) as llm:
        found = llm.transcribe([(sound.samples, RATE) for sound in sounds], language="en", use_tqdm=False)
    ours, other = word_error_rate(sounds, [each.text for each in found]), word_error_rate(sounds, texts)
    print(f"word error rate, {quantization}: {ours:.2%}, faster-whisper {compute_type}: {other:.2%}")
    assert ours < other + MAX_WER_APART
    assert ours < 0.2
